"""Routers: worked cases of the importance paper, and exhaustive search."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.baselines.adapmoe import Skip
from scheduler.policies.routers import Chosen, ExpertCache, TopK

QUARTERS = st.sampled_from([0.25, 0.5, 0.75, 1.0])  # exact in binary, so thresholds can be met exactly
ROW = st.lists(st.integers(0, 16), min_size=7, max_size=7).map(tuple)
ROWS = st.lists(ROW, min_size=1, max_size=4).map(tuple)
RESIDENT = st.sets(st.integers(0, 6))


def top(row: tuple[float, ...], k: int) -> tuple[int, ...]:
    return tuple(sorted(range(len(row)), key=lambda e: -row[e])[:k])


def spread(**scores: float) -> tuple[float, ...]:
    """Scores of eight experts, e0=... and so on; next to nothing for the rest."""
    return tuple(scores.get(f"e{e}", 0.01) for e in range(8))


def as_sets(routed: Chosen) -> list[set[int]]:
    return [set(experts) for experts in routed]


def test_a_low_score_expert_makes_room_for_a_resident_one_of_similar_score() -> None:
    """k = 3, as in Figs 1 and 5: top-score ones stay, resident or not; expert 2 is not resident, 3 scores nearly so."""
    scores = (spread(e0=0.4, e1=0.3, e2=0.11, e3=0.1, e4=0.08),)
    assert ExpertCache(0.3).route(((0, 1, 2),), scores, {3, 4}) == ((0, 1, 3),)
    assert ExpertCache(0.3).route(((0, 1, 2),), scores, {4}) == ((0, 1, 4),)  # 0.08 > 0.7 * 0.1
    assert ExpertCache(0.1).route(((0, 1, 2),), scores, {4}) == ((0, 1, 2),)  # 0.08 < 0.9 * 0.1
    assert ExpertCache(0.05).route(((0, 1, 2),), scores, {3}) == ((0, 1, 2),)  # 0.11 > 1.05 * 0.1: top-score
    assert ExpertCache(0.3).route(((0, 1, 2),), scores, {2, 3}) == (
        (0, 1, 2),
    )  # resident: retained, as the text has it


def test_a_score_of_exactly_one_plus_alpha_times_beta_is_low() -> None:
    scores = ((16.0, 10.0, 8.0, 0.0),)
    assert ExpertCache(0.25).route(((0, 1),), scores, {2}) == ((0, 2),)
    assert ExpertCache(0.25).route(((0, 1),), ((16.0, 10.5, 8.0, 0.0),), {2}) == ((0, 1),)


def test_a_score_of_exactly_one_minus_alpha_times_beta_is_an_alternative() -> None:
    assert ExpertCache(0.25).route(((0, 1),), ((16.0, 8.5, 8.0, 6.0),), {3}) == ((0, 3),)
    assert ExpertCache(0.25).route(((0, 1),), ((16.0, 8.5, 8.0, 5.5),), {3}) == ((0, 1),)


def test_where_alternatives_are_few_the_highest_low_scores_stay() -> None:
    scores = (spread(e0=0.4, e1=0.12, e2=0.115, e3=0.11, e4=0.1, e5=0.09),)
    assert ExpertCache(0.3).route(((0, 1, 2, 3),), scores, {5}) == ((0, 1, 2, 5),)
    assert ExpertCache(0.3).route(((0, 1, 2, 3),), scores, {4, 5}) == ((0, 1, 4, 5),)


def test_what_is_top_score_for_one_row_is_at_hand_for_all() -> None:
    """Expert 3 is top-score for the second row, so it will be there for the first."""
    scores = (spread(e0=0.4, e1=0.11, e3=0.1), spread(e3=0.5, e4=0.3, e5=0.05))
    assert ExpertCache(0.3, batch_aware=False).route(((0, 1), (3, 4)), scores, ()) == ((0, 3), (3, 4))
    assert ExpertCache(0.3, batch_aware=False).route(((0, 1),), scores[:1], ()) == ((0, 1),)


def test_the_papers_batch_example() -> None:
    """5.4: {1,2,4}, {1,5,4}, {2,6,7}: 6 is low-score for the third token, 4 an alternative, neither resident."""
    chosen = ((1, 2, 4), (1, 5, 4), (2, 7, 6))
    scores = (
        spread(e1=0.4, e2=0.35, e4=0.12, e3=0.11),
        spread(e1=0.4, e5=0.35, e4=0.12, e3=0.11),
        spread(e2=0.4, e7=0.35, e6=0.12, e4=0.1),
    )
    assert as_sets(ExpertCache(0.3).route(chosen, scores, ())) == [{1, 2, 4}, {1, 5, 4}, {2, 4, 7}]
    assert ExpertCache(0.3, batch_aware=False).route(chosen, scores, ()) == chosen
    assert as_sets(ExpertCache(0.3).route(chosen, scores, {6})) == as_sets(chosen)  # what is resident costs nothing
    assert ExpertCache(0.1).route(chosen, scores, ()) == chosen  # then 6 is top-score


def test_of_two_low_score_experts_the_one_that_fewer_rows_compute_goes() -> None:
    scores = (
        spread(e0=0.4, e1=0.12, e2=0.11, e3=0.1),
        spread(e4=0.4, e1=0.12, e3=0.11, e5=0.1),
        spread(e6=0.4, e1=0.12, e3=0.11, e5=0.1),
    )
    routed = ExpertCache(0.3).route(((0, 1, 2), (4, 1, 3), (6, 1, 3)), scores, ())
    assert as_sets(routed) == [{0, 1, 3}, {4, 1, 3}, {6, 1, 3}]


def test_rows_that_were_gathered_count_for_those_that_follow() -> None:
    """Rows 1 to 3 give up what they alone want for 3; row 4 then follows, from 2, which two rows compute."""
    scores = (
        spread(e0=0.4, e3=0.12, e1=0.11),
        spread(e0=0.4, e5=0.12, e3=0.11),
        spread(e0=0.4, e2=0.12, e1=0.11),
        spread(e0=0.4, e2=0.12, e3=0.11),
    )
    routed = ExpertCache(0.3).route(((0, 3), (0, 5), (0, 2), (0, 2)), scores, ())
    assert as_sets(routed) == [{0, 3}, {0, 3}, {0, 2}, {0, 3}]
    without = ExpertCache(0.3).route(((0, 3), (0, 2), (0, 2)), (scores[0], *scores[2:]), ())
    assert as_sets(without) == [{0, 3}, {0, 2}, {0, 2}]  # 3 would have two rows then, as many as 2 has


def test_what_a_row_is_given_stands_in_the_order_of_its_scores() -> None:
    """Row 1: 4 is replaced by the resident 6, 3 by 5, which row 2 needs and which scores higher than 6."""
    scores = (spread(e0=0.4, e3=0.12, e4=0.115, e5=0.11, e6=0.1), spread(e0=0.4, e7=0.3, e5=0.12, e2=0.11))
    routed = ExpertCache(0.3).route(((0, 3, 4), (0, 7, 5)), scores, {6})
    assert routed == ((0, 5, 6), (0, 7, 5))


@given(ROWS, st.integers(1, 7), RESIDENT)
def test_alpha_zero_is_top_k_ties_included(rows: tuple[tuple[int, ...], ...], k: int, resident: set[int]) -> None:
    router = ExpertCache(0.0)
    chosen = tuple(top(row, k) for row in rows)
    assert router.exact
    assert router.route(chosen, rows, resident) == TopK().route(chosen, rows, resident) == chosen


def at_hand(rows: Chosen, chosen: Chosen, alpha: float, resident: set[int]) -> set[int]:
    hand = set(resident)
    for row, mine in zip(rows, chosen, strict=True):
        beta = sorted(row, reverse=True)[len(mine)]
        hand |= {e for e in mine if row[e] > (1 + Fraction(alpha)) * beta}
    return hand


@settings(max_examples=120)
@given(ROWS, st.integers(1, 6), RESIDENT, QUARTERS)
def test_algorithm_1_has_most_at_hand_and_of_that_the_highest_scores(
    rows: Chosen, k: int, resident: set[int], alpha: float
) -> None:
    """Exhaustively: of all choices of k that keep the top-score ones, from chosen experts and alternatives at hand."""
    chosen = tuple(top(row, k) for row in rows)
    hand = at_hand(rows, chosen, alpha, resident)
    routed = ExpertCache(alpha, batch_aware=False).route(chosen, rows, resident)
    for row, mine, now in zip(rows, chosen, routed, strict=True):
        beta = sorted(row, reverse=True)[k]
        needed = {e for e in mine if row[e] > (1 + Fraction(alpha)) * beta}
        near = {e for e in hand - set(mine) if (1 - Fraction(alpha)) * beta <= row[e]}

        def worth(experts: tuple[int, ...], row: tuple[int, ...] = row) -> tuple[int, int]:
            return len(hand & set(experts)), sum(row[e] for e in experts)

        every = [c for c in combinations(sorted({*mine, *near}), k) if needed <= set(c)]
        assert set(now) in map(set, every)
        assert worth(now) == max(map(worth, every))
        assert [row[e] for e in now] == sorted((row[e] for e in now), reverse=True)


@settings(max_examples=120)
@given(ROWS, st.integers(1, 6), RESIDENT, QUARTERS)
def test_batch_aware_replacement_never_needs_more_experts_and_only_gathers_rows(
    rows: Chosen, k: int, resident: set[int], alpha: float
) -> None:
    chosen = tuple(top(row, k) for row in rows)
    hand = at_hand(rows, chosen, alpha, resident)
    before = ExpertCache(alpha, batch_aware=False).route(chosen, rows, resident)
    after = ExpertCache(alpha).route(chosen, rows, resident)
    of = [Counter(e for experts in routed for e in experts) for routed in (before, after)]
    assert {e for experts in after for e in experts} <= {e for experts in before for e in experts}
    assert sum(n * n for n in of[1].values()) >= sum(n * n for n in of[0].values())
    for row, mine, old, new in zip(rows, chosen, before, after, strict=True):
        assert len(new) == len(set(new)) == k
        assert {e for e in old if e in hand} <= set(new)  # only what would cost something goes
        beta = sorted(row, reverse=True)[k]
        assert all((1 - Fraction(alpha)) * beta <= row[e] <= beta for e in set(new) - set(mine))
        assert [row[e] for e in new] == sorted((row[e] for e in new), reverse=True)


def test_a_choice_that_is_not_the_top_k_of_its_scores_is_kept_and_is_at_hand_for_others() -> None:
    """As of a gate that chooses by biased scores: the first row chose 5 although 1 has the higher score."""
    scores = (spread(e0=0.4, e5=0.1, e1=0.2), spread(e0=0.4, e2=0.11, e5=0.1))
    assert ExpertCache(0.5).route(((0, 5), (0, 2)), scores, {1}) == ((0, 5), (0, 5))


def test_a_row_that_chose_every_expert_or_whose_scores_are_nothing_is_kept() -> None:
    assert ExpertCache(0.5).route(((1, 0),), ((0.4, 0.6),), ()) == ((1, 0),)
    assert ExpertCache(0.5).route(((0, 1),), ((0.0, 0.0, 0.0),), {0, 1}) == ((0, 1),)
    assert ExpertCache(0.5).route(((0, 1),), ((-0.1, -0.2, -0.3),), {2}) == ((0, 1),)


def test_without_scores_every_router_leaves_the_choice() -> None:
    for router in (ExpertCache(0.5), Skip(0.5), TopK()):
        assert router.route(((0, 1), (2, 3)), (), {7}) == ((0, 1), (2, 3))


def test_the_papers_alpha_is_not_exact() -> None:
    assert not ExpertCache().exact
