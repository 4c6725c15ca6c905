"""States of recurrent layers go to the shadow by a period of their own, beside KV rows after every token."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint import kv
from main_node.engine.sequence import Sequence
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings

HYBRID = ("qwen3_next", "jamba", "kimi_linear", "nemotron_h", "granitemoehybrid", "bailing_hybrid")
GUESSED = 3 / 8
"""Recall of three experts of eight at random."""


@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 4, 0])
@pytest.mark.parametrize("family", HYBRID)
def test_states_are_sent_once_a_period(
    family: str, period: int, tiny: Any, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """In between the shadow's own go on, with the main model's tokens and KV rows. The tokens stay the same."""
    sent: list[kv.CachePiece] = []
    own = Sequence.kv_rows

    def telling(self: Sequence, *asked: Any) -> kv.CachePiece:
        sent.append(own(self, *asked))
        return sent[-1]

    monkeypatch.setattr(Sequence, "kv_rows", telling)
    asked = Settings(model=family, threads=1, shadow="int8", departure="late", align_states=period)
    cluster = EmbeddedCluster(asked, tiny.store)
    try:
        *_, last = cluster.generate(tiny.prompt, len(tiny.answer), ignore_eos=True)
        lost = list(cluster.main.engine.peers.lost)
    finally:
        cluster.close()
    assert (last.report.token_ids, lost) == (tiny.answer, [])
    passes = len(tiny.answer) - 1
    assert [bool(one.states) for one in sent] == [period > 0 and step % period == 0 for step in range(passes)]
    assert all(one.rows for one in sent)
    assert last.report.recall > GUESSED
    record_property("recall", last.report.recall)
    record_property("state_bytes", sum(state.nbytes for one in sent for state in one.states))
