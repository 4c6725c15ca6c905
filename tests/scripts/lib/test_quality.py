"""Answer extraction against cases made by hand, and texts that a cluster is forced through."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from odmoe.quality.passages import losses
from odmoe.quality.readers import forced_logits, until_end
from odmoe.quality.tasks import final_answer
from scripts.lib import quality
from support.paths import ROOT

DATA = ROOT / "scripts" / "data"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She makes 9 * 2 = $18 every day.\n#### 18", "18"),
        ("#### $1,234.50", "1234.5"),
        ("#### -5 degrees", "-5"),
        ("#### 7\nQuestion: Tom has 9 apples.", "7"),
        ("#### 7\n#### 8", "7"),
        ("####", None),
        ("#### none\n12", None),
        ("First 3, then 12.", "12"),
        ("It costs $2,000.", "2000"),
        ("16 - 3 = 13", "13"),
        ("I owe -$4", "-4"),
        ("nothing to count", None),
        ("", None),
    ],
)
def test_the_final_answer(text: str, number: str | None) -> None:
    assert final_answer(text) == (None if number is None else Decimal(number))


def test_the_same_number_may_be_written_otherwise() -> None:
    assert quality.answered("so 18.00", "... #### 18")
    assert quality.answered("#### 1000", "#### 1,000")
    assert not quality.answered("18 and 19", "#### 18")
    assert not quality.answered("no idea", "#### 18")


def test_every_solution_of_the_file_has_the_number_after_its_mark() -> None:
    rows = [json.loads(line) for line in (DATA / "gsm8k_test.jsonl").read_text().splitlines()]
    assert len(rows) == 40
    for row in rows:
        assert final_answer(row["answer"]) == int(row["answer"].split("#### ")[1].replace(",", ""))


def test_more_problems_than_there_are() -> None:
    with pytest.raises(SystemExit, match="there are 40"):
        quality.problems(41)


def test_agreement_counts_tokens_at_the_same_place() -> None:
    assert quality.agreement([[1, 2, 3], [4, 5]], [[1, 9, 3], [5, 4]]) == (2, 5)
    with pytest.raises(ValueError, match="shorter"):
        quality.agreement([[1, 2]], [[1]])


def test_an_answer_ends_before_its_first_end_of_sequence() -> None:
    assert until_end([5, 6, 1, 7, 1], {1}) == [5, 6]
    assert until_end([5, 6], {1}) == [5, 6]


@pytest.fixture(scope="module")
def model(demo: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32, experts_implementation="eager").eval()


@pytest.fixture(scope="module")
def text(demo: Path) -> list[int]:
    from transformers import AutoTokenizer

    return quality.held_out(AutoTokenizer.from_pretrained(demo), 60)


def test_held_out_text_is_half_problems_half_sonnets(demo: Path, text: list[int]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    said = tokenizer.decode(text, skip_special_tokens=True)
    assert len(text) == 60
    assert said.startswith("Question: ")
    assert "Shall I compare thee" in said
    with pytest.raises(SystemExit, match="--text-tokens"):
        quality.held_out(tokenizer, 1_000_000)


@pytest.mark.slow
def test_a_cluster_that_is_forced_through_a_text(
    demo: Path, demo_store: Callable[[str], Any], model: Any, text: list[int]
) -> None:
    from odmoe.clusters.embedded import EmbeddedCluster
    from odmoe.settings.settings import Settings

    window = text[:20]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([window])).logits[0, :-1].float()
    cluster = EmbeddedCluster(Settings(model=str(demo), workers=2, threads=1), demo_store("float32"))
    try:
        found = forced_logits(cluster, window)
    finally:
        cluster.close()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert losses(found, window) == pytest.approx(losses(expected, window), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("given", [1, 7])
def test_a_forced_text_after_a_prompt_of_some_tokens(given: int, demo_store: Any) -> None:
    from transformers import AutoModelForCausalLM

    from odmoe.clusters.embedded import EmbeddedCluster
    from odmoe.settings.settings import Settings

    window = [0, 5, 17, 300, 41, 7, 90, 1200, 33, 8, 2]
    cluster = EmbeddedCluster(Settings(model="demo", shadow="none", workers=2, threads=1), demo_store("float32"))
    try:
        forced = forced_logits(cluster, window, given)
    finally:
        cluster.close()
    model = AutoModelForCausalLM.from_pretrained("models/demo-moe", dtype="float32", experts_implementation="eager")
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([window])).logits[0, given - 1 : -1]
    torch.testing.assert_close(forced, wanted, rtol=1e-4, atol=1e-4)
