"""A main node's stream to a node that computes experts: what a worker and a host place share."""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from typing import Any, Protocol

import torch

from checkpoint.store import ExpertStore
from checkpoint.tensors import tensor_bytes
from scheduler.errors import LinkError, ODMoEError, ProtocolError
from scheduler.held import flat_ranges
from scheduler.model_limits import ModelLimits
from scheduler.types import ExpertId
from wire import runtime
from wire.base import Channel
from wire.checksums import tensor_checksum
from wire.credit import QUEUE_BYTES, RowBudget
from wire.machine import host_name
from wire.messages import (
    PROTOCOL_VERSION,
    Compute,
    Computed,
    Failed,
    Held,
    Load,
    LocalTensor,
    Message,
    WorkerReady,
    WorkerUsage,
)
from wire.sessions import Session, Sessions
from worker_node.measure import device_bytes, device_name
from worker_node.pace import Pace

SMALL_BYTES = 16 * 1024
"""A larger output travels at once: that hides its transfer behind the next computation."""
MOST_TOGETHER = 16
"""Outputs in one message."""


class ComputeNode(Protocol):
    """A worker or a host place, as its sessions need it."""

    name: str
    store: ExpertStore
    limits: ModelLimits
    pace: Pace
    sessions: Sessions[Any]
    costs: tuple[float, float]
    """Seconds that a computation takes: a call, and each row of it."""


class ComputeSession(Session):
    """Hello's answer, computed rows, usage and errors."""

    def __init__(self, node: ComputeNode, reply: Channel) -> None:
        manifest = node.store.manifest
        super().__init__(
            node.name, (manifest.model_digest, manifest.dtype), node.sessions, reply, node.pace.now, node.limits
        )
        self._node = node
        self._rows = None if self.in_process else RowBudget()
        """None in one process: the rows that wait here are the main node's own."""
        self._outputs: list[Computed] = []
        self._waiting = runtime.Lock()

    @abstractmethod
    def usage(self) -> WorkerUsage:
        """The node's counts so far."""

    def describe(
        self, device: str, loader: str, slots: int = 0, slot_bytes: int = 0, load_bytes_per_s: float = 0.0
    ) -> WorkerReady:
        """The answer to Hello."""
        return WorkerReady(
            version=PROTOCOL_VERSION,
            node=self.name,
            slots=slots,
            slot_bytes=slot_bytes,
            device=device,
            loader=loader,
            host=host_name(),
            pid=os.getpid(),
            device_name=device_name(device),
            device_bytes=device_bytes(device),
            load_bytes_per_s=load_bytes_per_s,
            call_s=self._node.costs[0],
            row_s=self._node.costs[1],
            queue_bytes=self._rows.most if self._rows is not None else QUEUE_BYTES,
            in_parts=self._node.store.held is not None,
            held=flat_ranges(self._node.store.held or ()),
        )

    def send_held(self) -> None:
        """The store holds other experts than before."""
        held = self._node.store.held
        self.send(Held(held is not None, flat_ranges(held or ())))

    def admit(self, message: Compute) -> bool:
        """Whether its rows may wait here. A main node that exceeds its credit loses its stream."""
        if self._rows is None or self._rows.add(message):
            return True
        self.cut(
            ProtocolError(
                f"the rows of call {message.call_id} exceed the {self._rows.most} bytes that may wait here, by which "
                f"{self._rows.nbytes} wait already; keep to WorkerReady.queue_bytes"
            )
        )
        return False

    def on_evicted(self, slot: int) -> None:
        """What waits for the slot is not answered."""
        if self._rows is not None:
            self._rows.drop_slot(slot)

    def send(self, *messages: Message) -> None:
        """A broken stream is ignored: `end` follows."""
        if not self.over:
            with contextlib.suppress(LinkError):
                self.reply.send(*messages)

    def send_usage(self) -> None:
        self.send(self.usage())

    def on_rows(self, message: Compute) -> None:
        """Rows have arrived. Raises ProtocolError where they are not those that were sent."""
        if self.spans.on:
            self.spans.on_received(message)
        if message.checksum and tensor_checksum(message.hidden, message.weights) != message.checksum:
            raise ProtocolError(
                f"the rows of call {message.call_id}, for expert {message.expert} of layer {message.layer}, were "
                f"damaged on their way to {host_name()}: they fail their checksum"
            )

    def send_output(self, message: Compute, output: torch.Tensor, seconds: float, more: bool = False) -> None:
        """`output` [n, H], of the computation that `message` asked for. `more`: the next one is ready, and
        a small output may wait to travel with its. One for a main node of this process has no checksum."""
        if self._rows is not None:
            self._rows.drop(message)
        rows = LocalTensor(output, tensor_bytes)
        checksum = 0 if self.in_process or not output.is_cpu else tensor_checksum(rows)
        answer = Computed(message.call_id, rows, seconds, checksum)
        if self.spans.on:
            self.spans.on_sent(answer)
        with self._waiting:
            self._outputs.append(answer)
            wait = more and len(self._outputs) < MOST_TOGETHER and output.nbytes <= SMALL_BYTES
        if not wait:
            self.send_outputs()

    def send_outputs(self) -> None:
        """Send the outputs that wait."""
        with self._waiting:
            outputs, self._outputs = self._outputs, []
        if not outputs:
            return
        try:
            self.send(*outputs)
        except ODMoEError:  # one of them cannot be sent, and none was
            for answer in outputs:
                self._send_alone(answer)

    def _send_alone(self, answer: Computed) -> None:
        try:
            self.send(answer)
        except ODMoEError as error:
            self.send(Failed(type(error).__name__, f"{self.name}: {error}", call_id=answer.call_id))

    def report_load(self, error: BaseException, load_id: int, expert: ExpertId, form: str) -> None:
        """Report a load that failed, with the expert, its file and this host."""
        text = f"{self.name}: {error}"
        if not isinstance(error, ODMoEError):  # which say so themselves
            path = self._node.store.locate(*expert, form)[0]
            text = (
                f"{self.name} cannot load expert {expert.expert} of layer {expert.layer} from {path} on "
                f"{host_name()}: {error or type(error).__name__}"
            )
        self.send(Failed(type(error).__name__, text, load_id))

    def report(self, error: BaseException, about: Message | None = None) -> None:
        if isinstance(about, Compute) and self._rows is not None:
            self._rows.drop(about)
        load_id = about.load_id if isinstance(about, Load) else 0
        call_id = about.call_id if isinstance(about, Compute) else 0
        self.send(Failed(type(error).__name__, f"{self.name}: {error}", load_id, call_id))
