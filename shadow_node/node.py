"""The shadow node: follows the main model's requests a few layers ahead and tells what it routes (SEP, section 3.2)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpoint.tensors import tensor_from_bytes
from scheduler.alignment import Alignment
from scheduler.errors import LinkError, ODMoEError, ProtocolError
from shadow_node.model import ShadowModel
from wire.base import Channel
from wire.handshake import check_hello
from wire.messages import (
    PROTOCOL_VERSION,
    Align,
    AskUsage,
    CloseRequest,
    Failed,
    Hello,
    Message,
    OpenRequest,
    Prediction,
    ShadowReady,
    ShadowUsage,
)
from wire.serial import SerialThread
from wire.sessions import Sessions


class _Closed(Exception):
    """The request was closed in the middle of a pass."""


@dataclass(slots=True, eq=False)
class _Followed:
    """One request. `step`: the decode pass to run next; `token`: what it reads unless aligned; `aligned`: alignments
    that have come for passes not run yet, in parts; `credit`: the last pass that the main model has announced."""

    opened: OpenRequest
    policy: Alignment
    cache: Any
    step: int
    token: int = -1
    credit: int = -1
    aligned: dict[int, list[Align]] = field(default_factory=dict)
    closed: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens before decode pass 0."""
        return len(self.opened.prompt) - self.opened.first_step

    def runnable(self) -> bool:
        """May pass `step` run? Where an alignment is due it must have come: the late departure."""
        if self.closed or self.token < 0 or self.step >= self.opened.max_new_tokens - 1:
            return False
        if self.policy.due(self.step):
            return self.credit >= self.step
        return self.step <= self.credit + self.opened.lookahead


class Shadow:
    """One shadow node; serves one main node at a time, the last that connected."""

    def __init__(self, name: str, model: ShadowModel, fingerprint: str, dtype: str) -> None:
        self.name = name
        self.model = model
        self.fingerprint = fingerprint
        self.dtype = dtype
        self.cache_bytes_max = 0
        self.sessions: Sessions[_Session] = Sessions()

    def accept(self, reply: Channel) -> _Session:
        return self.sessions.add(_Session(self, reply))

    def close(self) -> None:
        self.sessions.close()


