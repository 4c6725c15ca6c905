"""How fast forms are made, in MB of full precision a second: by HQQ's own Quantizer, by ours, and into files.

Also by second of processor time of one core, which other work on the machine changes little.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from checkpoint.forms import FORMS, GROUP, is_weight, planned_form, quantise
from checkpoint.manifest import LayerSpec
from checkpoint.sharding.form_files import add_forms
from checkpoint.store import ExpertStore

Parameters = dict[str, torch.Tensor]
Make = Callable[[Parameters, LayerSpec, str], dict[str, torch.Tensor]]


def by_quantizer(parameters: Parameters, layer: LayerSpec, form: str) -> dict[str, torch.Tensor]:
    """Packed numbers, scales and zeros of an expert by HQQ's Quantizer. For weights of whole groups and bytes."""
    from hqq.core.quantize import Quantizer

    found, bits = {}, FORMS[form]
    for spec in filter(is_weight, layer.tensors):
        flat = parameters[spec.name].float().view(-1, GROUP)
        packed, meta = Quantizer.quantize(flat, nbits=bits, group_size=GROUP, axis=1, device="cpu")
        found[f"{spec.name}.packed"] = packed
        found |= {f"{spec.name}.{part}": meta[part].half().view(-1) for part in ("scale", "zero")}
    return found


def by_us(parameters: Parameters, layer: LayerSpec, form: str) -> dict[str, torch.Tensor]:
    """The same by `checkpoint.forms`."""
    return planned_form(layer, form).views(quantise(parameters, layer, form))


def compared(experts: list[Parameters], layer: LayerSpec, form: str, turns: int) -> dict[str, Any]:
    """MB/s of both, in alternated turns over these experts, one thread a core; and whether all bytes are equal."""
    import hqq.core.quantize  # noqa: F401  # before it is timed

    size = sum(value.nbytes for expert in experts for value in expert.values()) / 1e6
    rates: dict[str, list[float]] = {"hqq": [], "ours": [], "hqq_core": [], "ours_core": []}
    made: dict[str, list[dict[str, torch.Tensor]]] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "make", torch.set_num_threads, (1,)) as pool:
        for turn in range(turns):
            both: list[tuple[str, Make]] = [("hqq", by_quantizer), ("ours", by_us)]
            for name, make in both if turn % 2 else reversed(both):
                began, busy = time.perf_counter(), time.process_time()
                made[name] = list(pool.map(lambda expert, make=make: make(expert, layer, form), experts))
                rates[name].append(size / (time.perf_counter() - began))
                rates[f"{name}_core"].append(size / (time.process_time() - busy))
    pairs = [ours / hqq for hqq, ours in zip(rates["hqq_core"], rates["ours_core"], strict=True)]
    equal = all(
        torch.equal(ours[name], value)
        for hqq, ours in zip(made["hqq"], made["ours"], strict=True)
        for name, value in hqq.items()
    )
    medians = {f"{name}_mb_per_s": statistics.median(found) for name, found in rates.items()}
    return {"form": form, **medians, "ratio": statistics.median(pairs), "equal": equal}


def into_files(store: ExpertStore, form: str) -> tuple[float, float]:
    """MB/s of making the form's files, with reading, checking and writing; and MB by second of processor time.

    Needs room for them beside the store.
    """
    with linked(store) as other:
        began, busy, size = time.perf_counter(), time.process_time(), store.manifest.expert_bytes / 1e6
        add_forms(other, (form,))
        return size / (time.perf_counter() - began), size / (time.process_time() - busy)


@contextlib.contextmanager
def linked(store: ExpertStore) -> Iterator[ExpertStore]:
    """A store beside this one with links to its files, less its forms."""
    left_out = shutil.ignore_patterns(*(name for form in FORMS for name in (f"*.{form}", f"{form}.json")))
    with tempfile.TemporaryDirectory(prefix=".forms-", dir=store.path.parent) as folder:
        target = shutil.copytree(store.path, Path(folder) / "store", ignore=left_out, copy_function=os.link)
        yield ExpertStore.open(Path(target))


def rows(store: ExpertStore, read: Callable[[int], Parameters], count: int, turns: int) -> Iterator[dict[str, Any]]:
    """A row a form. `read(expert)`: its parameters in the first layer, `count` of which are compared."""
    layer = next(iter(store.manifest.layers.values()))
    experts = [read(expert) for expert in range(min(count, len(layer.blobs)))]
    for form in FORMS:
        files = [into_files(store, form) for _ in range(turns)]
        wall, core = (statistics.median(values) for values in zip(*files, strict=True))
        found = compared(experts, layer, form, turns)
        yield found | {"files_mb_per_s": wall, "files_core_mb_per_s": core}
