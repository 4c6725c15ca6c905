"""Which pass is next, and when the shadow goes back: by hand."""

from __future__ import annotations

import zlib
from random import Random

import pytest

from scheduler.alignment import AT_ONCE, LATE, Alignment
from scheduler.departure import Rewind, ShadowSchedule

EVERY = Alignment(1, 1)


def course(
    departure: str = AT_ONCE, alignment: Alignment = EVERY, lookahead: int = 2, passes: int = 9
) -> ShadowSchedule:
    return ShadowSchedule(alignment, departure, lookahead, 0, passes)


def run(of: ShadowSchedule, step: int) -> None:
    """Pass `step` begins, and ends."""
    assert of.may_start()
    assert of.step == step
    of.start()
    assert of.on_ended() == Rewind.NONE


def ahead() -> ShadowSchedule:
    """Passes 0 and 1 have been run, 1 ahead of its alignment."""
    of = course()
    assert of.on_aligned(0, other_token=False, rows=True) == Rewind.NONE
    run(of, 0)
    assert of.is_ahead
    run(of, 1)
    return of


def test_the_first_pass_waits_for_prefill() -> None:
    assert not course().may_start()
    assert course(alignment=Alignment(0, 0)).may_start()


def test_late_waits_for_each_alignment() -> None:
    of = course(LATE)
    of.on_aligned(0, other_token=False, rows=True)
    run(of, 0)
    assert not of.may_start()


def test_at_once_is_ahead_of_one_alignment() -> None:
    assert not ahead().may_start()


def test_lookahead_bounds_what_is_ahead() -> None:
    of = course(alignment=Alignment(4, 4), lookahead=2)
    of.on_aligned(0, other_token=False, rows=True)
    for step in (0, 1, 2):
        run(of, step)
    assert not of.may_start()
    for step in (1, 2):
        of.on_aligned(step, other_token=False, rows=False)
        run(of, step + 2)
    assert not of.may_start()  # pass 4 was ahead of its alignment, and so would be pass 5
    of = course(lookahead=0)
    of.on_aligned(0, other_token=False, rows=True)
    run(of, 0)
    assert not of.may_start()


def test_the_same_token_without_rows_stands() -> None:
    of = ahead()
    assert of.on_aligned(1, other_token=False, rows=False) == Rewind.NONE
    run(of, 2)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_another_token_means_to_go_back(rows: bool, running: bool) -> None:
    of = course()
    of.on_aligned(0, other_token=False, rows=True)
    run(of, 0)
    of.start()
    if not running:
        of.on_ended()
    assert of.on_aligned(1, other_token=True, rows=rows) == Rewind.BACK
    assert not of.again
    run(of, 1)
    run(of, 2)


def test_rows_repeat_a_pass_that_has_ended() -> None:
    of = ahead()
    assert of.on_aligned(1, other_token=False, rows=True) == Rewind.BACK
    assert of.again
    assert of.last
    run(of, 1)
    assert not of.again
    run(of, 2)


def test_rows_are_taken_over_by_a_pass_in_flight_which_is_then_repeated() -> None:
    of = course()
    of.on_aligned(0, other_token=False, rows=True)
    run(of, 0)
    of.start()
    assert of.on_aligned(1, other_token=False, rows=True) == Rewind.TAKE_OVER
    assert of.on_ended() == Rewind.BACK
    assert of.again
    run(of, 1)
    run(of, 2)


def test_a_pass_that_cannot_take_rows_over_begins_again() -> None:
    of = course()
    of.on_aligned(0, other_token=False, rows=True)
    run(of, 0)
    of.start()
    assert of.on_aligned(1, other_token=False, rows=True, states=True) == Rewind.BACK
    assert not of.again


def test_no_pass_is_repeated_where_the_next_one_waits() -> None:
    of = course()
    of.on_aligned(0, other_token=False, rows=True)
    run(of, 0)
    of.start()
    of.on_aligned(1, other_token=False, rows=True)
    of.on_aligned(2, other_token=False, rows=True)
    assert of.on_ended() == Rewind.NONE
    run(of, 2)


