"""What the shadow is told, exact commands: whom to follow, and alignments."""

from __future__ import annotations

import pytest

from scheduler import types as t
from scheduler.policies.predictors.base import NoPrediction
from support.scheduling.core_driver import Driver, P, compute


def test_a_shadow_that_joins_late_takes_up_every_open_request() -> None:
    d = Driver(shadow=False)
    assert d.open(1, prompt=10, decode=False) == []
    assert d.open(2, prompt=20) == []
    assert d.token(1, 2, 20) + d.token(2, 2, 20) == []
    assert d.open(3, prompt=30) == []
    d.do(t.RequestClosed(3))
    # Request 2 has decoded tokens 0 to 2: pass 2 reads the third and stands on 20 + 2 KV rows.
    assert d.do(t.ShadowJoined()) == ["follow 1 from 0", "follow 2 from 2", "align 2 step 2 token kv 0:22"]
    assert d.do(t.TokenDecoded(1, 0)) == ["align 1 step 0 token kv 0:10"]
    assert d.do(t.TokenDecoded(2, 3)) == ["align 2 step 3 token kv 22:23"]


def test_a_shadow_that_is_lost_is_told_nothing_and_its_predictions_stand() -> None:
    d = Driver(layers=2)
    d.open()
    d.predict(0, 3, 5)
    assert d.do(t.ShadowLost()) == []
    assert d.gate(0, 3, 5) == compute("0.0 0/3", "1.0 0/5")
    d.computed(0, 1)
    assert d.gate(1, 4) == ["load 2.0 1/4", *compute("2.0 1/4")]
    d.computed(2)
    assert d.token(1) == []
    assert d.open(2, decode=False) == []
    assert d.do(t.ShadowJoined()) == ["follow 1 from 1", f"align 1 step 1 token kv 0:{P + 1}", "follow 2 from 0"]
    assert d.do(t.RequestClosed(2)) == ["unfollow 2"]


def test_predictions_of_a_shadow_that_is_lost_are_not_waited_for() -> None:
    d = Driver(layers=2)
    d.open()
    d.gate(0, 3, 5)
    assert d.stats().unmatched_count == 1
    d.do(t.ShadowLost())
    assert d.stats().unmatched_count == 0
    d.computed(0, 1)
    d.gate(1, 4)
    assert d.stats().unmatched_count == 0  # nobody predicts any more


def test_a_lost_shadow_says_nothing_about_what_a_predictor_still_owes() -> None:
    d = Driver(layers=2, predictor=NoPrediction(t.ModelShape((0, 1), 8, 2)))
    d.open()
    d.gate(0, 3, 5)
    d.do(t.ShadowLost())
    assert d.stats().unmatched_count == 1


HAND = {
    (1, 1): ["token kv 0:5", "token kv 5:6", "token kv 6:7", "token kv 7:8", "token kv 8:9", "token kv 9:10"],
    (0, 0): ["kv 5:5", "kv 6:6", "kv 7:7", "kv 8:8", "kv 9:9", "kv 10:10"],
    (1, 4): ["token kv 0:5", "token kv 6:6", "token kv 7:7", "token kv 8:8", "token kv 5:9", "token kv 10:10"],
    (2, 1): ["token kv 0:5", "kv 5:6", "token kv 6:7", "kv 7:8", "token kv 8:9", "kv 9:10"],
    (4, 2): ["token kv 0:5", "kv 6:6", "kv 5:7", "kv 8:8", "token kv 7:9", "kv 10:10"],
    (0, 2): ["kv 0:5", "kv 6:6", "kv 5:7", "kv 8:8", "kv 7:9", "kv 10:10"],
}


@pytest.mark.parametrize(("periods", "expected"), HAND.items(), ids=str)
def test_alignments_written_out_by_hand(periods: tuple[int, int], expected: list[str]) -> None:
    """Five prompt tokens, six decode passes."""
    d = Driver(periods=periods)
    d.open(prompt=5, decode=False)
    got = [x for index in range(6) for x in d.do(t.TokenDecoded(1, index))]
    assert got == [f"align 1 step {step} {what}" for step, what in enumerate(expected)]


NEWEST = {
    (1, 1): ["token kv 0:5", "token kv 5:6", "token kv 6:7", "token kv 7:8", "token kv 8:9", "token kv 9:10"],
    (1, 4): ["token kv 0:5", "token kv 6:6", "token kv 7:7", "token kv 8:8", "token kv 8:9", "token kv 10:10"],
    (4, 2): ["token kv 0:5", "kv 6:6", "kv 6:7", "kv 8:8", "token kv 8:9", "kv 10:10"],
}


