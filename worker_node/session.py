"""A main node's stream to a node that computes experts: what a worker and a host place share."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import abstractmethod
from typing import Any, Protocol

import torch

from checkpoint.store import ExpertStore
from checkpoint.tensors import tensor_bytes
from scheduler.errors import LinkError, ProtocolError
from scheduler.model_limits import ModelLimits
from wire.base import Channel
from wire.credit import RowBudget
from wire.machine import host_name
from wire.messages import (
    PROTOCOL_VERSION,
    Compute,
    Computed,
    Failed,
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
            node.name, (manifest.fingerprint, manifest.dtype), node.sessions, reply, node.pace.now, node.limits
        )
        self._node = node
        self._rows = RowBudget()
        self._outputs: list[Computed] = []
        self._waiting = threading.Lock()

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
            queue_bytes=self._rows.most,
        )

    def admit(self, message: Compute) -> bool:
        """Whether its rows may wait here. A main node that exceeds its credit loses its stream."""
        if self._rows.add(message):
            return True
        self.cut(
            ProtocolError(
                f"the rows of call {message.call_id} exceed the {self._rows.most} bytes that may wait here, by which "
                f"{self._rows.nbytes} wait already; keep to WorkerReady.queue_bytes"
            )
        )
        return False

    def evicted(self, slot: int) -> None:
        """What waits for the slot is not answered."""
        self._rows.drop_slot(slot)

    def send(self, *messages: Message) -> None:
        """A broken stream is ignored: `end` follows."""
        if not self.over:
            with contextlib.suppress(LinkError):
                self.reply.send(*messages)

    def send_usage(self) -> None:
        self.send(self.usage())

    def send_output(self, message: Compute, output: torch.Tensor, seconds: float, more: bool = False) -> None:
        """`output` [n, H], on the CPU, of the computation that `message` asked for. `more`: the next one is ready, and
        a small output may wait to travel with its."""
        self._rows.drop(message)
        answer = Computed(message.call_id, LocalTensor(output, tensor_bytes), seconds)
        self.spans.sent(answer)
        with self._waiting:
            self._outputs.append(answer)
            wait = more and len(self._outputs) < MOST_TOGETHER and output.nbytes <= SMALL_BYTES
        if not wait:
            self.send_outputs()

    def send_outputs(self) -> None:
        """Send the outputs that wait."""
        with self._waiting:
            outputs, self._outputs = self._outputs, []
        if outputs:
            self.send(*outputs)

    def report(self, error: BaseException, about: Message | None = None) -> None:
        if isinstance(about, Compute):
            self._rows.drop(about)
        load_id = about.load_id if isinstance(about, Load) else 0
        call_id = about.call_id if isinstance(about, Compute) else 0
        self.send(Failed(type(error).__name__, f"{self.name}: {error}", load_id, call_id))