def test_a_repetition_is_given_up_for_the_next_pass() -> None:
    of = ahead()
    of.on_aligned(1, other_token=False, rows=True)
    of.start()
    assert not of.gives_up(1)
    assert of.gives_up(2)
    assert of.on_aligned(2, other_token=False, rows=True) == Rewind.NONE
    assert of.step == 2
    assert not of.is_ahead
    run(of, 2)


def test_what_is_no_repetition_is_not_given_up() -> None:
    of = ahead()
    of.on_aligned(1, other_token=True, rows=True)
    of.start()
    assert not of.gives_up(2)


def test_passes_further_ahead_are_dropped() -> None:
    """Aligned every second pass: pass 2 runs ahead of its alignment, and pass 3 after it."""
    of = course(alignment=Alignment(2, 2), lookahead=3)
    of.on_aligned(0, other_token=False, rows=True)
    for step in (0, 1, 2, 3):
        run(of, step)
    of.on_aligned(1, other_token=False, rows=False)
    assert of.on_aligned(2, other_token=False, rows=True) == Rewind.BACK
    assert not of.last  # there is no way forward again
    of.start()
    assert not of.gives_up(3)
    assert of.on_ended() == Rewind.NONE
    run(of, 3)


def test_the_last_token_is_not_read() -> None:
    of = course(passes=1)
    of.on_aligned(0, other_token=False, rows=True)
    run(of, 0)
    of.on_aligned(1, other_token=False, rows=True)
    assert not of.may_start()


def walk(seed: int) -> str:
    """What a course does where alignments come at any moment, and no drafts are asked for."""
    chance = Random(seed)
    policy = Alignment(chance.randint(0, 3), chance.randint(0, 3))
    of = ShadowSchedule(policy, chance.choice(["at-once", "late"]), chance.randint(0, 3), 0, 12)
    told, step = [], -1
    for _ in range(60):
        what = chance.random()
        if what < 0.35 and of.may_start():
            of.start()
        elif what < 0.7 and of.running:
            told.append(of.on_ended().name)
        elif step < 12:
            step += 1
            told.append(f"{of.gives_up(step)}")
            other = policy.token_due(step) and chance.random() < 0.3
            rows = policy.kv_due(step) and chance.random() < 0.8
            told.append(of.on_aligned(step, other, rows, chance.random() < 0.2).name)
        told.append(f"{of.step} {of.announced} {of.running} {of.again} {of.last} {of.may_start()} {of.urgent}")
    return " ".join(told)


def test_without_drafts_every_turn_is_as_it_was_before_there_were_any() -> None:
    assert zlib.crc32("".join(map(walk, range(500))).encode()) == 2703981201  # of commit 40bca57


# --- drafting -------------------------------------------------------------------------------------------------------


def drafting(drafts: int = 4, until: int = 4, departure: str = AT_ONCE, alignment: Alignment = EVERY) -> ShadowSchedule:
    """Passes 0 to `until` have been run, all after 0 as drafts."""
    of = course(departure, alignment)
    assert of.on_aligned(0, other_token=False, rows=True, drafts=drafts) == Rewind.NONE
    for step in range(until + 1):
        run(of, step)
    return of


@pytest.mark.parametrize("departure", [AT_ONCE, LATE])
@pytest.mark.parametrize("alignment", [EVERY, Alignment(3, 2), Alignment(0, 0)])
def test_drafts_are_ahead_of_any_alignment(departure: str, alignment: Alignment) -> None:
    of = drafting(departure=departure, alignment=alignment)
    assert not of.may_start()
    of.on_aligned(3, other_token=False, rows=False, drafts=4)
    for step in (5, 6, 7):
        run(of, step)
    assert not of.may_start()


def test_no_draft_is_made_before_prefill_has_ended() -> None:
    of = course()
    of.drafts = 3
    assert not of.may_start()


