"""What happens in a random world of the scheduler (`world.py`): its cluster, model, requests, choices and
faults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from scheduler.types import Compute, ExpertId, Load, ModelShape

POLICIES = ("none", "all", "lru", "even", "quota")
"""Residencies of `policies.py`; a plan may name one of the product's as well."""
PREDICTORS = ("none", "chance", "gate", "attention", "token")
PREFILLS = ("ahead", "pipelined", "in-turn")
AWAY = 60
"""Ticks that the client of a request pauses for at most."""
LOST = 120
"""Ticks after which a worker that was lost joins again, at most."""
FAULTS = ("die", "join", "cancel", "shadow-lost", "shadow-join")
COPY = "copy"
"""A fault in parts, drawn apart: a worker's part is another from now on."""
BLIP = "blip"
"""A fault as well, drawn apart: all workers die at once, or nearly."""


@dataclass(frozen=True)
class Poison:
    """A worker dies of each load of an expert, or of each computation of it; `request`: of that request's alone."""

    layer: int
    expert: int
    request: int | None = None
    loads: bool = False

    def kills(self, c: Load | Compute) -> bool:
        mine = isinstance(c, Load) if self.loads else isinstance(c, Compute) and self.request in (None, c.visit.request)
        return mine and c.expert == (self.layer, self.expert)


@dataclass(frozen=True)
class Plan:
    """`slots`: one number a worker, 0 for a host place. `faults`: (when, what, whom). Durations: the most ticks that a
    thing takes. `policy`: one of `POLICIES`, or of the product's residencies. `predictor`: none, chance, or one that is
    told what the main model foresees: gate, attention or token. `router`, `placement`, `forms`: one that decides
    otherwise than the gate, the device alone, and full precision. `chunk`: most tokens of the prompt in a pass, 0: all.
    `block`: most rows of a pass in decoding. `pausing`: how often a request is not ready when a step begins, since its
    client is slow. `arrive`: the most ticks until a request arrives. `returning`: how often a worker that died comes
    back; `patience`: the ticks for which requests wait for workers that are missing. `auditing`: how often an
    audit is requested after a fact. `poison`: what kills a worker. `flapping`: the most ticks that a worker lives
    while requests are open; 0: workers die of faults alone. `host_slots`: of each worker's host memory, which shrinks
    by one with every twentieth load."""

    seed: int = 0
    slots: tuple[int, ...] = (1, 1, 1, 1)
    group: int = 2
    layers: int = 3
    experts: int = 4
    top_k: int = 2
    mini_batch: int = 3
    periods: tuple[int, int] = (1, 1)
    requests: int = 1
    prompt: int = 5
    answer: int = 3
    main: int = 5
    load: int = 20
    compute: int = 5
    latency: int = 2
    shadow: bool = True
    predict: int = 3
    accuracy: float = 0.8
    failing: float = 0.0
    faults: tuple[tuple[int, str, int], ...] = ()
    policy: str = "none"
    predictor: str = "none"
    prefill: str = "ahead"
    router: bool = False
    placement: bool = False
    forms: bool = False
    chunk: int = 0
    block: int = 1
    pausing: float = 0.0
    arrive: int = 20
    returning: float = 0.0
    patience: int = 200
    auditing: float = 0.0
    poison: Poison | None = None
    flapping: int = 0
    host_slots: int = 0
    replicas: int = 0
    """How many workers with slots hold each expert, of a store in parts; a host place holds half of them. 0: all hold
    all."""

    def held(self, worker: int, again: int = 0) -> frozenset[ExpertId] | None:
        """Its part; `again`: after so many changes, each of which may add to it or draw it anew."""
        if not self.replicas:
            return None
        place = worker % len(self.slots)
        able = [number for number, slots in enumerate(self.slots) if slots]
        part = set()
        for layer in range(self.layers):
            for expert in range(self.experts):
                rng = Random(f"part {self.seed}/{again and worker}/{again}/{layer}/{expert}")
                holders = rng.sample(able, min(self.replicas, len(able)))
                if place in holders if self.slots[place] else rng.random() < 0.5:
                    part.add(ExpertId(layer, expert))
        return frozenset(part)

    @property
    def all_experts(self) -> int:
        return self.layers * self.experts

    @property
    def stay(self) -> bool:
        """Every expert is to stay in a slot of its own."""
        return self.policy == "all"

    @property
    def deadly(self) -> bool:
        """Workers die of what they are asked, or within some ticks."""
        return self.poison is not None or self.flapping > 0

    @property
    def quiet(self) -> bool:
        """Nothing fails, is lost, or is cancelled."""
        return not self.failing and not self.deadly and all(what.startswith("shadow") for _, what, _ in self.faults)

    @property
    def shape(self) -> ModelShape:
        return ModelShape(tuple(range(self.layers)), self.experts, self.top_k)


