"""Periods chosen live, against a full sweep of worlds whose times a token are known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.limits import MAX_PERIOD
from scheduler.periods.search import Periods, PeriodSearch

LADDER = [2**power for power in range(int(math.log2(MAX_PERIOD)) + 1)]
ALL = list(itertools.product(LADDER, LADDER))


class World:
    """A token takes `base_s`, the waits of the alignments that are due, and loads on demand, the more the longer the
    alignments are past. `spread`: of a token's time, over its mean."""

    def __init__(
        self,
        token_s: float = 0.0,
        kv_s: float = 0.0,
        token_miss_s: float = 0.0,
        kv_miss_s: float = 0.0,
        base_s: float = 0.2,
        spread: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.token_s, self.kv_s, self.base_s = token_s, kv_s, base_s
        self.token_miss_s, self.kv_miss_s = token_miss_s, kv_miss_s
        self._spread, self._random = spread, Random(seed)
        self._since, self._periods = 0, (0, 0)
        self.now = 0
        self.seconds = 0.0

    def parts(self, step: int, periods: Periods) -> tuple[float, float]:
        """Waits and loads on demand of a token, `step` after the periods began."""
        token, kv = step % periods[0], step % periods[1]
        waits = max(0.0 if token else self.token_s, 0.0 if kv else self.kv_s)
        return waits, token * self.token_miss_s + kv * self.kv_miss_s

    def mean(self, periods: Periods) -> float:
        cycle = math.lcm(*periods)
        return self.base_s + sum(sum(self.parts(step, periods)) for step in range(cycle)) / cycle

    def best(self, token: bool = True) -> float:
        """Of a full sweep."""
        return min(map(self.mean, [one for one in ALL if token or one[0] == 1]))

    def token(self, periods: Periods) -> tuple[float, float, float]:
        """Its seconds, stalls and loads on demand."""
        if periods != self._periods:
            self._since, self._periods = self.now, periods
        waits, misses = self.parts(self.now - self._since, periods)
        self.now += 1
        noise = max(0.1, self._random.gauss(1.0, self._spread))
        seconds = (self.base_s + waits + misses) * noise
        self.seconds += seconds
        return seconds, waits + misses, misses

    def run(self, search: PeriodSearch, tokens: int, requests: Callable[[int], int] = lambda token: 1) -> float:
        """Seconds of so many tokens. With n requests a step takes n times as long."""
        before = self.seconds
        for number in range(tokens):
            seconds, stall, demand = self.token(search.periods)
            many = requests(number)
            search.stepped(many, 1.0, seconds * many, stall * many, demand * many)
        return self.seconds - before


WORLDS = {
    "alignments cost nothing": World(token_miss_s=0.02, kv_miss_s=0.02),
    "loads cost nothing": World(token_s=0.05, kv_s=0.05),
    "KV rows are slow": World(token_s=0.01, kv_s=0.2, token_miss_s=0.05, kv_miss_s=0.004),
    "both together": World(token_s=0.06, kv_s=0.06, token_miss_s=0.01, kv_miss_s=0.01),
    "the token is always right": World(token_s=0.05, kv_s=0.001, kv_miss_s=0.02),
    "nothing stalls": World(),
}


@pytest.mark.parametrize("first", [(1, 1), (16, 16), (1, 16), (4, 2)])
@pytest.mark.parametrize("name", WORLDS)
def test_within_five_percent_of_a_full_sweep(name: str, first: Periods) -> None:
    like = WORLDS[name]
    world = World(like.token_s, like.kv_s, like.token_miss_s, like.kv_miss_s)
    search = PeriodSearch(first, token=True)
    world.run(search, 1500)
    assert world.mean(search.used) <= 1.05 * world.best()
    assert world.run(search, 1500) <= 1.05 * 1500 * world.best()  # what is tried again included


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.sampled_from([0.0, 0.002, 0.01, 0.05, 0.15])] * 4),
    st.sampled_from([0.0, 0.05, 0.15]),
    st.integers(0, 1000),
    st.booleans(),
)
def test_near_the_best_in_any_world(costs: tuple[float, ...], spread: float, seed: int, token: bool) -> None:
    """Whatever the costs are, and however the times scatter, it ends near the best and loses little on the way."""
    world = World(*costs, spread=spread, seed=seed)
    search = PeriodSearch((1, 1), token)
    world.run(search, 3000)
    assert world.run(search, 2000) <= 1.12 * 2000 * world.best(token)
    assert token or search.used[0] == 1


def test_where_nothing_stalls_nothing_is_tried() -> None:
    world, search = World(spread=0.2), PeriodSearch((2, 4), token=True)
    for number in range(2000):
        assert search.periods == (2, 4), number
        world.run(search, 1)


def test_shorter_periods_are_not_tried_where_no_load_is_on_demand() -> None:
    """All stalls are waits."""
    world, search = World(token_s=0.05, kv_s=0.05), PeriodSearch((4, 4), token=True)
    tried = set()
    for _ in range(1200):
        world.run(search, 1)
        tried.add(search.periods)
    assert min(min(one) for one in tried) == 4
    assert search.used == (16, 16)


