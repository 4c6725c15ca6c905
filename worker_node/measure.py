"""What a worker's device is, and how fast its loader loads onto it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from checkpoint import family
from checkpoint.store import ExpertStore
from scheduler.emulation.clock import GivenUp
from scheduler.errors import LaunchError
from wire.machine import memory_bytes, processor_name
from worker_node.costs import computing_costs
from worker_node.loaders.base import Loader

LOADS = 5
BYTES = 64 << 20
SECONDS = 0.3
"""At most so many loads; none is begun after so many bytes or seconds."""

CALL_S = 2e-3
"""A longer computation is not measured at start: the ten that it takes would be felt."""

GIVE_UP_S = 5.0
"""Most time for all of them. What a load has moved until then is measured all the same."""


def load_bandwidth(store: ExpertStore, loader: Loader, slots: list[torch.Tensor], form: str = "") -> float:
    """Bytes a second that `loader` moves: the median of a few loads of different experts, in `form`, into the slots.

    By the loader's own pace: one that keeps a profile's times gives what the profile says. 0 where a load lasts longer
    than `GIVE_UP_S` by such a pace. Raises CorruptStoreError, or LaunchError where the store cannot be read.
    """
    given_up = GivenUp()
    with ThreadPoolExecutor(1, "measure") as own:  # a thread's emulated time would go on from here
        measuring = own.submit(lambda: list(_rates(store, loader, slots, given_up, form)))
        wait([measuring], GIVE_UP_S)
        given_up.give_up(loader.pace.now())
    try:
        rates = measuring.result()
    except OSError as error:
        raise LaunchError(f"loader {loader.name} cannot read {store.path}: {error}") from error
    return statistics.median(rates) if rates else 0.0


def _rates(
    store: ExpertStore, loader: Loader, slots: list[torch.Tensor], given_up: GivenUp, form: str
) -> Iterator[float]:
    """Bytes a second, of one load after the other."""
    began, moved = time.monotonic(), 0
    experts = ((layer, expert) for layer, spec in store.layers(form).items() for expert in range(len(spec.blobs)))
    share = store.manifest.form_bytes(form) / store.manifest.blob_bytes
    for (layer, expert), slot in zip(itertools.islice(experts, LOADS), itertools.cycle(slots), strict=False):
        done = moved >= BYTES or (moved and time.monotonic() - began >= SECONDS)
        if done or given_up.is_set():
            return
        start = loader.pace.begin_load(loader.pace.now())
        nbytes = loader.load(layer, expert, slot, given_up.is_set, form)
        cut = given_up.is_set()
        seconds = loader.pace.end_load(given_up, share) - start
        if not nbytes or (given_up.is_set() and not cut):  # its bytes are there, but its pace wants more time
            return
        moved += nbytes
        yield nbytes / max(seconds, 1e-9)


def device_costs(store: ExpertStore, run: Callable[[torch.Tensor, torch.Tensor], object]) -> tuple[float, float]:
    """(seconds a call, seconds a row of it) that `run(hidden [n, H], weights [n])`, one expert, takes.

    (0, 0) where that would take too long to find out, or where experts take other rows than the model's embeddings.
    """
    manifest = store.manifest
    width = family.config_from_dict(manifest.config).get_text_config().hidden_size
    dtype = family.parse_dtype(manifest.dtype)

    def on(rows: int) -> None:
        run(torch.full((rows, width), 0.5, dtype=dtype), torch.ones(rows, dtype=dtype))

    try:
        on(1)
        began = time.perf_counter()
        on(1)
        return computing_costs([on]) if time.perf_counter() - began < CALL_S else (0.0, 0.0)
    except (RuntimeError, ValueError, TypeError):
        return 0.0, 0.0


def device_name(device: str) -> str:
    """As a person knows it."""
    return processor_name() if device == "cpu" else torch.cuda.get_device_name(device)


def device_bytes(device: str) -> int:
    """All of its memory."""
    return memory_bytes() if device == "cpu" else torch.cuda.get_device_properties(device).total_memory
