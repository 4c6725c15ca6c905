"""The shadow node: runs the main model's requests a few layers ahead and sends its routing (SEP, section 3.2)."""

from __future__ import annotations

import contextlib
import os

from checkpoint.devices.inference import inference
from checkpoint.devices.names import accelerator_name
from checkpoint.devices.streams import on_streams
from checkpoint.prefix_cache import PrefixCache
from scheduler.errors import LinkError, ODMoEError, ProtocolError
from shadow_node.followed import Followed
from shadow_node.model import ShadowModel
from shadow_node.pace import Pace, RealPace
from shadow_node.passes import Passes
from wire import runtime
from wire.base import Channel
from wire.credit import message_bytes
from wire.machine import host_name, processor_name
from wire.messages import (
    PROTOCOL_VERSION,
    Align,
    AskUsage,
    CloseRequest,
    Failed,
    Message,
    OpenRequest,
    ShadowReady,
    ShadowUsage,
)
from wire.serial import SerialThread
from wire.sessions import Session, Sessions

ALIGNMENT_BYTES = 2 << 30
"""Of the alignments that wait, those of all requests together. The rows of a prompt come as one alignment, in parts."""

MAX_REQUESTS = 1024
"""Requests that are followed at a time."""


class Shadow:
    """One shadow node. Serves one main node at a time. `kept`: of earlier prompts."""

    def __init__(
        self,
        name: str,
        model: ShadowModel,
        fingerprint: str,
        dtype: str,
        pace: Pace | None = None,
        kept: PrefixCache | None = None,
    ) -> None:
        self.name = name
        self.pace = pace or RealPace()
        self.model, self.kept = model, kept
        self.fingerprint = fingerprint
        self.dtype = dtype
        self.cache_bytes_max = 0
        self.sessions: Sessions[_Session] = Sessions()

    def on_part_lost(self, error: ODMoEError) -> None:
        """Some of its layers are out of reach: so is all of it, until its main node connects again."""
        served = self.sessions.served
        if served is not None:
            served.cut(error)

    def accept(self, reply: Channel) -> _Session:
        return self.sessions.add(_Session(self, reply))

    def close(self) -> None:
        self.sessions.close()


