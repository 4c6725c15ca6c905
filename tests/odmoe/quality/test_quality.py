"""What quantised experts cost, beside two models that were loaded apart, and drawn intervals."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoint.family import expert_parameters, experts_modules
from checkpoint.sharding.source import open_source
from odmoe.commands.shared.quality_run import TEXT
from odmoe.quality.passages import divergence, losses
from odmoe.quality.quality import Passage, as_quality, load_weights, measure
from odmoe.quality.readers import Engine, Whole
from odmoe.quality.tasks import Item, Task
from scheduler.errors import ConfigError
from scripts.lib import prompts
from support.machines.cli import CommandLine
from support.models.checkpoints import build
from support.models.store_making import shard
from support.models.stored_experts import parameters

WORDS = {"model": "tiny", "dtype": "float32", "experts": "int4", "text": "random"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}
    model = build("qwen3_moe", **sizes, num_hidden_layers=2, mlp_only_layers=[])
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def measured(path: Path, store: Any, passages: list[list[int]]) -> list[Passage]:
    """Of a checkpoint's model, and of the same with a store's weights."""
    reader = Whole(whole(path))

    def change() -> Whole:
        load_weights(reader.model, store)
        return reader

    return measure(reader, change, passages)[0]


def whole(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype="float32", experts_implementation="eager").eval()


@pytest.mark.slow
def test_a_store_beside_its_checkpoint(checkpoint: Path) -> None:
    store = shard(open_source(checkpoint), checkpoint.parent / "int4", "float32", experts="int4")
    original = whole(checkpoint)
    passages = torch.randint(original.config.vocab_size, (3, 20), generator=torch.Generator().manual_seed(0)).tolist()
    quantised = whole(checkpoint)
    for layer, (name, module) in experts_modules(quantised).items():
        for key, held in expert_parameters(name, module).items():
            for expert in range(len(held)):
                held.data[expert] = parameters(store, layer, expert)[key]
    found = measured(checkpoint, store, passages)
    for one, passage in zip(found, passages, strict=True):
        with torch.inference_mode():
            first, second = (model(torch.tensor([passage])).logits[0, :-1] for model in (original, quantised))
        assert one.original_nats == pytest.approx(sum(losses(first, passage)))
        assert one.nats == pytest.approx(sum(losses(second, passage)))
        assert one.divergence == pytest.approx(float(divergence(first, second).sum()))
        assert (one.tokens, one.same_best) == (19, int((first.argmax(-1) == second.argmax(-1)).sum()))
        assert one.divergence > 0


def test_a_store_that_is_not_quantised_is_no_other_model(checkpoint: Path) -> None:
    store = shard(open_source(checkpoint), checkpoint.parent / "plain", "float32")
    quality = as_quality(measured(checkpoint, store, [[1, 2, 3, 4], [4, 5, 6, 7]]), **WORDS)
    assert (quality.ratio, quality.ratio_interval, quality.divergence, quality.same_best) == (1.0, (1.0, 1.0), 0.0, 1.0)
    assert (quality.passages, quality.tokens) == (2, 6)


def test_intervals_hold_the_truth_nearly_as_often_as_they_say() -> None:
    """Of 100 texts of 40 passages, whose divergences a token are 0.5 on average."""
    random, held = torch.Generator().manual_seed(0), 0
    for _ in range(100):
        drawn = torch.rand(40, generator=random).tolist()
        quality = as_quality([Passage(100, 200.0, 200.0, 100 * one, 90) for one in drawn], **WORDS)
        low, high = quality.divergence_interval
        held += low <= 0.5 <= high
    assert 0.9 <= held / 100 <= 0.98


def test_the_text_is_what_nothing_was_trained_on() -> None:
    text = TEXT.read_text()
    assert text.endswith(prompts.sonnets())
    assert all(row["question"].strip() in text for row in prompts.gsm8k_rows())


def test_a_disk_without_room_for_logits(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    store = shard(open_source(checkpoint), checkpoint.parent / "plain", "float32")
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"no room \(No space left on device\); lower --text-tokens"):
        measured(checkpoint, store, [[1, 2, 3, 4]])


@pytest.mark.slow
def test_the_command(cli: CommandLine, demo: Path, tmp_path: Path) -> None:
    asked = ("verify", str(demo), "--quality", "--experts", "int4", "--text-tokens", "512", "--threads", "1")
    answer = cli(*asked, "--store", str(tmp_path / "store"), "--json")
    assert answer.code == 0
    found = json.loads(answer.out)
    assert found["experts"] == "int4 of bfloat16, groups of 64 and 32"
    assert (found["passages"], found["tokens"]) == (2, 510)
    assert 0.9 < found["ratio"] < 1.1
    assert [task["name"] for task in found["tasks"]] == []  # four passages are needed
    assert "  KL divergence    0.0" in cli(*asked, "--store", str(tmp_path / "store")).out


def test_an_exact_system_of_the_engine_is_the_original_bit_for_bit(embedded: Callable[..., Any], demo: Path) -> None:
    """So that whatever is measured of an approximate one is its own: text, multiple choice, and answers."""
    ids = torch.randint(4, 200, (4, 24), generator=torch.Generator().manual_seed(1)).tolist()
    options = [one[20:23] for one in ids]
    tasks = [
        Task("next", "choice", [Item(ids[0][:20], options)]),
        Task("sum", "number", [Item(ids[0][:20], [], number=Decimal(7))], 4),
    ]
    reader = Whole(
        AutoModelForCausalLM.from_pretrained(demo, dtype="bfloat16", experts_implementation="eager"), stepwise=True
    )
    engine = Engine(embedded("bfloat16", system="on-demand", residency="lru", workers=1, slots=9))
    passages, scored = measure(reader, lambda: engine, ids[:2], 8, tasks)
    assert [(one.tokens, one.divergence, one.same_best) for one in passages] == [(16, 0.0, 16), (16, 0.0, 16)]
    assert [one.nats for one in passages] == [one.original_nats for one in passages]
    assert [(one.difference, one.difference_interval) for one in scored] == [(0.0, (0.0, 0.0))] * 2
    assert reader.answer(ids[2][:16], 6) == engine.answer(ids[2][:16], 6)


@pytest.mark.slow
def test_an_approximate_system_is_measured(embedded: Callable[..., Any], demo: Path) -> None:
    ids = torch.randint(4, 200, (2, 24), generator=torch.Generator().manual_seed(1)).tolist()
    reader = Whole(
        AutoModelForCausalLM.from_pretrained(demo, dtype="float32", experts_implementation="eager"), stepwise=True
    )
    engine = Engine(embedded("float32", system="importance", alpha=1.0, slots=9))
    passages, _ = measure(reader, lambda: engine, ids, 8)
    assert all(one.divergence > 1e-4 for one in passages)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--text-tokens", "5"), "--text-tokens is 5; allowed: 512"),
        (("--quality", "--text", "/nowhere"), "--text /nowhere cannot be read: No such file or directory"),
        (
            ("--quality", "--system", "importance", "--cluster", "local"),
            "--quality and --router expert-cache, which is",
        ),
        (("--quality", "--text", "short.txt"), "short.txt has 7 tokens; give a text of at least 512"),
    ],
)
def test_refused(
    flags: tuple[str, ...], words: str, cli: CommandLine, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("1 2 3 4 5 6")
    answer = cli("verify", str(demo), *flags)
    assert answer.code != 0
    assert words in answer.err
