"""Answers of an embedded model that go on only when a test lets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from odmoe.api.text_answer import Piece, TextAnswer

if TYPE_CHECKING:
    from support.machines.http_service import Served


class Gate:
    """Before the tokens of every answer, until it is opened; answers that are given up pass. Reports have one of their
    own."""

    def __init__(self) -> None:
        self._passing = 0
        self._open = threading.Event()
        self.reports = threading.Event()
        self.reports.set()

    def let(self, tokens: int) -> None:
        """So many of each answer pass."""
        self._passing = tokens

    def open(self) -> None:
        self._open.set()

    def pass_token(self, number: int, given_up: threading.Event) -> None:
        while number >= self._passing and not given_up.is_set() and not self._open.wait(0.01):
            pass

    def pass_report(self, given_up: threading.Event) -> None:
        while not (given_up.is_set() or self.reports.wait(0.01)):
            pass


@contextmanager
def gated() -> Iterator[Gate]:
    """Every answer that begins meanwhile has the gate, which is open at the end."""
    gate, whole = Gate(), TextAnswer._read

    def read(self: Any, *given: Any) -> Iterator[Piece]:
        for number, piece in enumerate(whole(self, *given)):
            gate.pass_token(number, self._given_up)
            yield piece
            if piece.step.finish is not None:
                gate.pass_report(self._given_up)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextAnswer, "_read", read)
        try:
            yield gate
        finally:
            gate.open()
            gate.reports.set()


def begun(served: Served, gate: Gate, tokens: int = 40) -> Any:
    """A stream of an answer that has given its first token and waits at the gate; iterate over it for the rest."""
    gate.let(1)
    stream = served.client().completions.create(
        model="demo-moe", prompt="Natalia", max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
    )
    assert next(iter(stream)).choices
    return stream
