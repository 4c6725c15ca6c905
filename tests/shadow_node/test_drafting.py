"""The shadow drafts: after each block it is where a plain account of the same rules is, number by number."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.alignment import AT_ONCE, LATE, Alignment
from scheduler.drafts.path import START, extend
from support.shadows.arithmetic_shadow import EXPERTS, LAYERS, VOCABULARY, Bench, Followed
from wire.messages import Draft, OpenRequest, Prediction

PASSES = 14


class Account:
    """A request of `ArithmeticModel`, in lists of whole numbers: the cache keeps every row, so that each way back is a
    cut, and a window is the end of a list."""

    def __init__(self, followed: Followed, lookahead: int, late: bool, window: int, states: bool) -> None:
        self.prompt, self.window, self.stateful = len(followed.prompt), window, states
        self.alignment, self.lookahead = Alignment(followed.token, followed.kv), lookahead
        self.departure = LATE if late else AT_ONCE
        self.rows: list[list[int]] = [[] for _ in range(LAYERS)]
        self.states = [0]
        """After each position."""
        self.own: dict[int, int] = {}
        self.read: dict[int, int] = {}
        self.told: dict[int, int] = {}
        self.experts: dict[int, list[frozenset[int]]] = {}
        self.step, self.announced, self.drafts = 0, -1, 0
        self.pending: dict[int, tuple[int, list[int], bool]] = {}
        for token in followed.prompt:
            self.own[0] = self._run(token)

    def align(self, step: int, tokens: dict[int, int], start: int, rows: list[int], drafts: int, states: bool) -> None:
        """`tokens`: those that were sent. `rows`: the main model's, from position `start` to pass `step`. `states`:
        with the main model's, too."""
        self.announced, self.drafts = step, drafts
        self.told |= tokens
        others = [one for one, token in tokens.items() if one < self.step and self.read[one] != token]
        if others:
            self._cut(min(others))
        if rows and step < self.step and drafts and not states:
            self._write(start, rows, states)
        elif rows:
            self.pending[step] = start, rows, states
            if step < self.step:
                self._cut(step)
        self.advance()

    def advance(self) -> None:
        while self.step < PASSES and self._may_start():
            step = self.step
            if step in self.pending:
                self._write(*self.pending.pop(step))
            self.read[step] = self.told.get(step, self.own[step])
            self.own[step + 1] = self._run(self.read[step], step)
            self.step += 1

    def path(self, step: int) -> int:
        return extend(START, [self.read[one] for one in range(step)])

    def keys(self, layer: int) -> list[int]:
        held = self.rows[layer]
        return held[max(0, len(held) - self.window + 1) :] if self.window and layer == 1 else held

    def _may_start(self) -> bool:
        if 0 <= self.announced and self.step <= self.announced + self.drafts:
            return True
        return self.alignment.may_start(self.step, self.announced, self.lookahead, self.departure)

    def _run(self, token: int, step: int | None = None) -> int:
        value, routed = token, []
        for layer in range(LAYERS):
            self.rows[layer].append(value)
            seen = self.rows[layer][-self.window :] if self.window and layer == 1 else self.rows[layer]
            value = (sum(n * row for n, row in enumerate(seen, 1)) + 7 * layer) % 997
            if self.stateful and layer == 2:
                value = (value + self.states[-1]) % 997
            first = value % EXPERTS
            routed.append(frozenset({first, (first + 1 + value // EXPERTS % (EXPERTS - 1)) % EXPERTS}))
        self.states.append(value)
        if step is not None:
            self.experts[step] = routed
        return value % VOCABULARY

    def _cut(self, step: int) -> None:
        for layer in self.rows:
            del layer[self.prompt + step :]
        del self.states[self.prompt + step + 1 :]
        self.step = step

    def _write(self, start: int, rows: list[int], states: bool) -> None:
        for layer, held in enumerate(self.rows):
            held[start : start + len(rows)] = [row + layer for row in rows]
        if states:
            self.states[start + len(rows)] = rows[-1] + 100


class Run:
    """A shadow, its main node, and the account of both."""

    def __init__(self, chance: Random, late: bool, window: int, states: bool, token: int, kv: int) -> None:
        self.chance = chance
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 6))]
        rows = [chance.randrange(50) for _ in range(len(prompt) + PASSES + 1)]
        lookahead, more = chance.randint(0, 3), {"window": window, "states": states}
        self.main = Followed(1, prompt, [0] * PASSES, rows, token=token, kv=kv, late=late, lookahead=lookahead, **more)
        self.account = Account(self.main, lookahead, late, window, states)
        self.bench = Bench(**more)
        self.bench.take(self.main.message)
        self.drafted = False
        self.aligned = 0

    def next_alignment(self, passes: int, drafts: int, right: float) -> Any:
        """Of a block: each token is the shadow's own, as likely as `right`."""
        drafts_now = self.table()
        for step in range(self.main.told, self.main.told + passes):
            own = drafts_now[step].token if step in drafts_now else self.account.own.get(step, 0)
            self.main.tokens[step] = own if self.chance.random() < right else self.chance.randrange(VOCABULARY)
        self.drafted |= drafts > 0
        return self.main.align(passes, drafts)

    def both(self, message: Any) -> None:
        states = self.account.stateful and self.chance.random() < 0.5
        if not states:
            message = replace(message, kv=message.kv[: 2 * LAYERS])
        self.bench.take(message)
        step, tokens = message.step, {}
        if message.token is not None:
            tokens = dict(enumerate((*message.before, message.token), step - len(message.before)))
        end = len(self.main.prompt) + step
        self.account.align(
            *(step, tokens, message.kv_start, self.main.rows[message.kv_start : end] if message.kv else []),
            *(message.drafts, states),
        )

    def table(self) -> dict[int, Draft]:
        """What the main node holds: a draft replaces those of later passes, too."""
        held: dict[int, Draft] = {}
        for message in self.bench.got:
            if isinstance(message, Draft):
                held = {step: draft for step, draft in held.items() if step < message.step}
                held[message.step] = message
        return held

    def check(self, passes: int | None = None) -> None:
        """`passes`: compare these; None: all, and how many there are."""
        account, followed = self.account, self.bench.session._requests[1]
        assert self.bench.failures() == []
        if passes is None:
            passes = account.step
            assert followed.course.step == account.step
        for layer, held in enumerate(followed.cache.layers):
            mine = held.keys.flatten().tolist()
            if followed.course.step == account.step:
                assert mine == account.keys(layer)
            elif not getattr(held, "is_sliding", False):
                end = len(self.main.prompt) + passes
                assert mine[:end] == account.rows[layer][:end]
        for step in range(passes):
            assert self.bench.stands(self.main, step) == account.experts[step]
        drafts = self.table()
        for step in range(account.announced + 1, passes + 1) if self.drafted else ():
            assert drafts[step] == Draft(1, step, account.own[step], account.path(step))
        if not self.drafted:
            assert drafts == {}


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    late=st.booleans(),
    window=st.sampled_from([0, 0, 3, 6]),
    states=st.booleans(),
    periods=st.sampled_from([(1, 0), (1, 1), (1, 1), (0, 1), (2, 3), (3, 1), (4, 4)]),
    right=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    most=st.sampled_from([0, 1, 3, 7]),
    longest=st.integers(1, 5),
)
def test_after_each_block_the_shadow_is_where_the_account_is(
    seed: int, late: bool, window: int, states: bool, periods: tuple[int, int], right: float, most: int, longest: int
) -> None:
    """Tokens that differ at any place of a block, KV rows or none, drafts asked for or no more."""
    chance = Random(seed)
    run = Run(chance, late, window, states, *periods)
    run.bench.work()
    run.account.advance()
    run.check()
    while run.main.told < PASSES:
        passes = min(chance.randint(1, longest), PASSES - run.main.told)
        drafts = chance.choice([0, most, most])
        run.both(run.next_alignment(passes, drafts, right))
        run.bench.work()
        run.check()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    late=st.booleans(),
    window=st.sampled_from([0, 3]),
    token=st.sampled_from([1, 1, 2]),
    right=st.sampled_from([0.6, 0.9, 1.0]),
    often=st.sampled_from([0.1, 0.4, 0.8]),
)
def test_blocks_at_any_layer_of_any_pass(
    seed: int, late: bool, window: int, token: int, right: float, often: float
) -> None:
    """Without KV rows what stands does not depend on when an alignment came; how far the shadow got does."""
    chance = Random(seed)
    run = Run(chance, late, window, False, token, 0)

    def align() -> None:
        passes = min(chance.randint(1, 4), PASSES - run.main.told)
        run.both(run.next_alignment(passes, chance.choice([0, 2, 5]), right))

    def at_layer() -> None:
        if 0 < run.main.told < PASSES and chance.random() < often:
            align()

    run.bench.work()
    run.account.advance()
    run.bench.model.on_layer = at_layer
    while run.main.told < PASSES:
        align()
        run.bench.work()
    run.check(min(run.account.step, run.bench.session._requests[1].course.step))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), window=st.sampled_from([0, 3, 6]), often=st.sampled_from([0.2, 0.6]))
