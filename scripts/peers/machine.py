"""Computes cells: starts the engines that a cell compares, asks them in turns, and keeps them for the next cell."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from odmoe.stores import prepare_store
from scheduler.errors import ODMoEError
from scripts.lib.disk import drop_pages
from scripts.peers import few_bits
from scripts.peers.checkpoints import FEW_BITS, make_checkpoint
from scripts.peers.engine_process import EngineFailed, EngineProcess
from scripts.peers.engines import ACCELERATE, EAGER, LLAMA, OURS, Engine, forced_task
from scripts.peers.figures import BASE, CACHED, CAPPED, FITS, QUARTER
from scripts.peers.gguf_file import make_gguf
from scripts.peers.groups import Groups, Refused

WARM_UP = -1
"""Turn that is not measured. Its first token tells how long the process took to start."""


def llama_missing() -> str | None:
    """How to install llama.cpp, where it or the package that writes its files is missing."""
    missing = [name for name, module in (("llama-cpp-python", "llama_cpp"), ("gguf", "gguf")) if not find_spec(module)]
    if not missing:
        return None
    return (
        f"no row of llama.cpp: {' and '.join(missing)} not installed; "
        "CMAKE_ARGS=-DGGML_NATIVE=ON .venv/bin/python -m pip install -e '.[peers]' (compiles for some minutes)"
    )


Key = tuple[str, str, int | None]
"""Model, engine and cap of a process."""


class Machine:
    """Only the engines of one cell are alive, the one that several cells compare with between them."""

    def __init__(self, args: Namespace, systems: dict[str, dict[str, Any]], groups: Groups | None) -> None:
        """`systems`: name -> settings of each system that a cell may name."""
        self._args = args
        self._systems = systems
        self._groups = groups
        self._alive: dict[Key, EngineProcess] = {}

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self._keep([])

    def measure(self, params: dict[str, Any]) -> dict[str, Any]:
        """By engine: its turns, the start of its process, and peaks of memory. `failed`: why an engine has none."""
        model, case = params["model"], params["case"]
        cap = params.get("cap")
        names = (
            params.get("engines")
            or {
                FITS: [EAGER, params["engine"]],
                QUARTER: [BASE, params["engine"]],
                CAPPED: [params["engine"], ACCELERATE] + ([] if self._args.without_llama else [LLAMA]),
            }[case]
        )
        keys = {name: (model, name if case == FITS else f"{name}, {case}", cap) for name in names}
        self._keep(list(keys.values()))
        failed: dict[str, str] = {}
        for name, key in keys.items():
            if key not in self._alive:
                try:
                    self._start(key, self._engine(model, name, case), cap)
                except (EngineFailed, Refused, ODMoEError) as error:
                    failed[name] = str(error)
        turns = self._turns(keys, failed, params)
        return {
            name: {"failed": failed[name]} if name in failed else {"turns": turns[name], **self._process_figures(key)}
            for name, key in keys.items()
        }

    def _turns(self, keys: dict[str, Key], failed: dict[str, str], params: dict[str, Any]) -> dict[str, list[Any]]:
        """Each engine's turns, by name. An engine that fails is added to `failed`."""
        found: dict[str, list[Any]] = {name: [] for name in keys}
        for turn in range(params["turns"]):
            task = forced_task(params["seed"], turn, params["tokens"])
            for name in _rotated(list(keys), turn):
                if name in failed:
                    continue
                try:
                    found[name].append(asdict(self._alive[keys[name]].answer(task)))
                except EngineFailed as error:
                    failed[name] = str(error)
                    del self._alive[keys[name]]
        return found

    def _process_figures(self, key: Key) -> dict[str, Any]:
        process = self._alive[key]
        group = process.group.peak_bytes() if process.group is not None else None
        return {"start_s": process.start_s, "peak_bytes": process.peak_bytes(), "group_peak_bytes": group}

    def _keep(self, keys: list[Key]) -> None:
        """Close all engines but these."""
        for key in [one for one in self._alive if one not in keys]:
            self._alive.pop(key).close()

    def _start(self, key: Key, engine: Engine, cap: int | None) -> None:
        """Start the process and give it the warm-up task. Raises EngineFailed, Refused."""
        drop_pages([engine.model] + ([engine.store] if engine.store is not None else []))
        group = self._groups.make(cap) if cap is not None and self._groups is not None else None
        process = EngineProcess(engine, group)
        process.answer(forced_task(self._args.seed, WARM_UP, self._args.tokens))
        self._alive[key] = process

    def _engine(self, model: str, name: str, case: str) -> Engine:
        """Its files are made where they are missing, in this process, outside of every cap. Raises ODMoEError."""
        shape, threads = self._args.shapes[model], self._args.threads
        checkpoint = make_checkpoint(shape, self._args.folder)
        if model in FEW_BITS:
            return few_bits.make(shape, checkpoint, name, case, threads)
        if name == EAGER:
            return Engine(EAGER, checkpoint, threads)
        if name == LLAMA:
            return Engine(LLAMA, make_gguf(shape, checkpoint), threads)
        if name == ACCELERATE:
            return Engine(ACCELERATE, checkpoint, threads, self._offload(checkpoint))
        store = checkpoint.with_suffix(".store")
        prepare_store(str(checkpoint), str(store), "bfloat16")
        settings = self._systems.get(name, {"system": CACHED})
        memory = "100%" if case == FITS else "25%"
        return Engine(OURS, checkpoint, threads, store, {**settings, "device_memory": memory})

    def _offload(self, checkpoint: Path) -> Path:
        from scripts.lib.peers import prepare_offload

        folder = checkpoint.with_suffix(".offload")
        prepare_offload(str(checkpoint), "bfloat16", folder)
        return folder


def _rotated(items: list[Any], by: int) -> list[Any]:
    by %= len(items)
    return items[by:] + items[:by]
