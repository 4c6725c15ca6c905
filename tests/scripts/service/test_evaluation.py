"""How the scores of the harness are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from scripts.service.evaluation import CHOICES, broken, compared, same, write_tasks


def found(choice: list[Any], text: list[str], score: float = 0.5) -> dict[str, Any]:
    return {
        "scores": {
            "which_solution": {"acc,none": score, "acc_stderr,none": 0.1, "alias": "which_solution"},
            "solution": {"bleu,none": 2.0},
        },
        "samples": {"which_solution": [{"filtered_resps": choice}], "solution": [{"filtered_resps": text}]},
    }


def test_the_tasks(tmp_path: Path) -> None:
    write_tasks(tmp_path, 6)
    lines = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    for line in lines:
        assert len(set(line["solutions"])) == CHOICES
        assert line["solutions"][line["right"]] == line["solution"]
    assert {line["right"] for line in lines} == set(range(CHOICES))
    assert yaml.safe_load((tmp_path / "solution.yaml").read_text())["output_type"] == "generate_until"


def test_responses_are_compared_and_not_scores_alone() -> None:
    choice, other = [["-1.00001", "True"], ["-3.0", "False"]], [["-1.0", "True"], ["-3.0", "True"]]
    rows = compared("demo-moe", found(choice, ["a"]), found(choice, ["a"]))
    assert [(row["task"], row["score"], row["different"]) for row in rows] == [
        ("which_solution", "acc", 0),
        ("solution", "bleu", 0),
    ]
    assert broken(rows) == []
    rows = compared("demo-moe", found(choice, ["a"]), found(other, ["b"]))
    assert [row["different"] for row in rows] == [1, 1]
    assert len(broken(rows)) == 2
    assert len(broken(compared("demo-moe", found(choice, ["a"]), found(choice, ["a"], 0.25)))) == 1


def test_log_likelihoods_may_differ_by_rounding() -> None:
    assert same([["-1.0", "True"]], [["-1.0005", "True"]])
    assert not same([["-1.0", "True"]], [["-1.01", "True"]])
    assert not same([["-1.0", "True"]], [["-1.0", "False"]])
    assert not same(["text"], ["texts"])
