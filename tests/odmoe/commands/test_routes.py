"""`odmoe routes`, and simulations of routing traces. The traces that come along are held against Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.simulation.routing_trace import read_trace
from scripts.models.record_traces import KINDS
from support.machines.cli import CommandLine
from support.paths import ROOT

SYSTEMS = ("importance", "smoe", "fate", "hybrimoe", "lrfu-prefetch", "mixtral-offloading")
"""They read what a gate or a predictor says, which only a trace or a recording has."""


def test_a_file_of_another_engine_is_imported_described_and_simulated(cli: CommandLine, tmp_path: Path) -> None:
    rows = np.argsort(np.random.default_rng(0).random((6, 4, 8)), axis=2)[:, :, :2]
    np.save(tmp_path / "run.npy", rows)
    trace = str(tmp_path / "run.npz")
    made = cli("routes", "import", str(tmp_path / "run.npy"), "-o", trace, "--experts", "8", "--prompt-tokens", "2")
    assert made.code == 0, made.err
    facts = json.loads(cli("routes", "info", trace, "--json").out)[trace]
    assert (facts["layers"], facts["experts"], facts["top_k"]) == (4, 8, 2)
    assert (facts["prompt_tokens"], facts["decode_tokens"], facts["scores"]) == ([2], [4], False)
    assert "4 MoE layers, top-2 of 8 experts" in cli("routes", "info", trace).out
    found = json.loads(
        cli("simulate", "--routes", trace, "--system", "on-demand", "--residency", "lru", "--slots", "32", "--json").out
    )
    misses = len({(layer, expert) for token in rows for layer, row in enumerate(token) for expert in row})
    assert found["loads_a_token"] * 4 <= misses, "nothing is loaded twice where all fits"
    assert found["model"] == {"layers": 4, "experts": 8, "top_k": 2}
    answer = cli("simulate", "--routes", trace, "--system", "importance", "--profile", "rtx3090-pcie3")
    assert answer.code == 2
    assert f"which {trace} does not have; export a recording of a run with this policy" in answer.err


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_traces_that_come_along_simulate_systems_that_read_scores(cli: CommandLine, system: str) -> None:
    flags = ("--routes", "demo-moe", "--system", system, "--profile", "rtx3090-pcie3", "--slots", "16", "--tokens", "4")
    answer = cli("simulate", *flags, "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["hit_rate"] > 0
    assert len(found["requests"]) == 4


def test_what_cannot_be_done_is_said(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "run.npy").write_bytes(b"")
    cases: list[tuple[tuple[str, ...], str]] = [
        (("routes", "export", "run"), "odmoe routes export writes a trace; say where with --output FILE"),
        (("routes", "info", str(tmp_path / "none")), "cannot be read: No such file or directory"),
        (("routes", "import", str(tmp_path / "run.npy"), "-o", "x.npz"), "has no routed experts"),
        (("simulate", "--routes", "demo-moe", "--experts", "9"), "--experts is given with --routes"),
        (("simulate", "--routes", "demo-moe", "--tokens", "999"), "--tokens is 999; allowed: 1 to "),
    ]
    for flags, said in cases:
        answer = cli(*flags)
        assert answer.code == 2, flags
        assert said in answer.err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo-moe", "many-moe"])
def test_prompts_of_the_traces_that_come_along_have_transformers_routes(name: str) -> None:
    """With the hook of docs/running.md: each prompt in one pass, in the checkpoint's dtype, as the engine reads it. A
    processor with other instructions rounds bfloat16 otherwise, and near ties fall otherwise."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ROOT / "models" / name
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trace = read_trace(ROOT / "scheduler" / "simulation" / "traces" / f"{name}.npz")
    for (first, answer, _), kind in zip(trace.spans(), KINDS, strict=True):
        prompt = json.loads((ROOT / f"scripts/data/prompts/{kind}.txt").read_text("utf-8").splitlines()[0])
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        assert tokens.shape[1] == answer - first
        with torch.no_grad():
            logits: Any = model(tokens, output_router_logits=True).router_logits
        chosen = torch.stack([one.reshape(-1, trace.num_experts).topk(trace.top_k).indices for one in logits], dim=1)
        same = np.sort(trace.experts[first:answer], axis=2) == np.sort(chosen.numpy(), axis=2)
        assert same.all(axis=2).mean() > 0.97, kind
