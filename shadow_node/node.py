"""The shadow node: runs the main model's requests a few layers ahead and sends its routing (SEP, section 3.2)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpoint import kv
from checkpoint.tensors import tensor_from_bytes
from scheduler.alignment import Alignment
from scheduler.errors import LinkError, ProtocolError
from shadow_node.model import ShadowModel
from shadow_node.pace import Pace, RealPace
from wire.base import Channel
from wire.machine import host_name, processor_name
from wire.messages import (
    PROTOCOL_VERSION,
    Align,
    AskUsage,
    CloseRequest,
    Failed,
    Message,
    OpenRequest,
    Prediction,
    ShadowReady,
    ShadowUsage,
)
from wire.serial import SerialThread
from wire.sessions import Session, Sessions


class _Closed(Exception):
    """The request was closed during a pass."""


@dataclass(slots=True, eq=False)
class _Followed:
    """One request."""

    opened: OpenRequest
    policy: Alignment
    cache: Any
    step: int
    """The next decode pass."""
    token: int = -1
    """The token that it reads, unless one is aligned."""
    credit: int = -1
    """The last pass that the main model has announced."""
    aligned: dict[int, list[Align]] = field(default_factory=dict)
    """Received alignments, in parts, by the pass that they precede."""
    closed: bool = False
    waits_since: float = 0.0
    """Since when the next pass waits for an alignment; 0 if it does not."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens before decode pass 0."""
        return len(self.opened.prompt) - self.opened.first_step

    def runnable(self) -> bool:
        """Whether pass `step` may run. A due alignment must have arrived: the late departure."""
        if self.closed or self.token < 0 or self.step >= self.opened.max_new_tokens - 1:
            return False
        if self.policy.due(self.step):
            return self.credit >= self.step
        return self.step <= self.credit + self.opened.lookahead


class Shadow:
    """One shadow node. Serves one main node at a time, the last one that connected."""

    def __init__(self, name: str, model: ShadowModel, fingerprint: str, dtype: str, pace: Pace | None = None) -> None:
        self.name = name
        self.pace = pace or RealPace()
        self.model = model
        self.fingerprint = fingerprint
        self.dtype = dtype
        self.cache_bytes_max = 0
        self.sessions: Sessions[_Session] = Sessions()

    def accept(self, reply: Channel) -> _Session:
        return self.sessions.add(_Session(self, reply))

    def close(self) -> None:
        self.sessions.close()


