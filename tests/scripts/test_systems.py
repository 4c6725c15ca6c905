"""The scripts that set systems beside each other: what they count, and small whole runs on the demo model."""

from __future__ import annotations

import csv
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.lib import quality
from scripts.lib.bench import Bench, Side, mixed_prompts
from scripts.models import widen
from scripts.papers import ablation_importance, compare_systems, quality_systems
from scripts.papers import compare_show as show
from support.paths import ROOT

SMALL = ["--quick", "--models", "models/demo-moe", "--prompts", "1", "--history", "1"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any) -> Callable[..., tuple[dict[str, Any], str]]:
    """`run(script, *flags)`: what it wrote as JSON, and what it said on both streams; its status must be 0."""

    def call(script: Any, *flags: str) -> tuple[dict[str, Any], str]:
        name = Path(script.__file__).stem
        monkeypatch.setattr(sys, "argv", [script.__file__, *SMALL, "--out", str(tmp_path), *flags])
        status = script.main()
        told = capfd.readouterr()
        assert status == 0, told.out + told.err
        written = tmp_path / f"{name}-quick"
        assert written.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        lines = [line for line in written.with_suffix(".csv").read_text().splitlines() if not line.startswith("#")]
        found = json.loads(written.with_suffix(".json").read_text())
        assert len(list(csv.DictReader(lines))) == len(found["rows"])
        return found, told.out + told.err

    return call


@pytest.mark.slow
def test_systems_side_by_side(run: Any, demo_store: Any) -> None:
    flags = ["--systems", "on-demand", "static", "fate", "fully-cached", "--budgets", "25", "--tokens", "4"]
    found, told = run(compare_systems, *flags)
    rows = {row["system"]: row for row in found["rows"]}
    assert "cannot be" in told
    assert "every expert" in rows["fully-cached"]["refused"]
    for name in ("on-demand", "static"):
        assert (rows[name]["same_tokens"], rows[name]["exact"]) == (4, True)
    assert not rows["fate"]["exact"]
    manifest = demo_store("float32").manifest
    for name in ("on-demand", "static", "fate"):
        assert 0 < rows[name]["device_bytes"] <= 0.25 * manifest.expert_bytes
    # Eight layers of top-2: of a token, on-demand loads every expert, and hits none.
    assert rows["on-demand"]["loads_a_token"] == 16
    assert rows["on-demand"]["bytes_a_token"] == 16 * manifest.blob_bytes
    assert rows["on-demand"]["hit_rate"] == 0 < rows["static"]["hit_rate"] < 1
    assert rows["static"]["loads_a_token"] == pytest.approx(16 * (1 - rows["static"]["hit_rate"]))
    assert rows["on-demand"]["tpot_ratio"] == 1
    again, told = run(compare_systems, *flags)
    assert "5 of 5 cells were finished before" in told
    assert again["rows"] == found["rows"]


@pytest.mark.slow
def test_steps_of_importance(run: Any) -> None:
    found, _ = run(ablation_importance, "--how", "disk", "--budgets", "50", "--tokens", "4")
    rows = {row["step"]: row for row in found["rows"]}
    assert list(rows) == ["baseline", "+CE", "+ER", "+Pre"]
    assert [row["exact"] for row in rows.values()] == [True, True, False, False]
    assert rows["+ER"]["recall"] is None
    assert 0 < rows["+Pre"]["recall"] <= 1
    assert rows["baseline"]["tpot_ratio"] is None
    assert rows["+CE"]["tpot_ratio"] == pytest.approx(rows["+CE"]["tpot_s"] / rows["baseline"]["tpot_s"])


@pytest.mark.slow
def test_what_approximation_costs(run: Any) -> None:
    flags = ["--alphas", "0", "1", "--forms", "full", "int2", "--problems", "1", "--tokens", "4", "--text-tokens", "48"]
    found, _ = run(quality_systems, *flags, "--window", "16")
    rows = {row["variant"]: row for row in found["rows"]}
    for name in ("alpha 0", "form full"):
        assert rows[name]["same_tokens"] == 4
        assert rows[name]["perplexity_ratio"] == pytest.approx(1, abs=1e-4)
    assert rows["form full"]["exact"]
    for name in ("alpha 1", "form int2"):
        assert not rows[name]["exact"]
        assert abs(rows[name]["perplexity_ratio"] - 1) > 1e-3


@pytest.fixture
def side(demo_store: Any) -> Any:
    """`side()`: a new one, of a static hot set in 25 % of the experts' bytes; four prompts."""
    bench = Bench(Namespace(dtype="float32"), {"static": {"system": "static"}})
    made: list[Side] = []

    def make() -> Side:
        prompts = [[0, 5, 17, 300 + n, 41] for n in range(4)]
        of = Side(demo_store("float32"), lambda name: bench.settings("models/demo-moe", name, 25), prompts, 5)
        made.append(of)
        return of

    yield make
    for one in made:
        one.close()