class _Session:
    """One main node's stream. Every pass runs on one thread, requests in turn, one pass a turn."""

    def __init__(self, shadow: Shadow, reply: Channel) -> None:
        self._shadow = shadow
        self._reply = reply
        self._requests: dict[int, _Followed] = {}
        self._closed = False
        self._welcome = False
        self._thread = SerialThread(f"{shadow.name}-passes", self._report)

    # --- messages -----------------------------------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        try:
            if isinstance(message, Hello):
                self._hello(message)
            elif not self._welcome:
                raise ProtocolError(f"{type(message).__name__} came before Hello; a stream begins with Hello")
            elif isinstance(message, OpenRequest):
                self._open(message)
            elif isinstance(message, Align):
                followed = self._requests.get(message.request)
                if followed is not None:
                    self._thread.submit(self._align, followed, message)
            elif isinstance(message, CloseRequest):
                followed = self._requests.pop(message.request, None)
                if followed is not None:
                    followed.closed = True
            elif isinstance(message, AskUsage):
                usage = self._shadow.model.device_bytes + self._shadow.cache_bytes_max
                self._reply.send(ShadowUsage(usage))
            else:
                raise ProtocolError(f"a shadow does not take {type(message).__name__}")
        except ODMoEError as error:
            self._report(error)

    def on_close(self, error: ODMoEError | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._shadow.sessions.forget(self)
        for followed in list(self._requests.values()):
            followed.closed = True
        self._thread.close()

    def replaced(self) -> None:
        """Another main node has connected: tell this one, and forget it."""
        if not self._closed:
            with contextlib.suppress(LinkError):
                self._reply.send(Failed("LinkError", f"{self._shadow.name} now serves another main node"))
        self.on_close(None)
        self._reply.close()

    def _hello(self, hello: Hello) -> None:
        shadow = self._shadow
        check_hello(hello, shadow.name, shadow.fingerprint, shadow.dtype)
        shadow.sessions.serve(self)
        self._welcome = True
        model = shadow.model
        self._reply.send(ShadowReady(PROTOCOL_VERSION, shadow.name, model.scheme, model.device_bytes))

    def _open(self, message: OpenRequest) -> None:
        if not message.prompt or message.first_step >= len(message.prompt):
            raise ProtocolError(f"request {message.request} has {len(message.prompt)} tokens before its decode pass "
                                f"{message.first_step}; its prompt must have at least one")  # fmt: skip
        policy = Alignment(message.align_token, message.align_kv)
        followed = _Followed(message, policy, self._shadow.model.new_cache(), message.first_step)
        self._requests[message.request] = followed
        self._thread.submit(self._prefill, followed)

    # --- on the passes' thread ----------------------------------------------------------------------------------

    def _prefill(self, followed: _Followed) -> None:
        """The shadow reads the prompt itself, beside the main model's prefill. Nothing is predicted for it."""
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
        """Run a pass if one may run, and come back for the next after whatever else is waiting."""
        if not followed.runnable():
            return
        self._apply(followed, followed.aligned.pop(followed.step, []))
        followed.token = self._run(followed, [followed.token], predict=True)
        followed.step += 1
        if followed.runnable():
            self._thread.submit(self._advance, followed)

    def _apply(self, followed: _Followed, parts: list[Align]) -> None:
        """The shadow's token and KV rows become the main model's."""
        end = followed.prompt_tokens + followed.step
        at = next((part.kv_start for part in parts if part.kv), end)
        for part in parts:
            if part.token is not None:
                followed.token = part.token
            if part.kv:
                at = self._overwrite(followed.cache.layers, part, at)
        if at != end:
            raise ProtocolError(f"alignment for decode pass {followed.step} ends at position {at}, not {end}")

    def _overwrite(self, layers: Any, part: Align, start: int) -> int:
        """Where the part's rows end. Raises ProtocolError, with nothing written, where they do not fit."""
        if part.kv_start != start:
            raise ProtocolError(f"alignment has KV rows from position {part.kv_start}; {start} comes next")
        targets = [kept for layer in layers for kept in (layer.keys, layer.values)]
        if len(part.kv) != len(targets):
            raise ProtocolError(f"alignment has {len(part.kv)} KV tensors; this model has {len(layers)} layers")
        rows = [tensor_from_bytes(sent.dtype, sent.shape, sent.data) for sent in part.kv]
        stop = start + (rows[0].shape[2] if rows[0].dim() == 4 else 0)
        places = [kept[:, :, start:stop] for kept in targets]
        for place, sent in zip(places, rows, strict=True):
            if place.shape != sent.shape:
                raise ProtocolError(f"alignment has KV rows of shape {tuple(sent.shape)} from position {start} on; "
                                    f"the shadow holds {tuple(place.shape)} there")  # fmt: skip
        with torch.inference_mode():
            for place, sent in zip(places, rows, strict=True):
                place.copy_(sent)
        return stop

    def _run(self, followed: _Followed, tokens: list[int], predict: bool) -> int:
        position = followed.prompt_tokens + followed.step

        def routed(layer: int, experts: list[int], scores: list[float]) -> None:
            if followed.closed:
                raise _Closed
            if predict:
                request = followed.opened.request
                self._reply.send(Prediction(request, position, layer, tuple(experts), tuple(scores)))

        model = self._shadow.model
        model.routed = routed
        token = model.forward(tokens, followed.cache)
        held = sum(_cache_bytes(other.cache) for other in {followed, *self._requests.copy().values()})
        self._shadow.cache_bytes_max = max(self._shadow.cache_bytes_max, held)
        return token

    def _report(self, error: Exception) -> None:
        if self._closed or isinstance(error, _Closed | LinkError):
            return
        self._reply.send(Failed(type(error).__name__, f"{self._shadow.name}: {error}"))


def _cache_bytes(cache: Any) -> int:
    return sum(t.nbytes for layer in cache.layers if layer.is_initialized for t in (layer.keys, layer.values))
