"""Periods of alignment that are chosen live (`--align auto`), by the time a token takes.

A rarer alignment saves the shadow's waits and the link's time, and costs recall, so loads on demand. Which of both is
more shows in the time of a token, and only there: waits and loads overlap. So the periods in use are compared with
neighbouring ones, in turns of a few tokens each, and the better ones are kept. What cannot gain is not tried: nothing
where nothing stalls, and no shorter period where loads on demand take no time worth saving.

search = PeriodSearch((1, 1), token=True)
search.stepped(requests, tokens, seconds, stall_s, demand_s)    after each step that only decodes
search.periods                                                  those to use now
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.limits import MAX_PERIOD

Periods = tuple[int, int]
"""Of the token, of the KV rows."""

_TURN = 8
"""Steps of a turn, at least, and tokens of a request: whole cycles of its periods."""
_LONGEST_CYCLE = 4 * MAX_PERIOD
"""Where the cycle of both periods is longer, it is that of the longer one."""
_TURNS = 3, 6
"""Turns of the periods in use and of the others, each: the fewest before it is decided, and the most."""
_MOST_RARER = 16
"""The most where the others align more rarely, and seem better: that gains a little at each token, and loses much at
the few after which the shadow goes astray. A short trial may not have one."""
_CLEAR = 0.04
"""A gain by which these may be decided on earlier."""
_GAIN = 0.01
"""A difference that counts, and the share of the time that must be there to be gained."""
_SURE, _LIKELY = 2.5, 1.0
"""Standard errors by which means must differ to be decided on before the last turn, and by which the others must be
better after it."""
_LOST = 1.25, 4
"""Periods that are so many times as slow, over so many tokens, are given up at once."""
_PAUSE, _LONGEST_PAUSE = 256, 4096
"""Tokens until the neighbours are tried again: twice as many each time."""
_CHANGED, _SETTLED = 0.2, 16
"""At once, where the time of a token has changed by that share since the first steps of the rest, of which there are so
many."""
_OUTLIER = 4.0
"""A step that takes so many times as long as usual counts as one that takes no longer: it waited for something else."""
_RATE = 1 / 64
"""Weight of the newest step in the mean that shows this."""
_MOVES = ((2, 2), (1, 2), (2, 1), (1, 0.5), (0.5, 1), (0.5, 0.5))


@dataclass(slots=True)
class _Mean:
    """Seconds of a token, by steps."""

    tokens: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    squares: float = 0.0
    """Of a step's seconds a token."""

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens += tokens
        self.steps += 1
        self.seconds += seconds
        self.squares += seconds**2 / tokens

    @property
    def mean(self) -> float:
        return self.seconds / self.tokens

    @property
    def variance(self) -> float:
        """Of the mean. There must be two steps."""
        return max(0.0, self.squares / self.tokens - self.mean**2) / (self.steps - 1)


class _Comparison:
    """Of the periods in use with others: seconds of a token by the number of requests, which changes them, too."""

    def __init__(self, other: Periods) -> None:
        self.other = other
        self._sides: tuple[dict[int, _Mean], dict[int, _Mean]] = ({}, {})

    def add(self, trying: bool, requests: int, tokens: float, seconds: float) -> None:
        self._sides[trying].setdefault(requests, _Mean()).add(tokens, seconds)

    @property
    def _both(self) -> list[int]:
        """Numbers of requests of which there are several steps on either side."""
        of_used, of_others = self._sides
        return [one for one in of_used.keys() & of_others.keys() if min(of_used[one].steps, of_others[one].steps) > 1]

    @property
    def ratio(self) -> tuple[float, float]:
        """The others' time over that of those in use, and its standard error; 1 and infinity if nothing compares."""
        whole = ratios = variances = 0.0
        for requests in self._both:
            used, other = self._sides[0][requests], self._sides[1][requests]
            weight, ratio = min(used.tokens, other.tokens), other.mean / used.mean
            spread = used.variance / used.mean**2 + other.variance / other.mean**2
            whole, ratios = whole + weight, ratios + weight * ratio
            variances += (weight * ratio) ** 2 * spread
        return (ratios / whole, math.sqrt(variances) / whole) if whole else (1.0, math.inf)

    @property
    def tried(self) -> float:
        """Tokens with the others that compare."""
        return sum(self._sides[1][requests].tokens for requests in self._both)


