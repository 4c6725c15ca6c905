"""A worker's device, its loader's bandwidth and the cost of its computations."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from checkpoint import family
from checkpoint.devices.names import accelerator_memory, accelerator_name
from checkpoint.store import ExpertStore
from scheduler.emulation.clock import Cancellation
from scheduler.errors import LaunchError
from scheduler.types import ExpertId
from wire.machine import memory_bytes, processor_name
from worker_node.costs import computing_costs
from worker_node.loaders.base import Loader
from worker_node.restorer import Restorer

LOADS = 5
"""Most loads that are measured."""

BYTES = 64 << 20
SECONDS = 0.3
"""No load begins after so many bytes or seconds."""

RESTORING_S = 0.1
"""No measured restoring begins after so many seconds: at start every worker of a machine measures."""

CALL_S = 2e-3
"""A longer computation is not measured: the start would take noticeably longer by the ten that are needed."""

GIVE_UP_S = 5.0
"""Most time for all loads. The last one counts with the bytes that it has moved by then."""


def load_bandwidth(
    store: ExpertStore, loader: Loader, slots: list[torch.Tensor], form: str = "", in_memory: bool = False
) -> float:
    """Bytes a second that `loader` moves: the median of a few loads of different experts, in `form`, into the slots.

    By the loader's pace: an emulated one gives the profile's bandwidth. 0 where an emulated load lasts longer than
    `GIVE_UP_S`. `in_memory`: of an expert that is in the loader's tier; else through it from disk. Raises
    CorruptStoreError, or LaunchError where the store cannot be read.
    """
    cancelled = Cancellation()
    with ThreadPoolExecutor(1, "measure") as pool:  # its emulated time must not become this thread's
        measuring = pool.submit(lambda: list(_rates(store, loader, slots, cancelled, form, in_memory)))
        wait([measuring], GIVE_UP_S)
        cancelled.cancel(loader.pace.now())
    try:
        rates = measuring.result()
    except OSError as error:
        raise LaunchError(f"loader {loader.name} cannot read {store.path}: {error}") from error
    return statistics.median(rates) if rates else 0.0


def host_load_s(store: ExpertStore, loader: Loader, slots: list[torch.Tensor], form: str) -> float:
    """Seconds of a load, in `form`, from the loader's tier, which is empty afterwards; 0 without a tier."""
    if loader.tier is None or not loader.tier.slots:
        return 0.0
    rate = load_bandwidth(store, loader, slots, form, in_memory=True)
    loader.tier.clear()
    return slots[0].nbytes / rate if rate else 0.0


def _rates(
    store: ExpertStore, loader: Loader, slots: list[torch.Tensor], cancelled: Cancellation, form: str, in_memory: bool
) -> Iterator[float]:
    """Bytes a second of each load."""
    tier = loader.tier
    measuring, moved = time.monotonic(), 0
    experts: Iterator[ExpertId] = (expert for expert, _ in store.experts(form))
    share = store.manifest.form_bytes(form) / store.manifest.blob_bytes
    if in_memory and tier is not None:  # bring one there
        first = next(experts, None)
        if first is None:
            return
        tier.assign(0, ExpertId(*first), form)
        loader.load(*first, slots[0], cancelled.is_set, form)
        experts = itertools.repeat(first)
    for (layer, expert), slot in zip(itertools.islice(experts, LOADS), itertools.cycle(slots), strict=False):
        done = moved >= BYTES or (moved and time.monotonic() - measuring >= SECONDS)
        if done or cancelled.is_set():
            return
        there = tier.assign(0, ExpertId(layer, expert), form) if tier is not None else True
        start = loader.pace.begin_load(loader.pace.now())
        nbytes = loader.load(layer, expert, slot, cancelled.is_set, form)
        cut_short = cancelled.is_set()
        seconds = loader.pace.end_load(cancelled, share, there) - start
        if not nbytes or (cancelled.is_set() and not cut_short):  # all bytes moved, but the profile takes longer
            return
        moved += nbytes
        yield nbytes / max(seconds, 1e-9)


def restoring_seconds(restorer: Restorer, loader: Loader, slot: torch.Tensor, layer: int, form: str) -> float:
    """Seconds to restore the expert of `layer` in `slot` (in `form`): the median of a few times.

    Once more before, which is not measured: the first time imports what restores, compiles it and touches new memory.
    """
    found: list[float] = []
    for number in range(LOADS + 1):
        start = time.perf_counter()
        with loader.computing(slot):
            restorer.restore(slot, layer, form)
        if loader.device != "cpu":
            torch.cuda.synchronize(loader.device)
        if number:
            found.append(time.perf_counter() - start)
        if sum(found) >= RESTORING_S:
            break
    return statistics.median(found)


def device_costs(store: ExpertStore, run: Callable[[torch.Tensor, torch.Tensor], object]) -> tuple[float, float]:
    """(seconds a call, seconds a row) of `run(hidden [n, H], weights [n])`, which computes one expert.

    `run` restores the expert each time, where it has to be restored, as after a load. The first computation is not
    measured: it prepares the others. One row of MXFP4 may be computed without restoring, as it will be for a token.
    (0, 0), unknown, where measuring would take too long, or the experts' rows are not as wide as the embeddings.
    """
    manifest = store.manifest
    width = family.config_from_dict(manifest.config).get_text_config().hidden_size
    dtype = family.parse_dtype(manifest.dtype)

    def compute(rows: int) -> None:
        run(torch.full((rows, width), 0.5, dtype=dtype), torch.ones(rows, dtype=dtype))

    try:
        compute(1)
        start = time.perf_counter()
        compute(1)
        return computing_costs([compute]) if time.perf_counter() - start < CALL_S else (0.0, 0.0)
    except (RuntimeError, ValueError, TypeError):
        return 0.0, 0.0


def device_name(device: str) -> str:
    """The name of the processor or GPU."""
    return processor_name() if device == "cpu" else accelerator_name(device)


def device_bytes(device: str) -> int:
    """All memory of the device. 0 where torch does not know that of an accelerator."""
    return memory_bytes() if device == "cpu" else accelerator_memory(device)[1]