def test_a_run_that_goes_on_asks_what_was_asked_before(side: Any) -> None:
    """What stands in the slots at a prompt is the same whether the prompts before it were measured in this run."""
    names = ("token_ids", "loads_a_token", "hit_rate", "bytes_a_token", "prefill_bytes", "device_bytes")
    whole, later = side(), side()
    for number in range(3):
        last = whole.ask("static", number).figures()
    alone = later.ask("static", 2).figures()
    assert {name: last[name] for name in names} == {name: alone[name] for name in names}
    first = side().ask("static", 0).figures()
    assert first["prefill_bytes"] != alone["prefill_bytes"]  # a new cluster has nothing in its slots


@pytest.mark.parametrize("given", [1, 7])
def test_a_forced_text_after_a_prompt_of_some_tokens(given: int, demo_store: Any) -> None:
    from transformers import AutoModelForCausalLM

    from odmoe.clusters.embedded import EmbeddedCluster
    from odmoe.settings.settings import Settings

    window = [0, 5, 17, 300, 41, 7, 90, 1200, 33, 8, 2]
    cluster = EmbeddedCluster(Settings(model="demo", shadow="none", workers=2, threads=1), demo_store("float32"))
    try:
        forced = quality.forced_logits(cluster, window, given)
    finally:
        cluster.close()
    model = AutoModelForCausalLM.from_pretrained("models/demo-moe", dtype="float32", experts_implementation="eager")
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([window])).logits[0, given - 1 : -1]
    torch.testing.assert_close(forced, wanted, rtol=1e-4, atol=1e-4)


def test_prompts_are_problems_and_sonnets_in_turns(demo: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in mixed_prompts(tokenizer, 5, seed=3)]
    assert [text.startswith("Question: ") for text in texts] == [True, False, True, False, True]
    verses = (ROOT / "scripts" / "data" / "sonnets.txt").read_text()
    assert all(text.strip() in verses for text in texts[1::2])
    assert len(set(texts)) == 5
    assert mixed_prompts(tokenizer, 5, seed=3) == mixed_prompts(tokenizer, 7, seed=3)[:5]
    assert mixed_prompts(tokenizer, 5, seed=3) != mixed_prompts(tokenizer, 5, seed=4)


def row(system: str, times: list[float], hit_rate: float, budget: int = 10) -> dict[str, Any]:
    return {"model": "m", "budget": budget, "system": system, "tpot_by_prompt": times, "hit_rate": hit_rate}


def test_who_is_ahead_of_whom() -> None:
    """Ratios are paired: the third prompt met a machine that was ten times as slow."""
    rows = [
        row("fate", [1.0, 2.0, 9.0], 0.7), row("eap", [2.0, 4.0, 20.0], 0.5), row("on-demand", [1.0, 1.0, 10.0], 0.0),
        row("fate", [1.0], 0.4, 50), row("eap", [1.0], 0.5, 50),
    ]  # fmt: skip
    assert show.claims(rows) == [
        "m: fate against on-demand: TPOT 1.00 of its, hit rate +0.70 at 10 %; not faster at 10 %",
        "m: fate against eap: TPOT 0.50 1.00 of its, hit rate +0.20 -0.10 at 10, 50 %; "
        "not faster at 50 %; no more hits at 50 %",
    ]


def test_medians_are_of_what_was_measured() -> None:
    assert show.middle([3.0, None, 1.0]) == 2.0
    assert show.middle([None]) is None


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_wider_checkpoint_says_what_it_said(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"mixtral": {"num_local_experts": 4, "intermediate_size": 24},
             "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}}[kind]  # fmt: skip
    config = AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_experts_per_tok=2, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    wide = widen.widened(model, 5).eval()
    ids = torch.arange(1, 20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(wide(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    experts = [sum(p.numel() for n, p in one.named_parameters() if ".experts." in n) for one in (model, wide)]
    assert experts[1] == 5 * experts[0]
    more = sum(p.numel() for p in wide.parameters()) - sum(p.numel() for p in model.parameters())
    assert more == 4 * experts[0]


@pytest.mark.parametrize(
    ("ratio", "error", "words"),
    [
        (1.004, 0.003, "costs at most 1% of perplexity: +0.40% +- 0.30% at 0.3"),
        (1.004, 0.03, "costs at most 1% of perplexity: +0.40% +- 3.00% at 0.3; too few tokens to be sure"),
        (1.04, 0.01, "costs more than 1% of perplexity: +4.00% +- 1.00% at 0.3"),
        (1.04, 0.05, "costs more than 1% of perplexity: +4.00% +- 5.00% at 0.3; too few tokens to be sure"),
    ],
)
def test_a_finding_says_how_sure_it_is(ratio: float, error: float, words: str) -> None:
    rows = [
        {"model": "m", "variant": f"alpha {alpha}", "perplexity_ratio": more, "ratio_error": off}
        for alpha, more, off in (("0", 1.0, 0.0), ("0.3", ratio, error), ("0.6", 2.0, 0.1))
    ]
    assert quality_systems.finding(rows) == [f"m: alpha up to 0.3 {words}"]