def random_plan(seed: int) -> Plan:
    """Any cluster, model and faults, with OD-MoE's choices."""
    rng = Random(seed)
    experts = rng.choice((1, 2, 4, 6, 8))
    kinds = rng.sample(FAULTS, rng.randint(0, 3))
    faults = [
        (rng.randint(0, 400), rng.choice(kinds), rng.randint(0, 11)) for _ in range(rng.randint(0, 6) if kinds else 0)
    ]
    plan = Plan(
        seed=seed,
        slots=tuple(rng.choice((1, 1, 1, 2, 3)) for _ in range(rng.choice((1, 2, 3, 4, 5, 8, 12)))),
        group=rng.randint(1, 4),
        layers=rng.randint(1, 6),
        experts=experts,
        top_k=rng.randint(1, experts),
        mini_batch=rng.choice((1, 2, 4, 128)),
        periods=(rng.choice((0, 1, 2)), rng.choice((0, 1, 3))),
        requests=rng.choice((1, 1, 2, 3)),
        prompt=rng.randint(1, 9),
        answer=rng.randint(1, 5),
        main=rng.choice((1, 5, 30)),
        load=rng.choice((1, 10, 40)),
        compute=rng.choice((1, 5, 20)),
        latency=rng.choice((0, 2, 10)),
        shadow=rng.random() < 0.85,
        predict=rng.choice((1, 5, 30, 60)),
        accuracy=rng.choice((0.0, 0.5, 0.9, 1.0)),
        failing=rng.choice((0.0, 0.0, 0.0, 0.03, 0.3)),
        faults=tuple(sorted(faults)),
    )
    return _with_blips(_in_passes(plan), 0.35)


def _with_blips(plan: Plan, share: float) -> Plan:
    """So many of the plans with blips; drawn apart, so that the rest does not change."""
    rng = Random(f"blips {plan.seed}")
    patience = rng.choice((0, 30, 60, 200, 200))
    if rng.random() >= share:
        return replace(plan, patience=patience)
    blips = [(rng.randint(0, rng.choice((100, 400))), BLIP, 0) for _ in range(rng.choice((1, 2, 3)))]
    faults = tuple(sorted((*plan.faults, *blips)))
    return replace(plan, faults=faults, returning=rng.choice((0.2, 0.6, 1.0)), patience=patience)


def _in_passes(plan: Plan) -> Plan:
    """Every other plan with prompts in chunks, blocks, slow clients; drawn apart, so that the rest does not change."""
    rng = Random(f"passes {plan.seed}")
    if rng.random() < 0.5:
        return plan
    return replace(
        plan,
        chunk=rng.choice((0, 1, 2, 3)),
        block=rng.choice((1, 1, 2, 4)),
        pausing=rng.choice((0.0, 0.0, 0.3)),
        arrive=rng.choice((0, 20, 100)),
    )


