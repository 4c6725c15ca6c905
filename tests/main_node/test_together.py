"""Several requests in one step: each answer is that of the request alone."""

from __future__ import annotations

from typing import Any

import pytest

from support.nodes.engine_world import nothing_left
from support.nodes.exact import WHOLE, check_together

pytestmark = pytest.mark.timeout(180)
TOKENS = 8


@pytest.mark.parametrize(("shadow", "slots"), [("none", 1), ("none", 2), ("int8", 1), ("nf4", 2)])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_tokens_and_logits_are_those_alone(count: int, shadow: str, slots: int, embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow=shadow, slots=slots, **WHOLE)
    expected = [reference("float32", number, TOKENS + number) for number in range(count)]
    check_together(cluster.main, expected)
    assert nothing_left(cluster.main.engine)
