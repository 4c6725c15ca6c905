"""A small simulated world around the scheduler's core, judged by `support.worlds.referee`.

The world has workers with slots, loads and computations of random length, messages under way, a shadow that is
sometimes wrong, late, silent or gone, workers that die and come back, one by one or all together. Its main model has
random routes. It reads in steps: a pass of each request that is ready; prompts in chunks, answers in blocks of which
the first rows are right. Its time is whole ticks, so that sums are exact. The same plan lives through the same.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from scheduler.held import ranges_of
from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.base import NoCache, Residency
from scheduler.policies.residency.lrfu import LRFU
from scheduler.policies.strategy import Strategy
from support.scheduling.policies import placement_of, precision_of, predictor_of, residency_of, router_of
from support.worlds.audits import AuditRequests
from support.worlds.overheard import overheard
from support.worlds.plan import AWAY, BLIP, COPY, LOST, Plan
from support.worlds.referee import Referee
from support.worlds.worker import WorldWorker

FORM_COSTS = (
    (),
    (t.FormCost("", 9, 0, True), t.FormCost("int4", 3, 2, True)),
    (t.FormCost("", 9, 0, True), t.FormCost("int4", 3, 6, True)),
)
"""What forms cost on a worker, by its number: unknown, int4 pays, it does not."""
MOST_FACTS = 50_000
MakeResidency = Callable[[Plan], Residency]


@dataclass(slots=True, eq=False)
class _Main:
    """One request's forward passes. `position`: where the next begins; `layer`: of the one under way. `reads`: how
    often each position has been read."""

    number: int
    position: int = 0
    under_way: t.Pass | None = None
    layer: int = 0
    away: bool = False
    over: bool = False
    reads: Counter[int] = field(default_factory=Counter)

    @property
    def ready(self) -> bool:
        return not (self.over or self.away or self.under_way)


class World:
    """`run()` lives through the plan. `residency`: makes the policy that it has, where it is not the plan's own.
    `log`: every fact, its time and the commands that it was answered with."""

    def __init__(self, plan: Plan, residency: MakeResidency = residency_of) -> None:
        self.plan, self.rng, self.now = plan, Random(plan.seed), 0
        self.referee = Referee(plan)
        self._make_residency = residency
        self.core = self._make_core(overheard(self._strategy(), self.referee))
        self.log: list[tuple[t.Event, int, list[t.Command]]] = []
        self.workers: dict[int, WorldWorker] = {}
        self.mains: dict[int, _Main] = {}
        self.step: list[_Main] = []
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._inbox: deque[t.Event] = deque()
        self._audits = AuditRequests(plan)
        self._posting = False
        self._routes: dict[tuple[int, int, int, int], list[int]] = {}
        self._wait: object | None = None
        """While requests wait for workers."""

    def _strategy(self) -> Strategy:
        plan = self.plan
        return Strategy(
            predictor_of(plan),
            self._make_residency(plan),
            router_of(plan),
            placement_of(plan),
            precision_of(plan),
            predicts=plan.predictor != "none",
            host_residency=LRFU(plan.shape) if plan.host_slots else NoCache(),
        )

    def _make_core(self, strategy: Strategy) -> Core:
        plan = self.plan
        return Core(
            plan.shape, RoundRobin(plan.group), Alignment(*plan.periods), plan.mini_batch, strategy, plan.prefill
        )

    def at(self, delay: int, act: Callable[[], object]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._order), act))

    def ticks(self, most: int) -> int:
        return self.rng.randint(0, most)

    def fails(self) -> bool:
        return self.rng.random() < self.plan.failing

    def run(self) -> World:
        for number in range(len(self.plan.slots)):
            self.join(number)
        if self.plan.shadow:
            self.post(t.ShadowJoined())
        for number in range(1, self.plan.requests + 1):
            self.at(self.ticks(self.plan.arrive), partial(self.open, number))
        for when, what, whom in self.plan.faults:
            self.at(when, partial(self.fault, what, whom))
        while self._heap:
            self.now, _, act = heapq.heappop(self._heap)
            act()
            assert len(self.log) < MOST_FACTS, "it goes on for ever"
        waiting = [main for main in self.mains.values() if not main.over]
        assert not waiting, f"nothing more happens and these wait: {waiting}"
        self.referee.finish(self.core)
        return self

    def replay(self) -> None:
        """The same facts at the same times: the same commands."""
        core = self._make_core(self._strategy())
        for event, now, commands in self.log:
            assert core.handle(event, now) == commands

    # --- facts in, commands out ---------------------------------------------------------------------------------------

    def post(self, event: t.Event) -> None:
        self._inbox.append(event)
        if self._posting:
            return
        self._posting = True
        while self._inbox:
            event = self._inbox.popleft()
            self.referee.fact(event, self.now)
            commands = self.core.handle(event, self.now)
            self.log.append((event, self.now, commands))
            self.referee.answered(commands, self.core)
            self.core.validate()
            for c in commands:
                self.act(c)
            self.time_wait()
            audit = self._audits.after(event, self.referee.books)
            self._inbox += [audit] if audit is not None else []
        self._posting = False

    def act(self, c: t.Command) -> None:
        match c:
            case t.Load() | t.Evict() | t.Compute():
                self.workers[c.worker].obey(c)
            case t.Resume():
                self.resumed(self.mains[c.visit.request])
            case t.Fail():
                self.close(self.mains[c.request])
            case t.Align():
                self.shadow_pass(c.request, c.step)

    # --- the main model -----------------------------------------------------------------------------------------------

    def open(self, number: int) -> None:
        self.mains[number] = _Main(number)
        self.post(t.RequestOpened(number, self.plan.prompt))
        self.soon()

    def soon(self) -> None:
        """A step begins, if none is under way and a request is ready."""
        self.at(self.ticks(2), self.begin)

    def begin(self) -> None:
        ready = [main for main in self.mains.values() if main.ready]
        if self.step or not ready:
            return
        self.rng.shuffle(ready)
        self.step = ready
        self.post(t.StepStarted(tuple(self.next_pass(main) for main in ready)))
        for main in ready:
            self.at(self.ticks(self.plan.main), partial(self.gate, main))

    def next_pass(self, main: _Main) -> t.Pass:
        plan, first = self.plan, main.position
        if first < plan.prompt:
            tokens = min(plan.chunk or plan.prompt, plan.prompt - first)
        else:
            tokens = self.rng.randint(1, min(plan.block, plan.prompt + plan.answer - first))
        main.reads.update(range(first, first + tokens))
        main.layer = 0
        main.under_way = t.Pass(main.number, first, tokens, prefill=first < plan.prompt)
        return main.under_way

    def leave(self, main: _Main) -> None:
        """It has no pass in the step any more."""
        main.under_way = None
        if main in self.step:
            self.step.remove(main)
            if not self.step:
                self.soon()

    def close(self, main: _Main) -> None:
        if not main.over:
            main.over = True
            self.leave(main)
            self.post(t.RequestClosed(main.number))

    def gate(self, main: _Main) -> None:
        if main.over:
            return
        assert main.under_way is not None
        _, first, tokens, _ = main.under_way
        positions = range(first, first + tokens)
        routes = [self.route(main, position, main.layer) for position in positions]
        rows = Counter(expert for route in routes for expert in route)
        chosen = tuple(tuple(route) for route in routes)
        scores = self.scores(routes) if self.core.strategy.wants_scores else ()
        self.post(t.GateFired(t.Visit(main.number, first, main.layer), tuple(sorted(rows.items())), chosen, scores))
        if not main.over and self.core.strategy.predictor.foresight is not None:
            self.foresee(main, positions)

    def resumed(self, main: _Main) -> None:
        """Its visit goes on: with the next layer, or its pass is over."""
        assert main.under_way is not None
        main.layer += 1
        if main.layer < self.plan.layers:
            self.at(self.ticks(self.plan.main), partial(self.gate, main))
        else:
            self.at(self.ticks(self.plan.main), partial(self.pass_over, main))

    def pass_over(self, main: _Main) -> None:
        """All rows of a block, or the first of them, were right: the next pass goes on from there."""
        if main.over:
            return
        assert main.under_way is not None
        _, first, tokens, prefill = main.under_way
        main.position = first + (tokens if prefill else self.rng.randint(1, tokens))
        index = main.position - self.plan.prompt
        if index == self.plan.answer:
            self.close(main)
            return
        if index >= 0:
            self.post(t.TokenDecoded(main.number, index))
        if main.over:
            return
        self.leave(main)
        main.away = self.rng.random() < self.plan.pausing
        if main.away:
            self.at(self.ticks(AWAY), partial(self.come_back, main))

    def come_back(self, main: _Main) -> None:
        main.away = False
        self.soon()

    def scores(self, routes: list[list[int]]) -> Scores:
        """As the routes have it: the k best of each row in their order."""
        k = self.plan.top_k
        return tuple(
            tuple((2.0 * k - route.index(e) if e in route else 1 / (2 + e)) for e in range(self.plan.experts))
            for route in routes
        )

    def foresee(self, main: _Main, positions: range) -> None:
        """What the main model tells a predictor, now and then too late, and mostly right."""
        layer = main.layer + 1
        if self.plan.predictor == "token":
            layer, positions = main.layer, range(positions.stop, positions.stop + 1)
        if layer == self.plan.layers:
            return
        routes = [self.route(main, position, layer) for position in positions]
        if self.rng.random() > self.plan.accuracy:
            routes = [sorted(route, reverse=True) for route in self.shuffled(routes)]
        event = t.Foreseen(main.number, positions.start, layer, self.scores(routes))
        self.at(self.ticks(2 * self.plan.main), lambda: self.post(event))

    def shuffled(self, routes: list[list[int]]) -> list[list[int]]:
        return [self.rng.sample(range(self.plan.experts), len(route)) for route in routes]

    def route(self, main: _Main, position: int, layer: int) -> list[int]:
        """Of the row in the pass under way, or in the next that reads it: a row that was not right is read again."""
        one = main.under_way
        here = one is not None and one.position <= position < one.position + one.tokens
        reading = main.reads[position] - (here and layer >= main.layer)
        key = (main.number, position, layer, reading)
        if key not in self._routes:
            again = f"/{reading}" if reading else ""
            rng = Random(f"{self.plan.seed}/{main.number}/{position}/{layer}{again}")
            self._routes[key] = rng.sample(range(self.plan.experts), self.plan.top_k)
        return self._routes[key]

    # --- the shadow ---------------------------------------------------------------------------------------------------

    def shadow_pass(self, request: int, step: int) -> None:
        """Predictions of the rows from this one on, as fast or as slowly as the plan says."""
        plan, when = self.plan, 0
        rows = 1 + (self.rng.random() < 0.3) if plan.block == 1 else self.rng.randint(1, plan.block + 2)
        for ahead in range(rows):
            for layer in range(plan.layers):
                when += self.ticks(plan.predict)
                for again in range(1 + (self.rng.random() < 0.1)):
                    if self.rng.random() < 0.95:
                        event = self.prediction(self.mains[request], plan.prompt + step + ahead, layer)
                        self.at(when + again, partial(self.say, event))

    def prediction(self, main: _Main, position: int, layer: int) -> t.Predicted:
        experts: list[int] = []
        for expert in self.route(main, position, layer):
            guess = expert if self.rng.random() < self.plan.accuracy else self.rng.randrange(self.plan.experts)
            if guess not in experts:
                experts.append(guess)
        return t.Predicted(main.number, position, layer, tuple(experts))

    def say(self, event: t.Predicted) -> None:
        if self.referee.books.shadow or self.rng.random() < 0.5:
            self.post(event)

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def join(self, number: int) -> None:
        if number not in self.workers:
            self.workers[number] = WorldWorker(self, number)
            slots = self.plan.slots[number % len(self.plan.slots)]
            forms, hosted = FORM_COSTS[number % 3] if self.plan.forms else (), self.plan.host_slots if slots else 0
            held = self.plan.held(number)
            part = None if held is None else ranges_of(held)
            self.post(t.WorkerJoined(number, slots, forms=forms, host_slots=hosted, held=part))
            if self.plan.flapping and not all(main.over for main in self.mains.values()):
                self.at(self.ticks(self.plan.flapping), partial(self.kill, self.workers[number]))

    def kill(self, worker: WorldWorker) -> None:
        """It is dead, and some time later the main node knows."""
        worker.dead = True
        self.at(self.ticks(10), partial(self.lose, worker))

    def fault(self, what: str, whom: int) -> None:
        shadow = self.referee.books.shadow
        if what == "die" and self.workers:
            self.kill(sorted(self.workers.items())[whom % len(self.workers)][1])
        elif what == BLIP:
            last = self.ticks(3)
            for worker in self.workers.values():
                worker.dead = True
                self.at(self.ticks(last), partial(self.lose, worker))
        elif what == "join":
            self.join(whom)
        elif what == COPY and self.workers:
            number = sorted(self.workers)[whom % len(self.workers)]
            part = self.plan.held(number, 1 + self.now) or frozenset()
            if self.now % 3:
                part |= self.referee.books.held[number] or frozenset()
            self.post(t.HoldingsChanged(number, ranges_of(part)))
        elif what == "cancel" and (mains := [main for main in self.mains.values() if not main.over]):
            held = [main for main in mains if main.number in self.referee.held]
            awaited = [main for main in self.step if main not in held] if held else []
            among = (held, awaited)[whom % 2] or mains
            self.close(among[whom % len(among)])
        elif what == "shadow-lost" and shadow:
            self.post(t.ShadowLost())
        elif what == "shadow-join" and not shadow:
            self.post(t.ShadowJoined())

    def lose(self, worker: WorldWorker) -> None:
        if self.workers.get(worker.number) is worker:
            del self.workers[worker.number]
            self.post(t.WorkerLost(worker.number, "it died"))
            if self.rng.random() < self.plan.returning:
                self.at(self.ticks(LOST), partial(self.join, worker.number))

    def time_wait(self) -> None:
        """Requests wait for workers that are missing: not for ever."""
        if not (self.referee.books.lacks and any(not main.over for main in self.mains.values())):
            self._wait = None
        elif self._wait is None:
            self._wait = object()
            self.at(self.plan.patience, partial(self.expire, self._wait))

    def expire(self, wait: object) -> None:
        """The workers may be back, and this says so too late."""
        if self._wait is wait or not self.referee.books.lacks:
            self._wait = None
            self.post(t.WorkerWaitExpired(f"nobody came until {self.now}"))


def live(plan: Plan, residency: MakeResidency = residency_of) -> World:
    """Lives through a plan, referee and all, and replays it."""
    world = World(plan, residency).run()
    world.replay()
    return world