def test_rows_that_come_at_any_layer_are_the_main_models(seed: int, window: int, often: float) -> None:
    chance = Random(seed)
    run = Run(chance, False, window, False, 1, 1)

    def align() -> None:
        passes = min(chance.randint(1, 4), PASSES - run.main.told)
        run.bench.take(run.next_alignment(passes, chance.randint(1, 6), 0.8))

    def at_layer() -> None:
        if 0 < run.main.told < PASSES and chance.random() < often:
            align()

    run.bench.work()
    run.bench.model.on_layer = at_layer
    while run.main.told < PASSES:
        align()
        run.bench.work()
    assert run.bench.failures() == []
    followed = run.bench.session._requests[1]
    assert followed.course.step == PASSES
    end = len(run.main.prompt) + PASSES - 1
    for layer, held in enumerate(followed.cache.layers):
        mine = held.keys.flatten().tolist()
        first = len(run.main.prompt) + PASSES - len(mine)
        assert mine[: end - first] == [row + layer for row in run.main.rows[first:end]]


def test_a_shadow_that_joins_late_continues_the_answers_path() -> None:
    bench = Bench()
    bench.take(OpenRequest(1, (0, 1, 2, 1, 1), 3, 20, 1, 0, 2, False))
    bench.work()
    main = Followed(1, [0, 1], [2, 1, 1, 0, 2, 0, 1], [0] * 9, token=1, kv=0, late=False)
    main.told = 3
    bench.take(main.align(1, drafts=2))
    bench.work()
    drafts = [message for message in bench.got if isinstance(message, Draft)]
    assert [draft.step for draft in drafts] == [4, 5, 6]
    answer = [2, 1, 1, 0]
    for draft in drafts:
        assert draft.path == extend(START, answer)
        answer.append(draft.token)
    assert {m.position for m in bench.got if isinstance(m, Prediction)} == {5, 6, 7}