@pytest.mark.parametrize(("periods", "expected"), NEWEST.items(), ids=str)
def test_the_rows_of_the_newest_token_alone(periods: tuple[int, int], expected: list[str]) -> None:
    """OD-MoE 4.2: "all KV cache corresponding to the newly generated token". The first brings the prompt's."""
    d = Driver(periods=periods, kv_rows="newest")
    d.open(prompt=5, decode=False)
    got = [x for index in range(6) for x in d.do(t.TokenDecoded(1, index))]
    assert got == [f"align 1 step {step} {what}" for step, what in enumerate(expected)]


@pytest.mark.parametrize("token_period", [0, 1, 2, 4])
@pytest.mark.parametrize("kv_period", [0, 1, 2, 4])
@pytest.mark.parametrize("joined_at", [0, 1, 3, 4])
def test_alignments_bring_every_kv_row_exactly_once(token_period: int, kv_period: int, joined_at: int) -> None:
    """`joined_at`: tokens decoded when the shadow comes."""
    prompt, passes = 7, 14
    d = Driver(periods=(token_period, kv_period), shadow=False)
    d.open(prompt=prompt, decode=False)
    aligns: list[t.Align] = []
    for index in range(passes):
        if index == joined_at:
            d.do(t.ShadowJoined())
            aligns += [c for c in d.raw if isinstance(c, t.Align)]
        d.do(t.TokenDecoded(1, index))
        aligns += [c for c in d.raw if isinstance(c, t.Align)]
    first = max(joined_at - 1, 0)
    assert [a.step for a in aligns] == list(range(first, passes))
    assert [a.step for a in aligns if a.token] == [
        s for s in range(first, passes) if token_period and not s % token_period
    ]
    brought = [row for a in aligns for row in range(a.kv_start, a.kv_stop)]
    due = [s for s in range(first, passes) if kv_period and not s % kv_period]
    assert brought == list(range(prompt + due[-1] if due else 0))
    assert [a.step for a in aligns if a.kv_start < a.kv_stop] == due


BLOCKS = {
    (1, 1): [(0, True, 0, 5, 0), (3, True, 5, 8, 2), (4, True, 8, 9, 0), (9, True, 9, 14, 4)],
    (4, 4): [(0, True, 0, 5, 0), (3, False, 8, 8, 0), (4, True, 5, 9, 0), (9, True, 9, 14, 4)],
    (3, 2): [(0, True, 0, 5, 0), (3, True, 5, 8, 2), (4, False, 8, 9, 0), (9, True, 9, 14, 4)],
    (0, 5): [(0, False, 0, 5, 0), (3, False, 8, 8, 0), (4, False, 9, 9, 0), (9, False, 5, 14, 0)],
}
"""Periods -> step, token, KV rows, and passes before whose tokens are sent, too."""


@pytest.mark.parametrize(("periods", "expected"), BLOCKS.items(), ids=str)
def test_a_block_is_aligned_once(periods: tuple[int, int], expected: list[tuple[int, bool, int, int, int]]) -> None:
    d = Driver(periods=periods)
    d.open(prompt=5, decode=False)
    got = []
    for index in (0, 3, 4, 9):
        d.do(t.TokenDecoded(1, index, drafts=7))
        got += [c for c in d.raw if isinstance(c, t.Align)]
    assert got == [t.Align(1, step, token, start, stop, 7, before) for step, token, start, stop, before in expected]


def test_a_shadow_that_joins_amid_blocks_is_told_the_next_from_there_on() -> None:
    d = Driver(periods=(1, 1), shadow=False)
    d.open(prompt=5, decode=False)
    d.do(t.TokenDecoded(1, 0))
    d.do(t.TokenDecoded(1, 4, drafts=3))
    d.do(t.ShadowJoined())
    assert t.Align(1, 4, True, 0, 9, 3) in d.raw
    d.do(t.TokenDecoded(1, 6))
    assert t.Align(1, 6, True, 9, 11, before=1) in d.raw


def test_where_the_main_model_reads_all_tokens_again_the_shadow_does_too() -> None:
    d = Driver(layers=2)
    d.open()
    d.gate(0, 3, 5)
    d.computed(0, 1)
    d.gate(1, 4)
    d.computed(2)
    d.do(t.TokenDecoded(1, 1))
    d.predict(0, 1, 2, at=P + 1)
    assert [visit for visit in d.core._state.visits if visit.position == P + 1], "the announced pass was predicted"
    d.do(t.StepStarted((t.Pass(1, 0, P + 2, prefill=True),)))
    assert not [visit for visit in d.core._state.visits if visit.position == P + 1]
    d.predict(1, 1, 2, at=P + 1)
    assert not [visit for visit in d.core._state.visits if visit.position == P + 1], "its pass is never begun"
    again = d.do(t.TokenDecoded(1, 2))
    assert again[-2:] == ["follow 1 from 2", f"align 1 step 2 token kv 0:{P + 2}"]
    assert d.stats().unmatched_count == 0, "passes before are not predicted any more"
    d.step(1, index=2)
    assert d.do(t.TokenDecoded(1, 3)) == [f"align 1 step 3 token kv {P + 2}:{P + 3}"]