class Astray(World):
    """Rarer alignments save a little at each token; of some stretches of the text the shadow is wrong without them."""

    def parts(self, step: int, periods: Periods) -> tuple[float, float]:
        waits, misses = super().parts(step, periods)
        return waits, misses + (0.15 if self.now % 256 >= 192 and max(periods) > 2 else 0.0)


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_a_short_stretch_of_easy_text_makes_no_period_long(spread: float) -> None:
    """Beyond 2 they save at most 1.5 % of a token, and cost 75 % of it in a quarter of all tokens."""
    used = []
    for seed in range(10):
        world = Astray(token_s=0.012, kv_s=0.012, spread=spread, seed=seed)
        search = PeriodSearch((1, 1), token=True)
        world.run(search, 1400)
        used.append(max(search.used))
    assert sum(longest > 2 for longest in used) <= 1, used


def test_the_token_stays_where_drafts_need_it() -> None:
    world, search = World(token_s=0.05, kv_s=0.05), PeriodSearch((1, 1), token=False)
    for _ in range(2000):
        world.run(search, 1)
        assert search.periods[0] == 1


def test_much_slower_periods_are_given_up_at_once() -> None:
    world = World(token_s=0.01, kv_s=0.01, token_miss_s=2.0, kv_miss_s=2.0)
    search = PeriodSearch((1, 1), token=True)
    longest = run = 0
    for _ in range(200):
        run = run + 1 if search.periods != search.used else 0
        longest = max(longest, run)
        world.run(search, 1)
    assert 0 < longest <= 5


def test_it_comes_back_when_the_times_change() -> None:
    """A link that becomes slow: the next trials do not wait for the pause's end."""
    world = World(token_s=0.004, kv_s=0.004, token_miss_s=0.01, kv_miss_s=0.01)
    search = PeriodSearch((1, 1), token=True)
    for _ in range(60):
        world.run(search, 64)
    assert search.used == (1, 1)
    world.kv_s = 0.3
    world.run(search, 600)
    assert search.used[1] > 1


def test_numbers_of_requests_are_compared_with_their_like() -> None:
    """Steps of eight requests take eight times as long as one's: no reason to change the periods."""
    world = World(token_s=0.05, kv_s=0.05, token_miss_s=0.01, kv_miss_s=0.01)
    search = PeriodSearch((1, 1), token=True)
    changing = Random(1)
    numbers = [changing.choice([1, 8]) for _ in range(3000)]
    world.run(search, 3000, lambda number: numbers[number])
    assert world.mean(search.used) <= 1.05 * world.best()


@pytest.mark.parametrize("most", [3, 16])
def test_any_numbers_of_requests(most: int) -> None:
    """Also those of which there is a single step."""
    world = World(token_s=0.05, kv_s=0.05, token_miss_s=0.001, kv_miss_s=0.001)
    search = PeriodSearch((1, 1), token=True)
    changing = Random(1)
    numbers = [changing.randint(1, most) for _ in range(3000)]
    world.run(search, 3000, lambda number: numbers[number])
    assert world.mean(search.used) <= 1.05 * world.best()


@pytest.mark.parametrize("at", range(0, 400, 25))
def test_one_step_that_waited_for_something_else_decides_nothing(at: int) -> None:
    """The periods that it begins with are the best by far."""
    world = World(token_s=0.01, kv_s=0.01, token_miss_s=0.02, kv_miss_s=0.02)
    search = PeriodSearch((1, 1), token=True)
    for number in range(500):
        seconds, stall, demand = world.token(search.periods)
        search.stepped(1, 1.0, seconds + (20.0 if number == at else 0.0), stall, demand)
        assert search.used == (1, 1), number


def test_blocks_are_compared_over_as_many_steps() -> None:
    """Eight tokens a step."""
    search, tried = PeriodSearch((1, 1), token=False), []
    for _ in range(40):
        tried.append(search.periods)
        search.stepped(1, 8.0, 1.0, 0.5, 0.5)
    assert tried == [*[(1, 1)] * 16, *[(1, 2)] * 8, *[(1, 1)] * 8, *[(1, 2)] * 8]


@pytest.mark.parametrize(
    ("periods", "tokens"), [((1, 1), 8), ((5, 4), 20), ((3, 2), 12), ((16, 1), 16), ((13, 11), 13)]
)
def test_turns_are_whole_cycles(periods: Periods, tokens: int) -> None:
    search = PeriodSearch(periods, token=True)
    steps = 0
    while search.periods == periods and steps < 1000:
        search.stepped(1, 1.0, 1.0, 0.5, 0.5)
        steps += 1
    assert steps == 2 * tokens


def test_an_interruption_begins_the_comparison_anew() -> None:
    world = World(token_s=0.05, kv_s=0.05, token_miss_s=0.01, kv_miss_s=0.01)
    search = PeriodSearch((1, 1), token=True)
    world.run(search, 20)
    assert search.periods != (1, 1)
    search.interrupt()
    assert search.periods == search.used == (1, 1)
    world.run(search, 2000)
    assert world.mean(search.used) <= 1.05 * world.best()


def test_steps_without_tokens_or_time_say_nothing() -> None:
    search = PeriodSearch((1, 1), token=True)
    for _ in range(100):
        search.stepped(1, 0.0, 1.0, 1.0, 1.0)
        search.stepped(1, 1.0, 0.0, 0.0, 0.0)
    assert search.periods == (1, 1)