def stepping_plan(seed: int) -> Plan:
    """Several requests in lock-step, few slots, few experts that they share, and anything that may happen to one."""
    rng = Random(f"stepping {seed}")
    plan = _eventful(rng)
    plain = rng.random() < 0.5
    kinds = rng.sample((*FAULTS, "cancel", "cancel", "cancel"), 2)
    plan = replace(
        plan,
        seed=seed,
        slots=_slots(rng, (1, 1, 2, 3, 5), (1, 1, 2, 3), 0.15),
        layers=rng.randint(1, 4),
        requests=rng.choice((2, 3, 3, 5, 8)),
        prompt=rng.randint(1, 6),
        answer=rng.randint(1, 6),
        chunk=rng.choice((0, 1, 2, 3)),
        block=rng.choice((1, 1, 2, 3, 4)),
        pausing=rng.choice((0.0, 0.2, 0.5)),
        arrive=rng.choice((0, 20, 100, 300)),
        predict=rng.choice((1, 5, 30, 60)),
        latency=rng.choice((0, 2, 10)),
        failing=rng.choice((0.0, 0.0, 0.0, 0.03, 0.3)),
        faults=_later_faults(rng, 6, tuple(kinds)) if rng.random() < 0.7 else (),
        policy="none" if plain else rng.choice(("none", "lru", "even", "quota", "all")),
        predictor="none" if plain else plan.predictor,
        router=not plain and plan.router,
        placement=not plain and plan.placement,
        forms=not plain and rng.random() < 0.1,
    )
    plan = _with_blips(plan, 0.3)
    return roomy(plan) if plan.stay and rng.random() < 0.9 else plan


def parted_plan(seed: int) -> Plan:
    """Any world, with a store in parts, some of which change while it lives."""
    rng = Random(f"parted {seed}")
    plan = (random_plan, choosing_plan, eventful_plan, stepping_plan)[seed % 4](seed)
    copies = [(rng.randint(0, 300), COPY, rng.randint(0, 11)) for _ in range(rng.choice((0, 0, 1, 3)))]
    faults = tuple(sorted((*plan.faults, *copies)))
    return replace(plan, faults=faults, replicas=rng.choice((1, 1, 2, 2, 3)))


def deadly_plan(seed: int) -> Plan:
    """Workers that die of an expert, or within ticks whatever they do, and always come back: nothing but the core ends
    a request."""
    rng = Random(f"deadly {seed}")
    plan = stepping_plan(seed) if rng.random() < 0.5 else choosing_plan(seed)
    plan = replace(plan, returning=1.0, patience=100_000, failing=0.0, faults=())
    if rng.random() < 0.4:
        return replace(plan, flapping=rng.choice((1, 10, 50, 200)))
    request = rng.choice((None, 1, rng.randint(1, plan.requests)))
    loads = request is None and rng.random() < 0.5
    poison = Poison(rng.randrange(plan.layers), rng.randrange(plan.experts), request, loads)
    return replace(plan, poison=poison)