def test_one_draft_is_no_fewer_passes_than_none() -> None:
    of = course(alignment=Alignment(4, 4), lookahead=2)
    of.on_aligned(0, other_token=False, rows=True, drafts=1)
    for step in (0, 1, 2):
        run(of, step)
    assert not of.may_start()


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_drafts_take_rows_over_and_are_not_repeated(step: int, running: bool) -> None:
    of = drafting(until=3)
    if running:
        of.start()
    assert of.on_aligned(step, other_token=False, rows=True, drafts=4) == Rewind.TAKE_OVER
    assert of.step == 4
    if running:
        assert of.on_ended() == Rewind.NONE
    else:
        run(of, 4)
    run(of, 5)


def test_rows_are_put_before_a_pass_that_has_not_begun() -> None:
    of = drafting(until=3)
    assert of.on_aligned(4, other_token=False, rows=True, drafts=4) == Rewind.NONE
    assert of.on_aligned(6, other_token=False, rows=True, drafts=4) == Rewind.NONE
    assert [of.may_start(), of.step, of.urgent] == [True, 4, True]


@pytest.mark.parametrize("other", [1, 2, 3])
def test_a_block_goes_back_to_its_first_other_token(other: int) -> None:
    of = drafting()
    assert of.on_aligned(3, other_token=False, rows=True, drafts=4, first_other=other) == Rewind.BACK
    assert [of.step, of.again, of.announced] == [other, False, 3]
    for step in range(other, 8):
        run(of, step)
    assert not of.may_start()


def test_another_token_for_a_pass_that_has_not_begun_changes_nothing() -> None:
    of = drafting(until=2)
    assert of.on_aligned(5, other_token=True, rows=True, drafts=4, first_other=3) == Rewind.NONE
    run(of, 3)
    of.start()
    assert of.on_aligned(6, other_token=True, rows=False, drafts=4) == Rewind.NONE
    assert of.on_aligned(7, other_token=False, rows=False, drafts=4, first_other=4) == Rewind.BACK
    assert of.step == 4


@pytest.mark.parametrize(("running", "again"), [(False, True), (True, True)])
def test_a_cache_with_states_goes_back_even_when_drafting(running: bool, again: bool) -> None:
    of = drafting(until=3)
    if running:
        of.start()
    assert of.on_aligned(2, other_token=False, rows=True, states=True, drafts=4) == Rewind.BACK
    assert [of.step, of.again, of.last] == [2, again, False]


def test_without_rows_drafts_stand_when_no_more_are_asked_for() -> None:
    of = drafting()
    for step in (1, 2, 3):
        assert of.on_aligned(step, other_token=False, rows=False) == Rewind.NONE
        assert not of.may_start()
    of.on_aligned(4, other_token=False, rows=False)
    run(of, 5)
    assert not of.may_start()


def test_with_rows_drafts_are_repeated_when_no_more_are_asked_for() -> None:
    of = drafting()
    assert of.on_aligned(2, other_token=False, rows=True) == Rewind.BACK
    assert [of.step, of.again, of.last] == [2, True, False]
    of.start()
    assert not of.gives_up(3)
    assert of.on_aligned(3, other_token=False, rows=True) == Rewind.NONE
    assert of.on_ended() == Rewind.NONE
    run(of, 3)
    run(of, 4)
    assert not of.may_start()
    assert of.on_aligned(4, other_token=False, rows=True) == Rewind.BACK  # from here on as without drafts
    assert of.last


def test_a_pass_that_has_taken_rows_over_is_not_repeated_once_drafts_are_asked_for() -> None:
    of = course()
    of.on_aligned(0, other_token=False, rows=True)
    run(of, 0)
    of.start()
    assert of.on_aligned(1, other_token=False, rows=True) == Rewind.TAKE_OVER
    assert of.on_aligned(2, other_token=False, rows=True, drafts=2) == Rewind.NONE
    assert of.on_ended() == Rewind.NONE
    assert of.step == 2
