"""What the service has: a model on a cluster, its name, and how it answers where a request does not say."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from odmoe.serve.answers import Desk
from odmoe.serve.api_error import ApiError
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


class UnderWay(Protocol):
    """A request for answers, from its headers to the end of its response."""

    @property
    def waiting(self) -> int:
        """How many of its answers have no token yet."""

    @property
    def answered(self) -> int:
        """How many of its answers have a token, and not their last."""

    def stop(self, error: Exception) -> None:
        """The client gets `error` in place of what is left."""


class Service:
    """Everything that the routes share."""

    def __init__(self, model: Model, name: str, served: Settings, limits: Limits, meter: Metrics) -> None:
        """`served`: the settings of the running nodes."""
        self.model, self.name, self.served, self.limits, self.meter = model, name, served, limits, meter
        self.settings = model.opened.settings
        """How answers are chosen where the request does not say."""
        self.desk = Desk(served.parallel, served.queue)
        self.texts = TokenTexts(model.opened.tokenizer)
        self.created = int(time.time())
        self.under_way: set[UnderWay] = set()
        """A drain waits until there is none."""
        meter.watch(
            lambda: sum(one.waiting for one in list(self.under_way)),
            lambda: sum(one.answered for one in list(self.under_way)),
        )
        self.notify: Callable[[str], None] = lambda line: None
        """Gets a line about each answer that is begun again, since its main node was lost."""
        self.stopping = False
        """No request is taken any more."""
        self.ready_pool = ThreadPoolExecutor(1, "odmoe-ready")
        self.scrape_pool = ThreadPoolExecutor(1, "odmoe-scrape")
        """Of their own: a cluster that does not answer holds neither one another up, nor requests."""

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
        if not name or name not in (self.name, self.settings.model, self.served.model):
            raise ApiError(
                404,
                f"the model {name!r} does not exist; {self.name!r} is served",
                param="model",
                code="model_not_found",
            )

    def close(self) -> None:
        """Wait for the threads of answers that were given up."""
        self.desk.close(CLOSE_S)
        for pool in (self.ready_pool, self.scrape_pool):
            pool.shutdown(wait=False)
