"""Whatever becomes of the shadow, the tokens are the same, and none is held back for it."""

from __future__ import annotations

from typing import Any

import pytest

from support.promises import BUSY_S

pytestmark = pytest.mark.system


@pytest.mark.parametrize("fate", ["kill", "freeze"])
def test_the_shadow_is_gone(fate: str, nodes: Any, answer: Any) -> None:
    cluster = nodes.cluster(shadow=True)
    nodes.check_same(answer(cluster))
    seen = answer(cluster, {5: getattr(nodes.shadow, fate)})
    nodes.check_same(seen)
    assert seen.longest_gap_s < BUSY_S
    assert seen.held_back_s < BUSY_S


def test_the_shadow_is_silent(nodes: Any, answer: Any) -> None:
    """It lives and predicts nothing: the last token comes at once, as every other does."""
    cluster = nodes.cluster(shadow=True)
    nodes.shadow.set("predictions", "silent")
    seen = answer(cluster)
    nodes.check_same(seen)
    assert seen.held_back_s < 0.1 + BUSY_S
    assert not seen.report.recall_complete


@pytest.mark.parametrize("fault", ["wrong experts", "far future", "other layers"])
def test_the_shadow_predicts_what_is_wrong(fault: str, nodes: Any, answer: Any) -> None:
    cluster = nodes.cluster(shadow=True)
    nodes.shadow.set("predictions", fault)
    for _ in range(2):
        seen = answer(cluster)
        nodes.check_same(seen)
        assert seen.calls_itself_exact
        assert seen.longest_gap_s < BUSY_S
