"""A small simulated world around the scheduler's core, judged by `support.scheduling.referee`.

The world has workers with slots, loads and computations of random length, messages under way, a main model with random
routes, a shadow that is sometimes wrong, late, silent or gone, workers that die and come. Its time is whole ticks, so
that sums are exact. The same plan lives through the same.
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
from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.base import Residency
from scheduler.policies.strategy import Strategy
from support.scheduling.overheard import overheard
from support.scheduling.plan import Plan
from support.scheduling.policies import placement_of, precision_of, predictor_of, residency_of, router_of
from support.scheduling.referee import Referee

NBYTES = 7
FORM_COSTS = (
    (),
    (t.FormCost("", 9, 0, True), t.FormCost("int4", 3, 2, True)),
    (t.FormCost("", 9, 0, True), t.FormCost("int4", 3, 6, True)),
)
"""What forms cost on a worker, by its number: unknown, int4 pays, it does not."""
MakeResidency = Callable[[Plan], Residency]


@dataclass(slots=True, eq=False)
class _Holding:
    """What is in a worker's slot, or on its way there. `waiting`: computations that came before its load had ended."""

    load: t.Load
    loaded: bool = False
    given_up: bool = False
    waiting: list[t.Compute] = field(default_factory=list)


class _Worker:
    """As worker_node's: loads side by side, one computation at a time, what it says arrives in order and later."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.host = world.plan.slots[number % len(world.plan.slots)] == 0
        self.dead = False
        self.ghost = world.rng.random() < 0.5  # what a dead one said last still arrives
        self.slots: dict[int, _Holding] = {}
        self.left: set[int] = set()  # slots that a last computation has freed since their last load
        self.work: deque[tuple[_Holding, t.Compute]] = deque()
        self.busy = False
        self.arrives = 0

    def tell(self, event: t.Event) -> None:
        world = self.world
        self.arrives = max(self.arrives, world.now + world.ticks(world.plan.latency))
        world.at(self.arrives - world.now, lambda: None if self.dead and not self.ghost else world.post(event))

    def obey(self, c: t.Load | t.Evict | t.Compute) -> None:
        if self.dead:
            return
        if isinstance(c, t.Load):
            assert c.slot not in self.slots, f"{c}: the worker has {self.slots[c.slot].load} there"
            holding = self.slots[c.slot] = _Holding(c)
            self.left.discard(c.slot)
            self.world.at(self.world.ticks(self.world.plan.load), lambda: self.loaded(holding))
        elif isinstance(c, t.Evict):
            assert c.slot in self.slots or c.slot in self.left, f"{c}: nothing is there"
            if c.slot in self.slots:
                self.slots.pop(c.slot).given_up = True
        elif self.host:
            self.work.append((_Holding(t.Load(self.number, 0, c.expert, 0), loaded=True), c))
            self.compute()
        elif c.slot in self.slots:
            holding = self.slots[c.slot]
            assert holding.load.expert == c.expert
            if holding.loaded:
                self.work.append((holding, c))
                self.compute()
            else:
                holding.waiting.append(c)

    def loaded(self, holding: _Holding) -> None:
        if holding.given_up or self.dead:
            return
        if self.world.fails():
            self.tell(t.LoadFailed(holding.load.load_id, "cannot read"))
            return
        holding.loaded = True
        self.tell(t.LoadEnded(holding.load.load_id, NBYTES))
        self.work.extend((holding, c) for c in holding.waiting)
        self.compute()

    def compute(self) -> None:
        while self.work and self.work[0][0].given_up:
            self.work.popleft()
        if self.work and not self.busy:
            self.busy = True
            holding, c = self.work.popleft()
            self.world.at(self.world.ticks(self.world.plan.compute), lambda: self.computed(holding, c))

    def computed(self, holding: _Holding, c: t.Compute) -> None:
        self.busy = False
        if self.world.fails():
            self.tell(t.ComputeFailed(c.call_id, "cannot compute"))
        else:
            self.tell(t.ComputeEnded(c.call_id))  # also when it was given up meanwhile
            if c.evict and not holding.given_up:
                holding.given_up = True
                del self.slots[c.slot]
                self.left.add(c.slot)
        self.compute()


@dataclass(slots=True, eq=False)
class _Main:
    """One request's token loop."""

    number: int
    over: bool = False
    index: int = -1
    layer: int = 0


