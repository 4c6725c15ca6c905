"""An alignment in parts that arrive apart from each other."""

from __future__ import annotations

from typing import Any

import pytest

from support.shadows.shadow_client import PROMPT_TOKENS
from wire.messages import Align, Failed, Prediction


@pytest.mark.timeout(90)
@pytest.mark.parametrize("layer", [0, 5, 7])
def test_a_pass_does_not_begin_between_two_parts_of_its_alignment(layer: int, main_of: Any, answers: Any) -> None:
    """The first part comes while the pass before is in flight, the second when that has ended."""
    main, stop, sent = main_of("fp16"), PROMPT_TOKENS + 1, []
    main.open(1, answers[0], late=False, kv=1)
    main.settle()

    def part(start: int, end: int, more: bool) -> Align:
        return Align(1, 1, answers[0].tokens[1], start, answers[0].rows(start, end), more)

    def arrive(message: Prediction) -> None:
        if (message.request, message.position, message.layer) == (1, PROMPT_TOKENS, layer) and not sent:
            sent.append(message)
            main.channel.send(part(stop - 2, stop - 1, more=True))

    main.on_prediction = arrive
    main.align(1, 0)
    main.settle()
    main.channel.send(part(stop - 1, stop, more=False))
    main.settle()
    assert sent
    assert main.of(Failed) == []
    assert main.predicted(1, 1)
