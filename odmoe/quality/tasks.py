"""Tasks with right answers: a table of data sets in YAML, and the multiple choice that any text gives.

    tasks:
      mmlu:
        form: choice                  # the most likely of some options, by nats a token
        file: mmlu.jsonl              # beside the table; a JSON object a line
        prompt: "{question}\\nAnswer:"
        options: choices              # a field with a list, or a list of templates
        right: answer                 # an index, a letter, one of `labels`, or a list that is 1 at the right one
      gsm8k:
        form: number                  # the number after #### of a greedy answer, or its last one
        file: gsm8k_test.jsonl
        prompt: "Question: {question}\\nAnswer:"
        answer: "{answer}"
        tokens: 128
      humaneval:
        form: text                    # nats a token of the answer after the prompt
        file: HumanEval.jsonl
        prompt: "{prompt}"
        answer: "{canonical_solution}"

`{a.b}` is field b of field a. `items`: the most that are asked (200). A prompt and an option are tokenised apart; the
option begins with a space, unless the prompt ends with one or with a new line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from odmoe.quality.passages import losses
from odmoe.quality.readers import Reader
from scheduler.errors import ConfigError
from scheduler.yaml_file import read_yaml

FORMS = ("choice", "number", "text")
ITEMS, TOKENS = 200, 128
"""Of a task, unless the table says otherwise: the most items, and the most tokens of an answer."""
CONTEXT, CONTINUATION, OPTIONS = 64, 16, 4
"""Of the multiple choice of a text: tokens of a context and of a continuation, and continuations."""
_FIELD = re.compile(r"\{([\w.]+)\}")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_KEYS = {"form", "file", "prompt", "options", "labels", "right", "answer", "tokens", "items"}

Encode = Callable[[str, bool], list[int]]
"""Text, whether it begins a prompt -> its tokens."""
Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `options`: the continuations to compare, or the one answer of a text. `right`: the option's number.
    `number`: what the answer must come to."""

    prompt: list[int]
    options: list[list[int]]
    right: int = 0
    number: Decimal | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """Questions of one form. `tokens`: the most of an answer."""

    name: str
    form: str
    items: list[Item]
    tokens: int = TOKENS

    def score(self, item: Item, reader: Reader, decode: Decode) -> float:
        """1 where it is right, else 0; of a text, nats a token."""
        if self.form == "number":
            return float(final_answer(decode(reader.answer(item.prompt, self.tokens))) == item.number)
        nats = [_mean_loss(reader, item.prompt, option) for option in item.options]
        return nats[0] if self.form == "text" else float(min(range(len(nats)), key=nats.__getitem__) == item.right)


def _mean_loss(reader: Reader, prompt: list[int], option: list[int]) -> float:
    logits = reader.logits([*prompt, *option], len(prompt))
    found = losses(logits, [prompt[-1], *option])
    return sum(found) / len(found)


def continuations(passages: Sequence[list[int]], most: int = ITEMS) -> Task:
    """Which of four continuations follows in the text: the true one, or those of the next three passages.

    The true one is at a place that goes round. Raises ConfigError where the text has too few passages.
    """
    whole = [passage for passage in passages if len(passage) >= CONTEXT + CONTINUATION]
    if len(whole) < OPTIONS:
        return Task("continuation", "choice", [])
    after = [passage[CONTEXT : CONTEXT + CONTINUATION] for passage in whole]
    items = []
    for number, passage in enumerate(whole[:most]):
        right = number % OPTIONS
        options = [after[(number + step) % len(whole)] for step in range(1, OPTIONS)]
        items.append(Item(passage[:CONTEXT], [*options[:right], after[number], *options[right:]], right))
    return Task("continuation", "choice", items)