class World:
    """`run()` lives through the plan. `residency`: makes the policy that it has, where it is not the plan's own.
    `log`: every fact, its time and the commands that it was answered with."""

    def __init__(self, plan: Plan, residency: MakeResidency = residency_of) -> None:
        self.plan, self.rng, self.now = plan, Random(plan.seed), 0
        self.referee = Referee(plan)
        self._make_residency = residency
        self.core = self._make_core(overheard(self._strategy(), self.referee))
        self.log: list[tuple[t.Event, int, list[t.Command]]] = []
        self.workers: dict[int, _Worker] = {}
        self.mains: dict[int, _Main] = {}
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._inbox: deque[t.Event] = deque()
        self._posting = False
        self._routes: dict[tuple[int, int, int], list[int]] = {}

    def _strategy(self) -> Strategy:
        plan = self.plan
        return Strategy(
            predictor_of(plan),
            self._make_residency(plan),
            router_of(plan),
            placement_of(plan),
            precision_of(plan),
            predicts=plan.predictor != "none",
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
            self.at(self.ticks(20), partial(self.open, number))
        for when, what, whom in self.plan.faults:
            self.at(when, partial(self.fault, what, whom))
        while self._heap:
            self.now, _, act = heapq.heappop(self._heap)
            act()
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
            for c in commands:
                self.act(c)
        self._posting = False

    def act(self, c: t.Command) -> None:
        match c:
            case t.Load() | t.Evict() | t.Compute():
                self.workers[c.worker].obey(c)
            case t.Resume():
                self.at(self.ticks(self.plan.main), lambda: self.next_layer(self.mains[c.visit.request]))
            case t.Fail():
                self.close(self.mains[c.request])
            case t.Align():
                self.shadow_pass(c.request, c.step)

    # --- the main model -----------------------------------------------------------------------------------------------

    def open(self, number: int) -> None:
        main = self.mains[number] = _Main(number)
        self.post(t.RequestOpened(number, self.plan.prompt))
        if not main.over:
            self.post(t.StepStarted((t.Pass(number, 0, self.plan.prompt, prefill=True),)))
            self.at(self.ticks(self.plan.main), lambda: self.gate(main))

    def close(self, main: _Main) -> None:
        if not main.over:
            main.over = True
            self.post(t.RequestClosed(main.number))

    def gate(self, main: _Main) -> None:
        if main.over:
            return
        plan = self.plan
        first = 0 if main.index < 0 else plan.prompt + main.index
        positions = range(plan.prompt) if main.index < 0 else range(first, first + 1)
        routes = [self.route(main.number, position, main.layer) for position in positions]
        rows = Counter(expert for route in routes for expert in route)
        chosen = tuple(tuple(route) for route in routes)
        scores = self.scores(routes) if self.core.strategy.wants_scores else ()
        self.post(t.GateFired(t.Visit(main.number, first, main.layer), tuple(sorted(rows.items())), chosen, scores))
        if not main.over and self.core.strategy.predictor.foresight is not None:
            self.foresee(main, first, positions)

    def scores(self, routes: list[list[int]]) -> Scores:
        """As the routes have it: the k best of each row in their order."""
        k = self.plan.top_k
        return tuple(
            tuple((2.0 * k - route.index(e) if e in route else 1 / (2 + e)) for e in range(self.plan.experts))
            for route in routes
        )

    def foresee(self, main: _Main, first: int, positions: range) -> None:
        """What the main model tells a predictor, now and then too late, and mostly right."""
        layer, at = main.layer + 1, first
        if self.plan.predictor == "token":
            layer, at, positions = main.layer, positions[-1] + 1, range(1)
        if layer == self.plan.layers:
            return
        routes = [self.route(main.number, at if self.plan.predictor == "token" else p, layer) for p in positions]
        if self.rng.random() > self.plan.accuracy:
            routes = [sorted(route, reverse=True) for route in self.shuffled(routes)]
        event = t.Foreseen(main.number, at, layer, self.scores(routes))
        self.at(self.ticks(2 * self.plan.main), lambda: self.post(event))

    def shuffled(self, routes: list[list[int]]) -> list[list[int]]:
        return [self.rng.sample(range(self.plan.experts), len(route)) for route in routes]

    def route(self, request: int, position: int, layer: int) -> list[int]:
        key = (request, position, layer)
        if key not in self._routes:
            rng = Random(f"{self.plan.seed}/{request}/{position}/{layer}")
            self._routes[key] = rng.sample(range(self.plan.experts), self.plan.top_k)
        return self._routes[key]

    def next_layer(self, main: _Main) -> None:
        if main.over:
            return
        main.layer += 1
        if main.layer == self.plan.layers:
            main.layer, main.index = 0, main.index + 1
            if main.index == self.plan.answer:
                self.close(main)
                return
            self.post(t.TokenDecoded(main.number, main.index))
            if not main.over:
                self.post(t.StepStarted((t.Pass(main.number, self.plan.prompt + main.index, 1, prefill=False),)))
        self.at(self.ticks(self.plan.main), lambda: self.gate(main))

    # --- the shadow ---------------------------------------------------------------------------------------------------

    def shadow_pass(self, request: int, step: int) -> None:
        """Predictions of this pass, now and then also of the next, as fast or as slowly as the plan says."""
        when = 0
        for ahead in range(1 + (self.rng.random() < 0.3)):
            for layer in range(self.plan.layers):
                when += self.ticks(self.plan.predict)
                for again in range(1 + (self.rng.random() < 0.1)):
                    if self.rng.random() < 0.95:
                        event = self.prediction(request, self.plan.prompt + step + ahead, layer)
                        self.at(when + again, partial(self.say, event))

    def prediction(self, request: int, position: int, layer: int) -> t.Predicted:
        experts: list[int] = []
        for expert in self.route(request, position, layer):
            guess = expert if self.rng.random() < self.plan.accuracy else self.rng.randrange(self.plan.experts)
            if guess not in experts:
                experts.append(guess)
        return t.Predicted(request, position, layer, tuple(experts))

    def say(self, event: t.Predicted) -> None:
        if self.referee.books.shadow or self.rng.random() < 0.5:
            self.post(event)

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def join(self, number: int) -> None:
        if number not in self.workers:
            self.workers[number] = _Worker(self, number)
            slots = self.plan.slots[number % len(self.plan.slots)]
            self.post(t.WorkerJoined(number, slots, forms=FORM_COSTS[number % 3] if self.plan.forms else ()))

    def fault(self, what: str, whom: int) -> None:
        shadow = self.referee.books.shadow
        if what == "die" and self.workers:
            worker = sorted(self.workers.items())[whom % len(self.workers)][1]
            worker.dead = True
            self.at(self.ticks(10), lambda: self.lose(worker))
        elif what == "join":
            self.join(whom)
        elif what == "cancel" and self.mains:
            self.close(sorted(self.mains.items())[whom % len(self.mains)][1])
        elif what == "shadow-lost" and shadow:
            self.post(t.ShadowLost())
        elif what == "shadow-join" and not shadow:
            self.post(t.ShadowJoined())

    def lose(self, worker: _Worker) -> None:
        if self.workers.get(worker.number) is worker:
            del self.workers[worker.number]
            self.post(t.WorkerLost(worker.number, "it died"))


def live(plan: Plan, residency: MakeResidency = residency_of) -> World:
    """Lives through a plan, referee and all, and replays it."""
    world = World(plan, residency).run()
    world.replay()
    return world
