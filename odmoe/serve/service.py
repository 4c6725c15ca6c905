"""What the service has: a model on a cluster, its name, and how it answers if a request does not say."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from odmoe.serve.answers import AnswerPool
from odmoe.serve.api_error import ApiError, ClientGoneError, cause_of, to_api_error
from odmoe.serve.bounds.memory import Memory
from odmoe.serve.request_fields import UnknownFields
from odmoe.token_texts import TokenTexts

if TYPE_CHECKING:
    from odmoe.api.model import Model
    from odmoe.serve.metrics import Metrics
    from odmoe.settings.settings import Settings

CLOSE_S = 5.0
"""Longest wait for threads whose answers were given up: a cluster may be gone."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_tokens: int | None = None
    """Of a chat's answer that does not say; None: to the end of the context."""
    request_timeout_s: float | None = None
    body_bytes: int = 16 << 20
    """Of a request."""
    body_s: float = 60.0
    """To send it."""
    request_bytes: int = 256 << 20
    """Of all requests together: bodies, prompts, and results that wait for their clients."""


class UnderWay(Protocol):
    """A request for answers, from its headers to the end of its response."""

    @property
    def waiting(self) -> int:
        """How many of its answers have no token yet."""

    @property
    def answering_count(self) -> int:
        """How many of its answers have a token, and not their last."""

    def stop(self, error: Exception) -> None:
        """The client gets `error` in place of what is left."""


class Service:
    """Everything that the routes share."""

    def __init__(self, model: Model, name: str, served: Settings, limits: Limits, meter: Metrics) -> None:
        """`served`: the settings of the running nodes."""
        self.model, self.name, self.served, self.limits, self.meter = model, name, served, limits, meter
        self.settings = model.opened.settings
        """How answers are chosen if the request does not say."""
        self.answer_pool = AnswerPool(served.parallel, served.queue)
        self.memory = Memory(limits.request_bytes)
        self.texts = TokenTexts(model.opened.tokenizer)
        self.created = int(time.time())
        self.under_way: set[UnderWay] = set()
        """A drain waits until there is none."""
        meter.watch(
            lambda: sum(one.waiting for one in list(self.under_way)),
            lambda: sum(one.answering_count for one in list(self.under_way)),
        )
        self.notify: Callable[[str], None] = lambda line: None
        """Gets a line about each answer that is begun again, since its main node was lost."""
        self.unknown_fields = UnknownFields(False, lambda line: self.notify(line))
        """What is done about fields of requests that are not known."""
        self.aliases: tuple[str, ...] = ()
        """More names of the model."""
        self.log_cause: Callable[[str], None] = partial(print, file=sys.stderr)
        """Gets the causes of what clients are told without details."""
        self.failed = threading.Event()
        """The cluster could not compute an answer, and has computed none since."""
        self.stopping = False
        """No request is taken any more."""
        self.ready_pool = ThreadPoolExecutor(1, "odmoe-ready")
        self.scrape_pool = ThreadPoolExecutor(1, "odmoe-scrape")
        """Of their own: a cluster that does not answer holds neither one another up, nor requests."""
        self.body_pool = ThreadPoolExecutor(1, "odmoe-body")
        """Of one thread: to take a body's JSON apart holds up all others of this process for a moment."""

    @property
    def context(self) -> int:
        return self.model.opened.context

    @property
    def tokenizer(self) -> Any:
        return self.model.opened.tokenizer

    @property
    def fingerprint(self) -> str:
        """What answers depend on, for clients that compare."""
        return f"fp_{self.model.opened.store.manifest.fingerprint[:10]}"

    def check_name(self, name: str) -> None:
        """Raises ApiError for another model's."""
        if not name or name not in (self.name, *self.aliases, self.settings.model, self.served.model):
            raise ApiError(
                404,
                f"the model {name!r} does not exist; {self.name!r} is served",
                param="model",
                code="model_not_found",
            )

    def log_failure(self, request_id: str, error: Exception) -> None:
        """What the client is not told of an error."""
        cause = cause_of(error)
        if cause is None or isinstance(error, ClientGoneError):
            return
        answer = to_api_error(error, request_id)
        if answer.status >= 500 and answer.code != "cancelled":
            self.failed.set()
        if answer.status >= 500:
            self.log_cause(f"{request_id} {cause}")

    def close(self) -> None:
        """Wait for the threads of answers that were given up."""
        self.answer_pool.close(CLOSE_S)
        for pool in (self.ready_pool, self.scrape_pool, self.body_pool):
            pool.shutdown(wait=False)