def roomy(plan: Plan) -> Plan:
    """The same with slots for everything on the workers that it begins with, still as uneven as they were."""
    more = -(-plan.all_experts // sum(slots > 0 for slots in plan.slots))
    return replace(plan, slots=tuple(slots and slots - 1 + more for slots in plan.slots))


def choosing_plan(seed: int) -> Plan:
    """A random plan with random choices. Where everything stays there is mostly room for it."""
    rng = Random(-1 - seed)
    plan = random_plan(seed)
    plan = replace(
        plan,
        policy=rng.choice(POLICIES),
        predictor=rng.choice(PREDICTORS),
        prefill=rng.choice(PREFILLS),
        router=rng.random() < 0.3,
        placement=rng.random() < 0.7,
        forms=rng.random() < 0.15,
        slots=(*plan.slots, 0) if rng.random() < 0.4 else plan.slots,
    )
    return roomy(plan) if plan.stay and rng.random() < 0.9 else plan


def eventful_plan(seed: int) -> Plan:
    """Small worlds drawn towards what random ones rarely see: many faults, loads that crowd on one link, loads that
    fail again and again, requests that want the same experts; turn by turn."""
    rng = Random(f"eventful {seed}")
    plan = _in_passes([_troubled, _crowded, _brittle, _shared][seed % 4](replace(_eventful(rng), seed=seed), rng))
    plan = _with_blips(plan, 0.3)
    return roomy(plan) if plan.stay and rng.random() < 0.85 else plan


def _eventful(rng: Random) -> Plan:
    return Plan(
        group=rng.randint(1, 3),
        layers=rng.randint(1, 4),
        experts=rng.choice((3, 4, 6, 8)),
        top_k=rng.randint(1, 3),
        mini_batch=rng.choice((1, 2, 128)),
        periods=(rng.choice((0, 1, 2)), rng.choice((0, 1, 3))),
        requests=rng.choice((1, 2, 3)),
        prompt=rng.randint(1, 5),
        answer=rng.randint(1, 4),
        main=rng.choice((1, 5, 30)),
        load=rng.choice((1, 10, 40)),
        compute=rng.choice((1, 5, 20)),
        latency=rng.choice((0, 2, 30)),
        shadow=rng.random() < 0.85,
        predict=rng.choice((1, 5, 30)),
        accuracy=rng.choice((0.0, 0.5, 0.9, 1.0)),
        policy=rng.choice(POLICIES),
        predictor=rng.choice(PREDICTORS),
        prefill=rng.choice(PREFILLS),
        router=rng.random() < 0.3,
        placement=rng.random() < 0.8,
        forms=rng.random() < 0.2,
    )


def _slots(rng: Random, workers: tuple[int, ...], sizes: tuple[int, ...], host: float) -> tuple[int, ...]:
    slots = tuple(rng.choice(sizes) for _ in range(rng.choice(workers)))
    return (*slots, 0) if rng.random() < host else slots


def _faults(rng: Random, most: int, kinds: tuple[str, ...] = FAULTS) -> tuple[tuple[int, str, int], ...]:
    return tuple(
        sorted((rng.randint(0, 160), rng.choice(kinds), rng.randint(0, 5)) for _ in range(rng.randint(0, most)))
    )


def _later_faults(rng: Random, most: int, kinds: tuple[str, ...]) -> tuple[tuple[int, str, int], ...]:
    return tuple(
        sorted((rng.randint(0, 600), rng.choice(kinds), rng.randint(0, 11)) for _ in range(rng.randint(0, most)))
    )


def _troubled(plan: Plan, rng: Random) -> Plan:
    """Workers that die at work and come again, and the last of them, mostly a host place, early on."""
    slots = _slots(rng, (1, 2, 3, 6), (1, 1, 2, 3), 0.7)
    last = (rng.randint(10, 100), "die", len(slots) - 1)
    return replace(
        plan,
        slots=slots,
        failing=rng.choice((0.0, 0.03)),
        compute=rng.choice((5, 20, 60)),
        requests=rng.choice((1, 1, 2)),
        placement=rng.random() < 0.9,
        faults=tuple(sorted((last, *_faults(rng, 4, (*FAULTS, "die", "join"))))),
    )


def _crowded(plan: Plan, rng: Random) -> Plan:
    """More slots than loads can fill: who is first on the link decides."""
    return replace(
        plan,
        slots=_slots(rng, (1, 1, 2), (2, 3, 4, 6), 0.3),
        load=rng.choice((10, 40)),
        predict=rng.choice((1, 5)),
        failing=rng.choice((0.0, 0.0, 0.03)),
        faults=_faults(rng, 2),
    )


def _brittle(plan: Plan, rng: Random) -> Plan:
    """Loads fail several times in a row, long before anybody needs them."""
    return replace(
        plan,
        slots=_slots(rng, (1, 2, 3), (1, 2), 0.3),
        failing=rng.choice((0.1, 0.3, 0.5)),
        load=rng.choice((1, 5)),
        main=rng.choice((5, 30)),
        predict=1,
        latency=rng.choice((0, 2)),
        policy=rng.choice(("none", plan.policy)),
        requests=rng.choice((1, 1, 2)),
        faults=_faults(rng, 1),
    )


def _shared(plan: Plan, rng: Random) -> Plan:
    """Two or three requests, few experts, and gates that name what was predicted for another request."""
    return replace(
        plan,
        slots=_slots(rng, (1, 1, 2), (3, 4, 6), 0.2),
        layers=rng.randint(1, 2),
        requests=rng.choice((2, 3)),
        load=rng.choice((10, 40)),
        predict=rng.choice((1, 5)),
        main=rng.choice((1, 5)),
        accuracy=rng.choice((0.0, 0.5)),
        policy=rng.choice(("lru", "even", "quota")),
        failing=rng.choice((0.0, 0.0, 0.03)),
        faults=_faults(rng, 2),
    )
