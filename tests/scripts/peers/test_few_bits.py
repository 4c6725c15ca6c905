"""In few bits, our store and llama.cpp's file have the same weights, and each of ours meets llama.cpp in its turns."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.store import ExpertStore
from odmoe.commands.shared.whole_model import load_whole
from scripts.measure.peers import plan_capped, plan_few_bits
from scripts.peers import few_bits, figures
from scripts.peers.checkpoints import FEW_BITS, Shape, make_checkpoint
from scripts.peers.engines import LLAMA, Eager, Ours, forced_task
from scripts.peers.figures import CAPPED, FITS, QUARTER
from scripts.peers.gguf_file import make_gguf
from support.models.stored_experts import parameters

TINY = {
    "gpt_oss": Shape("g", "gpt_oss", 2, 4, 2, 64, hidden=128, heads=2, key_heads=1, head=64),
    "qwen3_moe": Shape("q", "qwen3_moe", 2, 4, 2, 64, hidden=128, heads=2, key_heads=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_a_file_in_mxfp4_has_the_weights_of_our_store(family: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the optional extra `peers`")
    shape = TINY[family]
    checkpoint = make_checkpoint(shape, tmp_path)
    file = gguf.GGUFReader(make_gguf(shape, checkpoint, "MXFP4"))
    held = {tensor.name: tensor for tensor in file.tensors}
    engine = few_bits.make(shape, checkpoint, "mxfp4", FITS, 1)
    assert engine.store is not None
    ours = parameters(ExpertStore.open(engine.store), 1, 2)
    up, down = ours["gate_up_proj"].float(), ours["down_proj"].float()
    both = (up.t()[::2], up.t()[1::2]) if family == "gpt_oss" else up.chunk(2)
    expected = dict(zip(("gate", "up", "down"), (*both, down.t() if family == "gpt_oss" else down), strict=True))
    for part, weight in expected.items():
        tensor = held[f"blk.1.ffn_{part}_exps.weight"]
        assert torch.equal(torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()[2]), weight)
    assert held["output.weight"].tensor_type is gguf.GGMLQuantizationType.Q8_0
    cluster, task = Ours(engine), forced_task(0, 0, 12)
    try:
        found = cluster.answer(task)
    finally:
        cluster.close()
    theirs = Eager(load_whole(checkpoint, "bfloat16")).answer(task).choices
    assert sum(a == b for a, b in zip(found.choices, theirs, strict=True)) >= 11, "the dense part has 8 bits"
    assert not found.exact


def test_each_of_ours_is_compared_with_llama_cpp_first_in_memory_then_in_a_group() -> None:
    args = Namespace(models=list(FEW_BITS), shapes=FEW_BITS, without_llama=False, threads=2, turns=1, tokens=4, seed=0)
    cells = plan_few_bits(args)
    assert [(one.params["model"], one.params["case"], one.params["engines"]) for one in cells[2:4]] == [
        ("qwen3-30b-a3b", FITS, ["int4", "int4, fast", f"{LLAMA} Q4_0"]),
        ("qwen3-30b-a3b", QUARTER, ["int4", "int4, fast"]),
    ]
    results = [{name: of(rate) for rate, name in enumerate(one.params["engines"], 1)} for one in cells]
    capped = plan_capped(args, cells, results)
    assert [one.params["cap"] for one in capped] == [1 << 30] * 3
    rows = figures.rows([*cells, *capped], [*results, *results[::2]])
    fast = next(row for row in rows if (row["case"], row["engine"]) == (CAPPED, "int4, fast"))
    assert fast[f"decode over {LLAMA} Q4_0"]["median"] == pytest.approx(2 / 3)
    assert fast["agreement"] == 1
    assert {row["model"] for row in rows} == set(FEW_BITS)


def of(rate: int) -> dict[str, Any]:
    turn = {"ttft_s": 1.0, "decode_s": 2 / rate, "choices": [7, 8, 9], "read_bytes": 0, "hits": None, "named": None}
    turns = [turn | {"exact": False, "others_cores": 0.0}]
    return {"turns": turns, "start_s": 1.0, "peak_bytes": (1 << 30) - 5 * rate, "group_peak_bytes": None}


def test_a_cell_without_an_engine_has_no_limit() -> None:
    assert few_bits.cap({"int4": of(1), "int4, fast": {"failed": "killed"}}) is None