class _Session(Session):
    """One main node's stream. All passes run on one thread, which looks for messages between two layers."""

    def __init__(self, shadow: Shadow, reply: Channel) -> None:
        belongs = shadow.fingerprint, shadow.dtype
        super().__init__(shadow.name, belongs, shadow.sessions, reply, shadow.pace.now, shadow.model.limits)
        self._shadow = shadow
        self._requests: dict[int, Followed] = {}
        self._came: runtime.SimpleQueue[tuple[float, Followed, Align | None]] = runtime.SimpleQueue()
        """(when, request, its alignment; None: it was opened or closed)."""
        self._came_bytes = 0
        """Of the alignments in `_came`."""
        self._counting = runtime.Lock()
        self._passes = Passes(shadow.model, shadow.pace, self)
        self._thread = SerialThread(f"{shadow.name}-passes", self.report)

    # --- messages -----------------------------------------------------------------------------------------------

    def ready(self) -> ShadowReady:
        model = self._shadow.model
        try:
            model.reach()
        except ODMoEError as error:
            self.cut(error)
            raise
        return ShadowReady(
            version=PROTOCOL_VERSION,
            node=self.name,
            scheme=model.scheme,
            device_bytes=model.device_bytes,
            host=host_name(),
            pid=os.getpid(),
            device_name=device_name(model.device),
            device=model.device,
        )

    def dispatch(self, message: Message) -> None:
        if isinstance(message, OpenRequest):
            self._open(message)
        elif isinstance(message, Align):
            self.spans.on_received(message)
            followed = self._requests.get(message.request)
            if followed is not None and self._admit(followed, message):
                self._submit(followed, message)
        elif isinstance(message, CloseRequest):
            followed = self._requests.pop(message.request, None)
            if followed is not None:
                self._close(followed)
        elif isinstance(message, AskUsage):
            usage = self._shadow.model.device_bytes + self._shadow.cache_bytes_max
            self.reply.send(ShadowUsage(usage))
        else:
            raise ProtocolError(f"a shadow does not take {type(message).__name__}")

    def end(self) -> None:
        for followed in list(self._requests.values()):
            followed.closed = True
            self._came.put((self._shadow.pace.now(), followed, None))
        if self._thread.close():
            self.take()  # else its job does, at its next layer or its end

    def report(self, error: BaseException, about: Message | None = None) -> None:
        if not self.over and not isinstance(error, LinkError):
            self.reply.send(Failed(type(error).__name__, f"{self.name}: {error}"))

    def _open(self, message: OpenRequest) -> None:
        if not message.prompt or message.first_step >= len(message.prompt):
            raise ProtocolError(
                f"request {message.request} has {len(message.prompt)} tokens before its decode pass "
                f"{message.first_step}; its prompt must have at least one"
            )
        before = self._requests.get(message.request)
        if before is not None:
            self._close(before)
        elif len(self._requests) >= MAX_REQUESTS:
            raise ProtocolError(f"{self.name} follows {MAX_REQUESTS} requests already; close some")
        followed = Followed(message, self._shadow.model.new_cache(), self._shadow.kept)
        self._requests[message.request] = followed
        self._submit(followed, None)

    def _close(self, followed: Followed) -> None:
        followed.closed = True
        self._submit(followed, None)

    def _admit(self, followed: Followed, message: Align) -> bool:
        """Whether an alignment may wait here. A main node whose alignments do not fit any more loses its stream: it
        comes again, and the shadow goes on from where the requests are then."""
        if message.step > followed.steps:
            raise ProtocolError(
                f"request {message.request} has {followed.steps} decode passes at most; an alignment came for pass "
                f"{message.step}"
            )
        size = message_bytes(message)
        held = self._came_bytes + sum(one.aligned_bytes for one in self._requests.copy().values())
        if held + size > ALIGNMENT_BYTES:
            self.cut(
                ProtocolError(
                    f"{held} bytes of alignments wait already, {ALIGNMENT_BYTES} may: the prompts are too long for the "
                    "shadow, or it does not keep up; send shorter ones or fewer at once, or say --align-kv 0"
                )
            )
            return False
        with self._counting:
            self._came_bytes += size
        return True

    def _submit(self, followed: Followed, message: Align | None) -> None:
        self._came.put((self._shadow.pace.now(), followed, message))
        self._thread.submit(self._work)

    # --- on the passes' thread ----------------------------------------------------------------------------------

    def _work(self) -> None:
        """Run passes while any may run."""
        try:
            with inference(), on_streams(self._shadow.model.streams):
                self.take()
                while not self.over and self._passes.advance():
                    self.take()
        except BaseException as error:  # noqa: BLE001 - this thread would end, and the shadow only look slow
            self.on_pass_failed(error)
        finally:
            self._passes.drop()  # none is left if no pass may run
            if self.over:
                self.take()

    def requests(self) -> list[Followed]:
        """See `PassOwner`."""
        return list(self._requests.values())

    def send(self, message: Message) -> None:
        """See `PassOwner`."""
        self.reply.send(message)

    def on_pass_ended(self, followed: Followed) -> None:
        kept = self._shadow.kept
        held = sum(one.nbytes for one in {followed, *self._requests.copy().values()})
        held += kept.store.nbytes if kept is not None else 0
        held += self._shadow.model.remote_cache_bytes
        self._shadow.cache_bytes_max = max(self._shadow.cache_bytes_max, held)

    def take(self) -> None:
        """Handle the messages that have come."""
        while True:
            try:
                at, followed, message = self._came.get_nowait()
            except runtime.Empty:
                return
            self._shadow.pace.take(at)
            if message is not None:
                with self._counting:
                    self._came_bytes -= message_bytes(message)
            if message is None and followed.closed:
                followed.end()
            if message is None or followed.closed:
                continue
            if not message.more:
                followed.announced_at = at
            try:
                self._passes.receive(followed, message)
            except BaseException as error:  # noqa: BLE001 - the other requests go on
                self.on_pass_failed(error)

    def on_pass_failed(self, error: BaseException) -> None:
        """The report of an error may fail, too."""
        with contextlib.suppress(Exception):
            self.report(error)


def device_name(device: str) -> str:
    """The model of the processor or of the accelerators."""
    names = [processor_name() if one == "cpu" else accelerator_name(one) for one in device.split(",")]
    return ", ".join(dict.fromkeys(names))
