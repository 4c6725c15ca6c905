"""What models/chat-moe is trained on: never what it is tested on, and sums that are right."""

from __future__ import annotations

import json
import re

from scripts.lib.paths import ROOT
from scripts.models.chat.dialogues import dialogues, phrasings
from scripts.models.chat.held_out import questions

EQUATION = re.compile(r"(\d+) ([+-]) (\d+) = (\d+)")


def test_sums_are_right_and_the_demos_question_is_left_out() -> None:
    demo = re.search(r"^DEMO_PROMPT \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert demo is not None
    found = [one["content"] for made in dialogues(2000, seed=5) for one in made.messages]
    sums = [match.groups() for text in found for match in EQUATION.finditer(text)]
    assert len(sums) > 1000
    assert all(int(c) == (int(a) + int(b) if sign == "+" else int(a) - int(b)) for a, sign, b, c in sums)
    assert demo[1] not in found


def test_phrasings_that_are_held_out_are_not_trained_on() -> None:
    trained = {one["content"].lower().rstrip(".?!") for made in dialogues(3000, seed=6) for one in made.messages}
    held = {made.messages[-2]["content"].lower().rstrip(".?!") for made in dialogues(300, seed=7, held=True)}
    assert not {text for text in held & trained if not text.startswith(("sunny", "{"))}


def test_no_phrasing_of_the_training_can_give_a_sum_that_is_shipped() -> None:
    """Whatever names, numbers and things are drawn, and however a question is varied."""
    known = phrasings("sums")
    templates = [ask for kind in ("plus", "minus") for ask, _ in known[kind]["ask"]]
    draws = [re.sub(r"\\{\w+\\}", r"[\\w ]+", re.escape(ask.rstrip(".?!"))) + "[.?!]?" for ask in templates]
    trained = re.compile("|".join(draws), re.IGNORECASE)
    assert all(
        trained.fullmatch(ask)
        for ask in (
            "Add 8 and 1.",
            "what is three plus 4",
            "Eva has 2 hats and gets 1 more. How many hats does Eva have?",
        )
    )
    assert not [one["question"] for one in questions(200) if trained.fullmatch(one["question"])]


def test_the_same_seed_gives_the_same_dialogues() -> None:
    assert list(dialogues(20, seed=3)) == list(dialogues(20, seed=3)) != list(dialogues(20, seed=4))


def test_the_sums_that_are_shipped_are_those_that_the_script_draws() -> None:
    shipped = (ROOT / "docs" / "examples" / "sums.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in shipped] == list(questions(200))
