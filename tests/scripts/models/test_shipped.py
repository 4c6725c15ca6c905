"""The model of the comparisons: as large as it may be, with what the papers' models have, and it speaks."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.lib import bench
from scripts.lib.paths import DATA, ROOT
from scripts.models.train import documents, encode, loss_on

MANY = ROOT / "models" / "many-moe"


def test_it_has_many_experts_and_a_shared_one_and_is_small() -> None:
    config = json.loads((MANY / "config.json").read_text())
    assert (config["num_experts"], config["num_experts_per_tok"]) == (64, 6)
    assert config["shared_expert_intermediate_size"] > 0
    assert sum(file.stat().st_size for file in MANY.iterdir()) < 60e6


def test_comparisons_run_on_it_unless_told_otherwise() -> None:
    assert bench.MODELS == ("models/many-moe",)


@pytest.mark.slow
def test_it_reads_text_that_neither_has_seen_as_well_as_the_demo_model() -> None:
    losses: dict[str, list[float]] = {"gsm8k_test.jsonl": [], "sonnets.txt": []}
    for name in ("many-moe", "demo-moe"):
        model = AutoModelForCausalLM.from_pretrained(ROOT / "models" / name, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / name)
        for text, found in losses.items():
            ids = encode(tokenizer, list(documents([DATA / text]))[:200])
            found.append(loss_on(model, ids, 192, batches=1))
    assert all(ours < the_demos for ours, the_demos in losses.values()), losses
