"""A model here that thinks before it answers: what it thinks is no part of the answer."""

from __future__ import annotations

from typing import Any, ClassVar

from main_node.answer import Step
from odmoe.conversation.chat_model import Delta
from odmoe.conversation.local_model import _LocalAnswer, _reader


class Tokenizer:
    """One token a word, none of them special."""

    chat_template = "{% if think %}<think></think>{% endif %}"
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}


class Opened:
    tokenizer = Tokenizer()


class Answer(list):  # type: ignore[type-arg]
    """Pieces, as an answer gives them."""

    report = None

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_thoughts_are_told_from_the_answer() -> None:
    words = ["<think>", "Four", " it is.", "</think>", "\n\n", "4", "."]
    pieces = [(word, Step(number, finish="stop" if number == 6 else None)) for number, word in enumerate(words)]
    opened: Any = Opened()
    answer = _LocalAnswer(Answer(pieces), _reader(opened, "2+2?", [1], {}))  # type: ignore[arg-type]
    found = list(answer)
    assert "".join(one.reasoning for one in found).strip() == "Four it is."
    assert "".join(one.text for one in found).strip() == "4."
    assert all(isinstance(one, Delta) for one in found)
