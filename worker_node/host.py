"""The host place: computes experts on the processor beside the device, from host memory, where they are.

It has no slots: nothing is loaded or evicted, and a `Compute` that gives the expert is all it needs. One thread
computes, in the order in which rows arrive.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch

from checkpoint import family
from checkpoint.encoded_experts import EncodedExperts, few_or_many
from checkpoint.expert import ExpertArithmetic
from checkpoint.joint_rows import by_pass
from checkpoint.manifest import checksum
from checkpoint.native.parameters import ExpertParameters
from checkpoint.sizes.message_limits import message_limits
from checkpoint.store import ExpertStore
from checkpoint.tensors import received_tensor
from scheduler.errors import LaunchError, ProtocolError, StoreError
from wire.base import Channel
from wire.messages import AskUsage, Compute, Evict, Load, Message, WorkerReady, WorkerUsage
from wire.serial import SerialThread
from wire.sessions import Sessions
from worker_node.costs import computing_costs
from worker_node.loaders.load_checks import compare
from worker_node.loaders.mapped_store import MappedStore
from worker_node.module_cache import Module, ModuleCache
from worker_node.pace import Pace, RealPace
from worker_node.session import ComputeSession

DEVICE = "cpu"
LOADER = "host"
"""Stands for a loader's name in `WorkerReady`."""

MODULES = 1024
"""Modules kept, one an expert."""

RESTORED = -1
"""Stands for the expert of a layer whose experts are all restored in the same memory."""

MEASURED_EXPERTS = 4
"""Experts whose computation is measured at start."""


