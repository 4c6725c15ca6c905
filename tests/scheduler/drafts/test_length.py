"""How long blocks are: the rule against a search through all lengths, and over whole answers of given costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler.drafts.length import AUTO, MOST_DRAFTS, MOST_ROWS, DraftLengths, expected_tokens
from scheduler.errors import ConfigError

LOAD_BOUND = 0.2, 0.05
"""Seconds of a step: of the step itself, and of each row."""
ROW_BOUND = 0.0, 0.25


class Decoding:
    """Requests that decode together. Drafts are right at random, and there are always enough of them."""

    def __init__(self, cost, requests=1, draft=AUTO, late=False, noise=0.0):
        self.lengths = DraftLengths(draft, late, experts=8, top_k=2)
        self.open = [self.lengths.make_length() for _ in range(requests)]
        self.cost, self.noise, self.random = cost, noise, random.Random(1)
        self.tokens, self.seconds, self.rows, self.steps = 0, 0.0, 0, 0

    def run(self, tokens, right):
        """Returns the rows of the last step."""
        until = self.tokens + tokens
        while self.tokens < until:
            rows = [length.rows(MOST_ROWS, 1000) for length in self.open]
            seconds = (self.cost[0] + self.cost[1] * sum(rows)) * self.random.uniform(1 - self.noise, 1 + self.noise)
            for length, own in zip(self.open, rows, strict=True):
                gained = 1
                while gained < own and self.random.random() < right:
                    gained += 1
                length.on_verified(own, gained)
                if gained == own:
                    length.on_foretold(self.random.random() < right)
                self.tokens += gained
            self.lengths.on_step_ended([length.plan for length in self.open], sum(rows), seconds)
            self.seconds += seconds
            self.rows += sum(rows)
            self.steps += 1
        return rows

    @property
    def tokens_per_s(self):
        return self.tokens / self.seconds


def fastest(cost, requests, right):
    """Tokens a second of the best fixed length."""
    return max(
        requests * expected_tokens(right, rows) / (cost[0] + cost[1] * rows * requests)
        for rows in range(1, MOST_ROWS + 1)
    )


def alone(cost, requests=1):
    return requests / (cost[0] + cost[1] * requests)


# --- fixed ------------------------------------------------------------------------------------------------------


def test_a_given_number_takes_the_drafts_that_are_there():
    length = DraftLengths(3, late=False, experts=8, top_k=2).make_length()
    assert [length.rows(available, 100) for available in (0, 1, 3, 9)] == [1, 2, 4, 4]
    assert length.rows(9, 2) == 2


@pytest.mark.parametrize(("draft", "late", "ahead"), [(0, False, 0), (0, True, 0), (3, False, 7), (3, True, 3)])
def test_a_shadow_that_departs_at_once_drafts_the_next_block_while_one_is_verified(draft, late, ahead):
    assert DraftLengths(draft, late, experts=8, top_k=2).make_length().drafts() == ahead


@pytest.mark.parametrize("draft", [-1, MOST_DRAFTS + 1, "many", 2.0])
def test_any_other_number_is_refused(draft):
    with pytest.raises(ConfigError, match="--draft is"):
        DraftLengths(draft, late=False, experts=8, top_k=2)


# --- chosen live ------------------------------------------------------------------------------------------------


def test_nothing_is_verified_before_a_step_was_measured():
    length = DraftLengths(AUTO, late=False, experts=8, top_k=2).make_length()
    assert length.rows(MOST_ROWS, 100) == 1
    assert length.drafts() == 0


@pytest.mark.parametrize(("requests", "row_s"), [(1, 0.05), (8, 0.005)])
def test_good_drafts_fill_a_block_where_loads_bound(requests, row_s):
    of = Decoding((0.2, row_s), requests)
    of.run(200, right=0.98)
    assert max(of.run(200 * requests, right=1.0)) == MOST_ROWS
    assert of.open[0].drafts() == 2 * MOST_ROWS - 1


@pytest.mark.parametrize(("right", "cost"), [(0.1, LOAD_BOUND), (0.98, ROW_BOUND)])
@pytest.mark.parametrize("requests", [1, 8])
def test_drafts_that_do_not_pay_are_not_asked_for(right, cost, requests):
    of = Decoding(cost, requests, noise=0.05)
    assert of.run(2000, right) == [1] * requests
    assert [length.drafts() for length in of.open] == [0] * requests


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(("right", "cost"), [(0.1, LOAD_BOUND), (0.0, LOAD_BOUND), (0.1, ROW_BOUND), (0.9, ROW_BOUND)])
def test_drafts_that_do_not_pay_cost_less_than_two_percent(right, cost, noise, requests):
    """Over 2,000 tokens of each request, those at the start included."""
    of = Decoding(cost, requests, noise=noise)
    of.run(2000 * requests, right)
    assert of.tokens_per_s >= 0.98 * alone(cost, requests)


@pytest.mark.parametrize("requests", [1, 3, 8])
@pytest.mark.parametrize("right", [0.5, 0.8, 0.9, 0.98])
def test_it_comes_close_to_the_best_length(requests, right):
    of = Decoding(LOAD_BOUND, requests, noise=0.05)
    of.run(4000, right)
    assert of.tokens_per_s >= 0.78 * fastest(LOAD_BOUND, requests, right)


def test_it_follows_text_that_changes():
    of = Decoding(LOAD_BOUND, noise=0.05)
    of.run(1000, 0.98)
    assert of.open[0].drafts() > 8
    of.run(60, 0.1)
    assert of.open[0].drafts() == 0
    of.run(40, 0.98)
    assert of.open[0].drafts() > 8


def test_the_rows_of_others_count():
    """Rows are cheap beside the step, but not beside what eight requests gain in it."""
    lone, many = Decoding((0.2, 0.05)), Decoding((0.2, 0.05), requests=8)
    lone.run(1000, 0.6)
    many.run(8000, 0.6)
    assert lone.rows / lone.steps > 1.5
    assert many.rows / many.steps / 8 < 1.2


@given(st.floats(0.01, 1), st.floats(0.0, 1), st.floats(0.3, 1))
@example(0.4375, 0.625, 0.8515625)
@example(0.4375, 0.625, 0.84375)
def test_the_length_of_a_lone_request_is_that_of_a_search(step_s, row_s, right):
    """At the cost and the acceptance that it has found."""
    of = DraftLengths(AUTO, late=False, experts=8, top_k=2)
    length = of.make_length()
    for rows in (1, 2, 1, 1, 4, 16, 1) * 30:
        of.cost.on_step_ended(rows, step_s + row_s * rows)
    for _ in range(8):
        of.trial.on_step_ended(1, False, right, 1, step_s + row_s)
    for at in range(200):
        length.on_foretold(right > 0.99 or int(at * right) != int((at + 1) * right))
    p = length.acceptance
    rates = {rows: expected_tokens(p, rows) / of.cost.seconds(rows) for rows in range(1, MOST_ROWS + 1)}

    def sure(rows):
        """Faster than none even if a fifth of the expected drafts are wrong."""
        return (1 + 0.8 * (expected_tokens(p, rows) - 1)) / of.cost.seconds(rows) > rates[1]

    for limit in range(1, MOST_ROWS + 1):
        rows = length.rows(limit - 1, 100)
        best = max(range(1, limit + 1), key=rates.__getitem__)
        if rows == 1:
            assert p < 0.25 or rates[best] <= rates[1] / 0.8
        else:
            assert rates[rows] == pytest.approx(max(rates[of] for of in range(1, limit + 1) if of == 1 or sure(of)))
