"""Models in few bits, as people run them: our stores beside llama.cpp's files of the same weights.

Dense parts have 8 bits: int8 of ours, Q8_0 there; a file in Q4_0 has it throughout. gpt-oss is kept as published.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from odmoe.stores import prepare_store
from scripts.peers.checkpoints import Shape
from scripts.peers.engines import LLAMA, OURS, Engine
from scripts.peers.figures import CACHED, FITS, STEP
from scripts.peers.gguf_file import make_gguf

PAIRS = {"gpt-oss-20b": {"mxfp4": "MXFP4"}, "qwen3-30b-a3b": {"int4": "Q4_0", "mxfp4": "MXFP4"}}
"""Model -> how our store keeps experts -> type of llama.cpp's file."""
DENSE = "int8"
SYSTEM = "lrfu-prefetch"
"""With a quarter of the experts."""
_FAST = ", fast"


def engines(experts: str, file: str, without_llama: bool = False) -> list[str]:
    """Those that are compared: ours with both kernels, the exact one first, and llama.cpp."""
    return [experts, experts + _FAST] + ([] if without_llama else [f"{LLAMA} {file}"])


def make(shape: Shape, checkpoint: Path, name: str, case: str, threads: int) -> Engine:
    """An engine of `engines`; its files are made where they are missing. Raises ODMoEError."""
    if name.startswith(LLAMA):
        file = make_gguf(shape, checkpoint, name.removeprefix(LLAMA).strip())
        return Engine(LLAMA, file, threads, settings={"repack": case == FITS})
    experts = name.removesuffix(_FAST)
    store = checkpoint.with_suffix(f".{experts}.store")
    kept = None if shape.family == "gpt_oss" else experts
    prepare_store(str(checkpoint), str(store), "bfloat16", experts=kept, dense=DENSE)
    settings = {"system": CACHED if case == FITS else SYSTEM, "device_memory": "100%" if case == FITS else "25%"}
    return Engine(OURS, checkpoint, threads, store, settings | ({"kernel": "fast"} if name != experts else {}))


def cap(result: dict[str, Any]) -> int | None:
    """What all of ours need with a quarter of the experts, rounded up. None where one failed."""
    if any("failed" in one for one in result.values()):
        return None
    return -(-max(one["peak_bytes"] for one in result.values()) // STEP) * STEP