def test_drafts_that_were_made_before_any_was_asked_for_are_told() -> None:
    """Departing at once, the shadow is a pass ahead when the first alignment that asks for drafts comes."""
    bench = Bench()
    main = Followed(1, [0, 1], [0] * 6, [0] * 9, token=1, kv=0, late=False)
    bench.take(main.message)
    bench.work()
    bench.take(main.align())
    bench.work()
    assert not any(isinstance(message, Draft) for message in bench.got)
    own = bench.session._requests[1].tokens._drafts[1].token
    main.tokens[1] = own
    bench.take(main.align(drafts=1))
    assert [message for message in bench.got if isinstance(message, Draft)] == []
    bench.work()
    assert [message.step for message in bench.got if isinstance(message, Draft)] == [1, 2, 3]


def test_marks_and_rows_that_were_taken_over_are_bounded() -> None:
    """Blocks that never go back: nothing is kept of those that stand."""
    run = Run(Random(3), False, 6, False, 1, 1)
    run.bench.work()
    run.account.advance()
    kept = []
    while run.main.told < PASSES:
        run.both(run.next_alignment(2, 4, 1.0))
        run.bench.work()
        followed = run.bench.session._requests[1]
        announced, course = followed.course.announced, followed.course
        assert set(followed._marks) == set(range(announced + 1, course.step))
        assert all(step <= announced for step, _, _ in followed._taken_over)
        kept.append(followed.aligned_bytes)
        assert len(followed.tokens._read) <= course.step - min(announced, course.step) + 1
    assert kept[-1] == 0  # no draft is ahead of the last pass


@pytest.mark.parametrize("departure", [True, False])
def test_without_drafts_nothing_is_drafted(departure: bool) -> None:
    run = Run(Random(1), departure, 0, False, 1, 1)
    run.bench.work()
    while run.main.told < PASSES:
        run.bench.take(run.main.align())
        run.bench.work()
    assert not any(isinstance(message, Draft) for message in run.bench.got)
