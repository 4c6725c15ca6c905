"""The host place: computes experts on the processor beside the device, from host memory, where they lie.

It has no slots: nothing is loaded, nothing evicted, and a `Compute` that names an expert is all it takes. One thread
computes, in the order in which rows came.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from functools import partial

import torch

from checkpoint import family
from checkpoint.expert import ExpertArithmetic
from checkpoint.store import ExpertStore
from checkpoint.tensors import tensor_bytes, tensor_from_bytes
from scheduler.errors import LaunchError, LinkError, ODMoEError, ProtocolError
from wire.base import Channel
from wire.machine import host_name
from wire.messages import (
    PROTOCOL_VERSION,
    AskUsage,
    Compute,
    Computed,
    Evict,
    Failed,
    Load,
    Message,
    Tensor,
    WorkerReady,
    WorkerUsage,
)
from wire.serial import SerialThread
from wire.sessions import Session, Sessions
from worker_node.costs import computing_costs
from worker_node.loaders.mapped_store import MappedStore
from worker_node.measure import device_bytes, device_name
from worker_node.pace import Pace, RealPace

DEVICE = "cpu"
LOADER = "host"
"""What `WorkerReady` says in the place of a loader's name."""

MAX_BOUND = 1024
"""So many experts' modules are kept, the last used: a few KiB each, since their parameters are views of the map."""

MEASURED = 4
"""Experts whose computation is measured at start."""


class HostPlace:
    """One host place; serves one main node at a time, the last that connected. It computes the full form alone.

    `costs`: seconds a call takes, and each row of it: as `pace` has them from a profile, else measured at once.
    Raises LaunchError where the store cannot be read, CorruptStoreError where it is cut off.
    """

    def __init__(self, name: str, store: ExpertStore, arithmetic: ExpertArithmetic, pace: Pace | None = None) -> None:
        self.name = name
        self.store = store
        self.pace = pace or RealPace()
        self._mapped = MappedStore(store)
        self._arithmetic = arithmetic
        self._bound: dict[tuple[int, int], Callable[..., torch.Tensor]] = {}
        self.sessions: Sessions[_Session] = Sessions()
        self.costs = self.pace.costs or self._measured()

    def accept(self, reply: Channel) -> _Session:
        return self.sessions.add(_Session(self, reply))

    def compute(self, layer: int, expert: int, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The expert on `hidden` [n, H] with routing weights `weights` [n], as the family's eager arithmetic has it:
        [n, H]. Called by one thread at a time. Raises StoreError, CorruptStoreError or OSError."""
        blob = self._mapped.blob(layer, expert)
        bound = self._bound.pop((layer, expert), None)
        if bound is None:
            bound = self._arithmetic.bind(layer, self.store.views(blob, layer))
        self._bound[layer, expert] = bound  # the last used stand last
        if len(self._bound) > MAX_BOUND:
            self._bound.pop(next(iter(self._bound)), None)
        return bound(hidden, weights)

    def close(self) -> None:
        self.sessions.close()
        self._bound.clear()
        self._mapped.close()

    def _measured(self) -> tuple[float, float]:
        """(0, 0) where its experts take other rows than the model's embeddings: nothing is known then."""
        manifest = self.store.manifest
        width = family.config_from_dict(manifest.config).get_text_config().hidden_size
        dtype = family.parse_dtype(manifest.dtype)

        def on(layer: int, expert: int, rows: int) -> object:
            hidden, weights = torch.full((rows, width), 0.5, dtype=dtype), torch.ones(rows, dtype=dtype)
            return self.compute(layer, expert, hidden, weights)

        layers = manifest.layers
        every = ((layer, expert) for layer in manifest.moe_layers for expert in range(len(layers[layer].blobs)))
        try:
            return computing_costs([partial(on, *one) for one in itertools.islice(every, MEASURED)])
        except OSError as error:
            raise LaunchError(f"{self.name} cannot read {self.store.path}: {error}") from error
        except (RuntimeError, ValueError, TypeError):
            return 0.0, 0.0


class _Session(Session):
    """One main node's stream to this place."""

    def __init__(self, place: HostPlace, reply: Channel) -> None:
        manifest = place.store.manifest
        belongs = manifest.fingerprint, manifest.dtype
        super().__init__(place.name, belongs, place.sessions, reply, place.pace.now)
        self._place = place
        self._computing = SerialThread(f"{place.name}-compute", self.report)

    def ready(self) -> WorkerReady:
        call_s, row_s = self._place.costs
        return WorkerReady(
            version=PROTOCOL_VERSION,
            node=self.name,
            slots=0,
            slot_bytes=0,
            device=DEVICE,
            loader=LOADER,
            host=host_name(),
            pid=os.getpid(),
            device_name=device_name(DEVICE),
            device_bytes=device_bytes(DEVICE),
            load_bytes_per_s=0.0,
            call_s=call_s,
            row_s=row_s,
        )

    def dispatch(self, message: Message) -> None:
        if isinstance(message, Compute):
            self.spans.came(message)
            self._take(message)
        elif isinstance(message, AskUsage):
            self._computing.submit(self._usage)
        elif isinstance(message, Load | Evict):
            raise ProtocolError(f"{self.name} is a host place: it has no slots, and takes no {type(message).__name__}")
        else:
            raise ProtocolError(f"a host place does not take {type(message).__name__}")

    def end(self) -> None:
        self._computing.close()

    def report(self, error: Exception, about: Message | None = None) -> None:
        load_id = about.load_id if isinstance(about, Load) else 0
        call_id = about.call_id if isinstance(about, Compute) else 0
        self._send(Failed(type(error).__name__, f"{self.name}: {error}", load_id, call_id))

    def _take(self, message: Compute) -> None:
        if message.slot or message.evict:
            what = f"slot {message.slot}" if message.slot else "evict"
            raise ProtocolError(f"{self.name} is a host place: it has no slots, and a Compute says {what}")
        self._place.store.locate(message.layer, message.expert)
        self._computing.submit(self._run, message, self._place.pace.now())

    def _usage(self) -> None:
        """No slot, so nothing on a device, and nothing loaded."""
        self._send(WorkerUsage(resident_experts_max=0, device_bytes_max=0, loads=0, bytes_loaded=0))

    def _run(self, message: Compute, asked: float) -> None:
        """On the computing thread."""
        if self.over:
            return
        pace, hidden, weights = self._place.pace, message.hidden, message.weights
        start = pace.begin_compute(asked)
        try:
            output = self._place.compute(
                message.layer, message.expert,
                tensor_from_bytes(hidden.dtype, hidden.shape, hidden.data),
                tensor_from_bytes(weights.dtype, weights.shape, weights.data),
            )  # fmt: skip
        except (OSError, ODMoEError, RuntimeError, ValueError, TypeError, LookupError) as error:
            self.report(error, message)
            return
        end = pace.end_compute(len(output))
        self.spans.add("compute", f"{message.layer}.{message.expert}", start, end)
        answer = Computed(message.call_id, Tensor(*tensor_bytes(output)), end - start)
        self.spans.sent(answer)
        self._send(answer)

    def _send(self, message: Message) -> None:
        """Where the stream has just broken, `end` is about to hear of it."""
        if not self.over:
            with contextlib.suppress(LinkError):
                self.reply.send(message)