class _Session(Session):
    """One main node's stream. All passes run on one thread; requests take turns of one pass."""

    def __init__(self, shadow: Shadow, reply: Channel) -> None:
        belongs = shadow.fingerprint, shadow.dtype
        super().__init__(shadow.name, belongs, shadow.sessions, reply, shadow.pace.now)
        self._shadow = shadow
        self._requests: dict[int, _Followed] = {}
        self._thread = SerialThread(f"{shadow.name}-passes", self.report)

    # --- messages -----------------------------------------------------------------------------------------------

    def ready(self) -> ShadowReady:
        model = self._shadow.model
        return ShadowReady(
            version=PROTOCOL_VERSION,
            node=self.name,
            scheme=model.scheme,
            device_bytes=model.device_bytes,
            host=host_name(),
            pid=os.getpid(),
            device_name=_device_name(model.device),
        )

    def dispatch(self, message: Message) -> None:
        if isinstance(message, OpenRequest):
            self._shadow.pace.arrived()
            self._open(message)
        elif isinstance(message, Align):
            self._shadow.pace.arrived()
            self.spans.came(message)
            followed = self._requests.get(message.request)
            if followed is not None:
                self._thread.submit(self._align, followed, message)
        elif isinstance(message, CloseRequest):
            followed = self._requests.pop(message.request, None)
            if followed is not None:
                followed.closed = True
        elif isinstance(message, AskUsage):
            usage = self._shadow.model.device_bytes + self._shadow.cache_bytes_max
            self.reply.send(ShadowUsage(usage))
        else:
            raise ProtocolError(f"a shadow does not take {type(message).__name__}")

    def end(self) -> None:
        for followed in list(self._requests.values()):
            followed.closed = True
        self._thread.close()

    def report(self, error: BaseException, about: Message | None = None) -> None:
        if not self.over and not isinstance(error, _Closed | LinkError):
            self.reply.send(Failed(type(error).__name__, f"{self.name}: {error}"))

    def _open(self, message: OpenRequest) -> None:
        if not message.prompt or message.first_step >= len(message.prompt):
            raise ProtocolError(
                f"request {message.request} has {len(message.prompt)} tokens before its decode pass "
                f"{message.first_step}; its prompt must have at least one"
            )
        policy = Alignment(message.align_token, message.align_kv)
        followed = _Followed(message, policy, self._shadow.model.new_cache(), message.first_step)
        self._requests[message.request] = followed
        self._thread.submit(self._prefill, followed)

    # --- on the passes' thread ----------------------------------------------------------------------------------

    def _prefill(self, followed: _Followed) -> None:
        """Read the prompt, in parallel with the main model's prefill, which needs no predictions."""
        if not followed.closed:
            followed.token = self._run(followed, list(followed.opened.prompt), predict=False)
            self._advance(followed)

    def _align(self, followed: _Followed, message: Align) -> None:
        if message.step >= followed.step and (message.token is not None or message.kv):
            followed.aligned.setdefault(message.step, []).append(message)
        if not message.more:
            followed.credit = max(followed.credit, message.step)
            self._advance(followed)

    def _advance(self, followed: _Followed) -> None:
        """Run a pass if it may run, and queue the next one behind the waiting jobs."""
        if not followed.runnable():
            return
        self._shadow.pace.begin_pass()
        began = self.spans.now()
        if followed.waits_since:
            self.spans.add("late", f"{followed.step}", followed.waits_since, began)
        parts = followed.aligned.pop(followed.step, [])
        self._apply(followed, parts)
        if parts:
            self.spans.add("align", f"{followed.step}", began, self.spans.now())
        followed.token = self._run(followed, [followed.token], predict=True)
        followed.step += 1
        runnable = followed.runnable()
        followed.waits_since = 0.0 if runnable else self.spans.now()
        if runnable:
            self._thread.submit(self._advance, followed)

    def _apply(self, followed: _Followed, parts: list[Align]) -> None:
        """Replace the shadow's token and KV rows by the main model's."""
        end = followed.prompt_tokens + followed.step
        at = next((part.kv_start for part in parts if part.kv), end)
        for part in parts:
            if part.token is not None:
                followed.token = part.token
            if part.kv:
                at = self._overwrite(followed.cache, part, at)
        if at != end:
            raise ProtocolError(f"alignment for decode pass {followed.step} ends at position {at}, not {end}")

    def _overwrite(self, cache: Any, part: Align, start: int) -> int:
        """Write a part's rows. Returns the position after them. Raises ProtocolError, with nothing written, if they do
        not fit."""
        if part.kv_start != start:
            raise ProtocolError(f"alignment has KV rows from position {part.kv_start}; {start} comes next")
        return kv.put(cache, start, [tensor_from_bytes(sent.dtype, sent.shape, sent.data) for sent in part.kv])

    def _run(self, followed: _Followed, tokens: list[int], predict: bool) -> int:
        position, request = followed.prompt_tokens + followed.step, followed.opened.request
        model, pace, spans = self._shadow.model, self._shadow.pace, self.spans
        pace.begin_pass()
        since = spans.now()

        def routed(layer: int, experts: list[int], scores: list[float]) -> None:
            nonlocal since
            if followed.closed:
                raise _Closed
            pace.layer()
            spans.add("shadow", f"{layer}", since, since := spans.now())
            if predict:
                prediction = Prediction(request, position, layer, tuple(experts), tuple(scores))
                spans.sent(prediction)
                self.reply.send(prediction)

        model.routed = routed
        token = model.forward(tokens, followed.cache)
        spans.add("head", "", since, spans.now())
        held = sum(kv.cache_bytes(other.cache) for other in {followed, *self._requests.copy().values()})
        self._shadow.cache_bytes_max = max(self._shadow.cache_bytes_max, held)
        return token


def _device_name(device: str) -> str:
    """The model of the processor or GPU."""
    return processor_name() if device == "cpu" else torch.cuda.get_device_name(device)
