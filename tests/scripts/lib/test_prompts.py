"""What predictors are trained on and what anything is measured on have no text in common."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

import pytest

from odmoe.training import domains
from odmoe.training.domains import DOMAINS, training_prompts
from scripts.lib import prompts
from support.paths import ROOT

STRETCH = 40
"""Characters in a row that no text of either side shares with one of the other, blanks of any length being one."""
DATA = ROOT / "scripts" / "data"
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
TRAINS = {"scripts/lib/prompts.py"}
"""Scripts that may import from where the training prompts are: for names of domains."""


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def shared(measured: list[str], trained: list[str]) -> list[str]:
    """Stretches of measured texts, or whole shorter ones, that stand in training prompts."""
    known = "\n".join(map(plain, trained))
    texts = map(plain, measured)
    pieces = (text[at : at + STRETCH] for text in texts for at in range(max(1, len(text) - STRETCH + 1)))
    return [piece for piece in pieces if piece in known]


def every_measured_text() -> Iterator[str]:
    """All that experiments read, whole: the prompts by domain, and every string of the files of scripts/data."""
    yield from (text for texts in prompts.measured_prompts().values() for text in texts)
    for file in sorted(DATA.rglob("*")):
        if file.suffix == ".jsonl":
            yield from (text for line in file.read_text().splitlines() for text in json.loads(line).values())
        elif file.parent.name == "prompts":
            yield from map(json.loads, file.read_text().splitlines())
        elif file.suffix == ".txt":
            yield file.read_text()


def test_no_measured_text_stands_in_a_training_prompt() -> None:
    trained = [text for texts in training_prompts().values() for text in texts]
    assert shared(list(every_measured_text()), trained) == []
    assert shared(trained, list(every_measured_text())) == []


def test_a_problem_on_both_sides_is_found() -> None:
    """Predictors were trained on problems 20 to 39 of GSM8K's test set once, while systems were compared on all 40."""
    trained = prompts.problems()[20:]
    drawn = [text for domain, text in prompts.mixed_prompts(15, seed=0) if domain == "problems"]
    assert len(drawn) == 3
    assert shared(prompts.problems(), trained)
    part = prompts.problems()[24][30:90]
    assert shared([f"Otherwise said, {part}"], trained)
    assert not shared(prompts.problems()[:20], trained)


def test_both_sides_have_prompts_of_every_domain() -> None:
    trained, measured = training_prompts(), prompts.measured_prompts()
    assert set(trained) == set(measured) == set(DOMAINS)
    assert {file.stem for file in domains.FOLDER.glob("*.txt")} == set(DOMAINS), "no file that is not read"
    for side in (trained, measured):
        texts = [text for of in side.values() for text in of]
        assert len(set(texts)) == len(texts)
        assert all(len(of) >= 10 for of in side.values())


def test_mixed_prompts_are_of_each_domain_in_turns() -> None:
    found = prompts.mixed_prompts(12, seed=3)
    assert [domain for domain, _ in found] == [*DOMAINS, *DOMAINS, *DOMAINS[:2]]
    measured = prompts.measured_prompts()
    assert all(text in measured[domain] for domain, text in found)
    assert len(set(found)) == 12
    assert found == prompts.mixed_prompts(17, seed=3)[:12]
    assert found != prompts.mixed_prompts(12, seed=4)
    with pytest.raises(SystemExit, match="1000 prompts are wanted; there are"):
        prompts.mixed_prompts(1000)


def test_scripts_have_no_other_source_of_prompts() -> None:
    """scripts/lib/prompts.py alone reads scripts/data, and the training prompts are for training alone."""
    files = {file.name for file in DATA.rglob("*") if file.suffix in (".txt", ".jsonl")} | {"gsm8k_prompts.json"}
    for script in SCRIPTS:
        name = str(script.relative_to(ROOT))
        nodes = list(ast.walk(ast.parse(script.read_text())))
        imported = {
            f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        if name != "scripts/lib/prompts.py":
            assert "scripts.lib.paths.DATA" not in imported, name
            said = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            assert not files & said, name
        if name not in TRAINS:
            assert not {one for one in imported if one.startswith("odmoe.training.domains")}, name
