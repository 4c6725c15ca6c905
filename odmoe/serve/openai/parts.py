"""What answers add to the choices of a response."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from odmoe.api.text_answer import Piece

if TYPE_CHECKING:
    from main_node.answer import Step
    from odmoe.serve.answers import AnswerEvent


@dataclass(slots=True)
class Part:
    """Of one choice: what one or more of its pieces add."""

    index: int
    text: str = ""
    steps: list[Step] = field(default_factory=list)
    finish: str | None = None
    """With the last part: `Report.finish`."""

    @property
    def reason(self) -> str | None:
        """The API's `finish_reason`."""
        if self.finish is None:
            return None
        return "length" if self.finish in ("length", "context") else "stop"


class Shape(Protocol):
    """How one of the APIs writes responses."""

    def response(self, parts: list[Part], usage: dict[str, Any]) -> dict[str, Any]:
        """A whole response, from all parts: one a choice."""

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """The events of a stream that a part makes."""

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The stream's last event, where it was asked for."""


def parts_of(got: Iterable[AnswerEvent]) -> list[Part]:
    """The parts, one a choice, in the order of the choices."""
    found: dict[int, Part] = {}
    for one in got:
        part = found.setdefault(one.choice, Part(one.choice))
        if isinstance(one.what, Piece):
            part.text += one.what.text
            part.steps.append(one.what.step)
            part.finish = one.what.step.finish
    return [found[index] for index in sorted(found)]


def usage_of(prompt_tokens: int, tokens: int, cached_tokens: int) -> dict[str, Any]:
    """`cached_tokens`: of the prompt, those that the prefix cache had."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