class PeriodSearch:
    """Of all requests. `first`: the periods to begin with. `token`: the token's may change, too."""

    def __init__(self, first: Periods, token: bool) -> None:
        self.used = first
        """The best ones so far."""
        self._token = token
        self._trial: _Comparison | None = None
        self._trying = False
        self._turns, self._steps, self._left = 0, 0, 0.0
        self._untried: list[Periods] = self._neighbours()
        self._pause, self._rest = _PAUSE, 0.0
        self._usual: dict[int, float] = {}
        self._settled: dict[int, _Mean] = {}
        self._stall = self._demand = self._time = 0.0
        self._restart(first)

    @property
    def periods(self) -> Periods:
        """Those to use now."""
        return self._trial.other if self._trial is not None and self._trying else self.used

    def stepped(self, requests: int, tokens: float, seconds: float, stall_s: float, demand_s: float) -> None:
        """A step of so many requests has ended, which read no prompt. `tokens`: those it gave each of them, on average.
        `stall_s`: of its time, waits for loads. `demand_s`: what loads on demand can have taken of it."""
        if tokens <= 0 or seconds <= 0:
            return
        usual = self._usual.get(requests)
        if usual is not None:
            seconds = min(seconds, _OUTLIER * usual * tokens)
            stall_s = min(stall_s, seconds)
        keep = 1 - _RATE
        self._time = keep * self._time + seconds
        self._stall, self._demand = keep * self._stall + stall_s, keep * self._demand + min(demand_s, seconds)
        if not self._trying:
            now = seconds / tokens
            self._usual[requests] = now if usual is None else usual + (now - usual) * _RATE
        if self._rest > 0:
            self._wait(requests, tokens, seconds)
            return
        if self._trial is not None:
            self._trial.add(self._trying, requests, tokens, seconds)
        self._left -= tokens
        self._steps -= 1
        if self._hopeless():
            self._decide(better=False)
        elif self._left <= 0 and self._steps <= 0:
            self._turn_over()

    def interrupt(self) -> None:
        """What is compared is not alike any more: the shadow has gone, or come."""
        self._trial, self._trying = None, False
        self._usual, self._settled = {}, {}
        self._restart(self.used)

    def _restart(self, periods: Periods) -> None:
        """A turn begins."""
        self._left, self._steps = float(_turn(periods)), _TURN

    def _wait(self, requests: int, tokens: float, seconds: float) -> None:
        """Nothing is tried."""
        self._rest -= tokens
        settled = self._settled.setdefault(requests, _Mean())
        if settled.steps < _SETTLED:
            settled.add(tokens, seconds)
        elif abs(self._usual[requests] / settled.mean - 1) > _CHANGED:
            self._rest, self._pause = 0.0, _PAUSE
        if self._rest <= 0:
            self._untried = self._neighbours()
            self._restart(self.used)

    def _hopeless(self) -> bool:
        if self._trial is None or not self._trying:
            return False
        ratio, error = self._trial.ratio
        return self._trial.tried >= _LOST[1] and ratio > _LOST[0] + error

    def _turn_over(self) -> None:
        if self._trial is None:
            self._begin()
            return
        if self._trying:
            self._turns += 1
            ratio, error = self._trial.ratio
            fewest, most = _TURNS
            better, rarer = ratio < 1 - max(_GAIN, _LIKELY * error), math.prod(self.periods) > math.prod(self.used)
            surely = ratio < 1 - max(_CLEAR if rarer else _GAIN, _SURE * error) or ratio > 1 + max(_GAIN, _SURE * error)
            if (surely and self._turns >= fewest) or self._turns >= (_MOST_RARER if rarer and better else most):
                self._decide(better)
                return
        self._trying = not self._trying
        self._restart(self.periods)

    def _begin(self) -> None:
        """The next neighbour that may be better, or a rest."""
        while self._untried and not self._promises(self._untried[0]):
            del self._untried[0]
        if not self._untried:
            self._rest, self._pause = float(self._pause), min(2 * self._pause, _LONGEST_PAUSE)
            self._settled = {}
            return
        self._trial = _Comparison(self._untried.pop(0))
        self._trying, self._turns = False, 0
        self._restart(self.used)

    def _promises(self, other: Periods) -> bool:
        """Whether there is time that these periods could save."""
        shorter = other[0] < self.used[0] or other[1] < self.used[1]
        return (self._demand if shorter else self._stall) > _GAIN * self._time

    def _decide(self, better: bool) -> None:
        before, tried = self.used, self.periods
        if better:
            self.used, self._pause = tried, _PAUSE
            self._usual = {}
            onward = tuple(_moved(now, now / past) for now, past in zip(tried, before, strict=True))
            self._untried = [one for one in self._neighbours() if one != before]
            self._untried.sort(key=lambda one: one != onward)
        self._trial, self._trying = None, False
        self._begin()

    def _neighbours(self) -> list[Periods]:
        found = []
        for of_token, of_kv in _MOVES:
            if of_token != 1 and not self._token:
                continue
            one = _moved(self.used[0], of_token), _moved(self.used[1], of_kv)
            if one != self.used and one not in found:
                found.append(one)
        return found


def _moved(period: int, factor: float) -> int:
    return max(1, min(MAX_PERIOD, int(period * factor)))


def _turn(periods: Periods) -> int:
    """Tokens of a turn."""
    cycle = math.lcm(*periods)
    if cycle > _LONGEST_CYCLE:
        cycle = max(periods)
    return -(-_TURN // cycle) * cycle