class HostPlace:
    """One host place. It serves the main node that connected last, and computes the full form only.

    `checks`: whether an expert is compared with the store's checksum, when it is computed first and whenever its file
    has been written to.

    Raises LaunchError where the store cannot be read, CorruptStoreError where it is truncated.
    """

    def __init__(
        self,
        name: str,
        store: ExpertStore,
        arithmetic: ExpertArithmetic,
        pace: Pace | None = None,
        checks: bool = True,
    ) -> None:
        self.name = name
        self.store = store
        self.limits = message_limits(store)
        self.pace = pace or RealPace()
        self._mapped = MappedStore(store)
        self._checks = checks
        self._found_whole: dict[tuple[int, int], tuple[int, int, int]] = {}
        """Expert -> its file's `written` when it was checked."""
        self._arithmetic = arithmetic
        self._parameters = ExpertParameters(store.manifest, threads=torch.get_num_threads())
        self._encoded = EncodedExperts(store.manifest, arithmetic)
        self._modules = ModuleCache[Module](MODULES)
        self.sessions: Sessions[_Session] = Sessions()
        self.costs = self.pace.costs or self._measured_costs()
        """Seconds that a computation takes, a call and a row: `pace`'s from a profile, otherwise measured here."""

    def accept(self, reply: Channel) -> _Session:
        return self.sessions.add(_Session(self, reply))

    def compute(
        self, layer: int, expert: int, hidden: torch.Tensor, weights: torch.Tensor, passes: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """The expert on `hidden` [n, H] with routing weights `weights` [n], in the family's eager arithmetic: [n, H].
        `passes`: see `by_pass`.

        Called by one thread at a time. Raises StoreError, CorruptStoreError or OSError.
        """
        blob = self._read_checked(layer, expert)
        output = by_pass(self._module(blob, layer, expert), hidden, weights, passes)
        self._read_checked(layer, expert)  # it may have been written to meanwhile
        return output

    def _module(self, blob: torch.Tensor, layer: int, expert: int) -> Module:
        if self._encoded.computes(layer):
            few = self._modules.get((layer, expert), lambda: self._encoded.bind(blob, layer))
            return few_or_many(few, lambda: self._restored(blob, layer, expert))
        return self._restored(blob, layer, expert)

    def _restored(self, blob: torch.Tensor, layer: int, expert: int) -> Module:
        """Or as it is, where the store has no encoding."""
        parameters = self._parameters.of(blob, layer)
        key = (layer, RESTORED if self._parameters.restores(layer) else expert)
        return self._modules.get(key, lambda: self._arithmetic.bind(layer, parameters))

    def _read_checked(self, layer: int, expert: int) -> torch.Tensor:
        """The expert's bytes. Raises as `compute`; files are then mapped again for the next computation, since they may
        have been replaced."""
        try:
            blob = self._mapped.blob(layer, expert)
            written = self._mapped.written
            if self._checks and self._found_whole.get((layer, expert)) != written:
                compare(self.store, layer, expert, checksum(blob.numpy().data))
                self._found_whole[layer, expert] = written
        except (OSError, StoreError):
            self._modules.clear()
            self._mapped.close()
            raise
        return blob

    def close(self) -> None:
        self.sessions.close()
        self._modules.clear()
        self._mapped.close()

    def _measured_costs(self) -> tuple[float, float]:
        """(0, 0), unknown, where the experts' rows are not as wide as the model's embeddings. Raises LaunchError."""
        manifest = self.store.manifest
        width = family.config_from_dict(manifest.config).get_text_config().hidden_size
        dtype = family.parse_dtype(manifest.dtype)

        def compute(layer: int, expert: int, rows: int) -> object:
            hidden, weights = torch.full((rows, width), 0.5, dtype=dtype), torch.ones(rows, dtype=dtype)
            return self.compute(layer, expert, hidden, weights)

        experts = (expert for expert, _ in self.store.experts())
        try:
            return computing_costs([partial(compute, *one) for one in itertools.islice(experts, MEASURED_EXPERTS)])
        except OSError as error:
            raise LaunchError(f"{self.name} cannot read {self.store.path}: {error}") from error
        except (RuntimeError, ValueError, TypeError):
            return 0.0, 0.0


class _Session(ComputeSession):
    """One main node's stream to this place."""

    def __init__(self, place: HostPlace, reply: Channel) -> None:
        super().__init__(place, reply)
        self._place = place
        self._computing = SerialThread(f"{place.name}-compute", self.report)

    def ready(self) -> WorkerReady:
        return self.describe(DEVICE, LOADER)

    def usage(self) -> WorkerUsage:
        """No slots, so nothing on a device, and no loads."""
        return WorkerUsage(resident_experts_max=0, device_bytes_max=0, loads=0, bytes_loaded=0)

    def dispatch(self, message: Message) -> None:
        if isinstance(message, Compute):
            self.on_rows(message)
            if self.admit(message):
                self._queue(message)
        elif isinstance(message, AskUsage):
            self._computing.submit(self.send_usage)
        elif isinstance(message, Load | Evict):
            raise ProtocolError(f"{self.name} is a host place: it has no slots, and takes no {type(message).__name__}")
        else:
            raise ProtocolError(f"a host place does not take {type(message).__name__}")

    def end(self) -> None:
        self._computing.close()

    def _queue(self, message: Compute) -> None:
        if message.slot or message.evict:
            part = f"slot {message.slot}" if message.slot else "evict"
            raise ProtocolError(f"{self.name} is a host place: it has no slots, and a Compute says {part}")
        self._place.store.locate(message.layer, message.expert)
        self._computing.submit(self._compute, message, self._place.pace.now())

    def _compute(self, message: Compute, received: float) -> None:
        """On the computing thread."""
        if self.over:
            return
        pace = self._place.pace
        start = pace.begin_compute(received)
        try:
            output = self._place.compute(
                message.layer,
                message.expert,
                received_tensor(message.hidden),
                received_tensor(message.weights),
                message.passes,
            )
        except Exception as error:  # noqa: BLE001 - one computation fails, whatever it raises
            self.report(error, message)
            return
        end = pace.end_compute(len(output))
        self.spans.add("compute", f"{message.layer}.{message.expert}", start, end)
        self.send_output(message, output, end - start)
