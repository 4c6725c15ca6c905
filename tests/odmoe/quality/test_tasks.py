"""Tables of tasks: the data sets' own shapes, right answers counted by hand, and what is wrong with a table."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from odmoe.quality.quality import measure
from odmoe.quality.tasks import Item, Task, continuations, read_tasks
from scheduler.errors import ConfigError
from scheduler.yaml_file import read_yaml
from support.paths import ROOT

BENCHMARKS = ROOT / "docs" / "examples" / "benchmarks.yaml"


def encode(text: str, begins: bool) -> list[int]:
    return [1] * begins + [ord(letter) % 128 for letter in text]


class Likes:
    """Thinks tokens the more probable the larger they are; answers with a text."""

    def __init__(self, answer: str = "") -> None:
        self._answer = answer

    def logits(self, window: list[int], given: int = 1) -> torch.Tensor:
        return torch.arange(128).float().expand(len(window) - given, 128) / 10

    def answer(self, prompt: list[int], tokens: int) -> list[int]:
        return [ord(letter) for letter in self._answer][:tokens]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


ROWS: dict[str, dict[str, Any]] = {
    "mmlu": {"question": "1 + 1?", "choices": ["2", "3"], "answer": 1},
    "hellaswag": {"ctx": "He ran", "endings": ["a", "b", "c", "d"], "label": "2"},
    "arc-challenge": {"question": "Q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"},
    "piqa": {"goal": "open", "sol1": "pull", "sol2": "push", "label": 0},
    "boolq": {"passage": "P.", "question": "is it", "answer": True},
    "truthfulqa": {"question": "Q", "mc1_targets": {"choices": ["t", "u", "v"], "labels": [0, 1, 0]}},
    "triviaqa": {"question": "Who?", "answer": {"value": "Ada"}},
    "humaneval": {"prompt": "def f():", "canonical_solution": "    return 1\n"},
    "gsm8k": {"question": "Q", "answer": "2 + 3 = 5\n#### 5"},
}
RIGHT = {"mmlu": 1, "hellaswag": 2, "arc-challenge": 1, "piqa": 0, "boolq": 1, "truthfulqa": 1}


def test_the_benchmarks_of_the_papers_are_read_in_their_own_shapes(tmp_path: Path) -> None:
    table = read_yaml(BENCHMARKS, "it")
    assert set(table["tasks"]) == set(ROWS)
    for name, given in table["tasks"].items():
        given["file"] = f"{name}.jsonl"
        (tmp_path / given["file"]).write_text(json.dumps(ROWS[name]) + "\n")
    (tmp_path / "t.yaml").write_text(json.dumps(table))
    tasks, missing = read_tasks(tmp_path / "t.yaml", encode, 512)
    assert missing == []
    found = {task.name: task for task in tasks}
    assert {name: found[name].items[0].right for name in RIGHT} == RIGHT
    assert found["gsm8k"].items[0].number == Decimal(5)
    assert decode(found["piqa"].items[0].options[1]) == " push"
    assert decode(found["humaneval"].items[0].options[0]) == "    return 1\n"


def test_files_that_are_not_there_are_named_and_the_shipped_problems_are_read() -> None:
    tasks, missing = read_tasks(BENCHMARKS, encode, 512)
    assert [(task.name, len(task.items)) for task in tasks] == [("gsm8k", 40)]
    assert "mmlu" in missing
    assert tasks[0].items[0].number == Decimal(18)


def test_the_sums_that_are_shipped_have_one_right_answer() -> None:
    """In the chat model's template an answer begins a line, without a space."""
    [task], missing = read_tasks(ROOT / "docs" / "examples" / "sums.yaml", encode, 512)
    assert (missing, len(task.items)) == ([], 200)
    for item in task.items:
        sums = [decode(option).split() for option in item.options]
        results = [int(a) + int(b) if sign == "+" else int(a) - int(b) for a, sign, b, _, _ in sums]
        assert [int(said) == result for (*_, said), result in zip(sums, results, strict=True)] == [
            number == item.right for number in range(4)
        ]
        assert decode(item.options[0])[0].isdigit()


def test_scores_by_hand() -> None:
    """The option with the larger letters is liked, however long; nats are the mean of an option's."""
    choice = Task("c", "choice", [Item([1], [[50, 50, 50], [51]], right) for right in (0, 1)])
    assert [choice.score(item, Likes(), decode) for item in choice.items] == [0.0, 1.0]
    text = Task("t", "text", [Item([1, 2], [[3, 5]])])
    total = float(torch.logsumexp(torch.arange(128).double() / 10, 0))
    assert text.score(text.items[0], Likes(), decode) == pytest.approx(total - 0.4, abs=1e-5)
    number = Task("n", "number", [Item([1], [], number=Decimal(18))])
    assert number.score(number.items[0], Likes("so #### 18.0"), decode) == 1.0
    assert number.score(number.items[0], Likes("18 or 19"), decode) == 0.0


def test_differences_are_paired() -> None:
    """Half of the items become wrong: the interval is that of these differences, not of two shares."""
    number = Task("n", "number", [Item([1], [], number=Decimal(one)) for one in (1, 2) * 50])

    class Second(Likes):
        def answer(self, prompt: list[int], tokens: int) -> list[int]:
            return [ord("1")]

    class First(Second):
        calls = 0

        def answer(self, prompt: list[int], tokens: int) -> list[int]:
            self.calls += 1
            return [ord("2" if self.calls % 2 == 0 else "1")]

    _, [one] = measure(First(), Second, [[1, 2, 3]], 1, [number], decode)
    assert (one.original, one.changed, one.difference) == (1.0, 0.5, -0.5)
    low, high = one.difference_interval
    assert -0.62 < low < -0.55 < -0.45 < high < -0.38


def test_the_continuation_of_a_text_is_at_every_place() -> None:
    passages = [[n * 100 + k for k in range(80)] for n in range(8)]
    task = continuations(passages)
    assert [item.right for item in task.items] == [0, 1, 2, 3] * 2
    for passage, item in zip(passages, task.items, strict=True):
        assert item.options[item.right] == passage[64:80]
        assert len({tuple(option) for option in item.options}) == 4
    assert continuations(passages[:3]).items == []


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("[]", "has no tasks"),
        ("{t: 1}", "it is a int, not lines"),
        ("{t: {form: chioce}}", "form is 'chioce'; allowed: choice, number, text"),
        ("{t: {form: text, file: d, prompt: p}}", "answer is missing"),
        ("{t: {form: text, file: d, prompt: p, answer: a, item: 3}}", "item is not a key of a task"),
        ("{t: {form: text, file: d, prompt: p, answer: a, items: 0}}", "items is 0"),
        ("{t: {form: text, file: d, prompt: '{q.r}', answer: a}}", "cannot be read"),
        ("{t: {form: text, file: d, prompt: '{none}', answer: a}}", "a field 'none' is not there"),
        ("{t: {form: choice, file: d, prompt: p, options: [x, y], right: q}}", "its right answer is 5, of 2 options"),
        ("{t: {form: number, file: d, prompt: p, answer: '#### none'}}", "right answer '#### none' has no number"),
        ("{t: {form: text, file: e, prompt: p, answer: a}}", "task t of .* e has no lines"),
        ("{t: {form: text, file: none, prompt: p, answer: a}}", "names no file that is there; get one of t"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(task: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "d").write_text('{"q": 5}\n')
    (tmp_path / "e").write_text("\n")
    (tmp_path / "t.yaml").write_text(f"tasks: {task}")
    with pytest.raises(ConfigError, match=says):
        read_tasks(tmp_path / "t.yaml", encode, 512)