def read_tasks(table: Path, encode: Encode, context: int) -> tuple[list[Task], list[str]]:
    """The tasks of a table, and the names of those whose file is not there. Items longer than `context` lose the
    beginning of their prompt. Raises ConfigError."""
    what = f"the table of tasks {table}"
    found = read_yaml(table, what)
    if not isinstance(found, dict) or not isinstance(found.get("tasks"), dict) or not found["tasks"]:
        raise ConfigError(f"{what} has no tasks; give it `tasks:`, and lines for each (docs/models.md)")
    tasks, missing = [], []
    for name, given in found["tasks"].items():
        try:
            file = table.parent / _checked(given)["file"]
            if not file.is_file():
                missing.append(str(name))
                continue
            tasks.append(_task(str(name), given, file, encode, context))
        except (_WrongError, KeyError, IndexError, ValueError, TypeError, OSError) as error:
            text = f"a field {error} is not there" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"task {name} of {table} cannot be read: {text}; mend the table, or the file") from error
    if not tasks:
        raise ConfigError(f"{what} names no file that is there; get one of {', '.join(missing)}")
    return tasks, missing


class _WrongError(Exception):
    """What is wrong with a task."""


def _checked(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _WrongError(f"it is a {type(given).__name__}, not lines of `key: value`")
    if unknown := sorted(set(given) - _KEYS):
        raise _WrongError(f"{unknown[0]} is not a key of a task; allowed: {', '.join(sorted(_KEYS))}")
    if given.get("form") not in FORMS:
        raise _WrongError(f"its form is {given.get('form')!r}; allowed: {', '.join(FORMS)}")
    for key in ("file", "prompt", *(("options", "right") if given["form"] == "choice" else ("answer",))):
        if key not in given:
            raise _WrongError(f"{key} is missing")
    for key in ("items", "tokens"):
        if not isinstance(given.get(key, 1), int) or given.get(key, 1) < 1:
            raise _WrongError(f"{key} is {given[key]!r}; allowed: 1, 2, ...")
    return given


def _task(name: str, given: Mapping[str, Any], file: Path, encode: Encode, context: int) -> Task:
    form, tokens = given["form"], given.get("tokens", TOKENS)
    with file.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(filter(str.strip, lines), given.get("items", ITEMS))]
    if not rows:
        raise _WrongError(f"{file.name} has no lines")
    items = []
    for row in rows:
        asked = _filled(given["prompt"], row)
        prompt = encode(asked, True)
        if form == "number":
            answer = _filled(given["answer"], row)
            if (number := final_answer(answer)) is None:
                raise _WrongError(f"its right answer {answer!r:.80} has no number")
            items.append(Item(prompt[-max(1, context - tokens) :], [], number=number))
            continue
        texts = _options(given["options"], row) if form == "choice" else [_filled(given["answer"], row)]
        options = [encode(text if asked[-1:].isspace() else _spaced(text), False) for text in texts]
        room = context - max(map(len, options))
        if room < 1 or not all(options):
            raise _WrongError(f"an option has no tokens, or more than the model's context of {context}")
        right = _right(given, row, len(options)) if form == "choice" else 0
        items.append(Item(prompt[-room:], options, right))
    return Task(name, form, items, tokens)


def _spaced(text: str) -> str:
    return text if text[:1].isspace() else f" {text}"


def _field(row: Any, name: str) -> Any:
    for part in name.split("."):
        row = row[part]
    return row


def _filled(template: str, row: Any) -> str:
    return _FIELD.sub(lambda found: str(_field(row, found[1])), template)


def _options(given: Any, row: Any) -> list[str]:
    return [_filled(one, row) for one in given] if isinstance(given, list) else [*map(str, _field(row, given))]


def _right(given: Mapping[str, Any], row: Any, count: int) -> int:
    value = _field(row, given["right"])
    if "labels" in given:
        value = _field(row, given["labels"]).index(value)
    elif isinstance(value, list):
        value = value.index(1)
    elif isinstance(value, str) and not value.isdigit():
        value = ord(value.upper()) - ord("A")
    if not 0 <= int(value) < count:
        raise _WrongError(f"its right answer is {value!r}, of {count} options")
    return int(value)


def final_answer(text: str) -> Decimal | None:
    """The number after the first `####`; where there is none, the last number. None: no number at all."""
    _, marked, after = text.partition("####")
    numbers: list[str] = _NUMBER.findall(after.lstrip().split("\n")[0] if marked else text)
    if not numbers:
        return None
    return Decimal((numbers[0] if marked else numbers[-1]).replace(",", "").replace("$", ""))
