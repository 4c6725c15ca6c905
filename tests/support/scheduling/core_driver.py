"""The scheduler's core without a cluster: facts in, the exact list of commands out.

Commands are compared as short lines: `load 2.0 5/3` is worker 2, slot 0, layer 5, expert 3; `1@8` is request 1 in the
pass that begins at position 8. Ids are the scheduler's own business: the driver answers whatever ids it was given.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from functools import partial

from scheduler import types as t
from scheduler.alignment import ALL_ROWS, Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from scheduler.core.stats import RequestStats
from scheduler.policies.placement import DeviceOnly, Placement
from scheduler.policies.precision import Full, Precision
from scheduler.policies.predictors.base import NoPrediction, Predictor
from scheduler.policies.residency.base import NoCache, Residency
from scheduler.policies.routers import Router, TopK
from scheduler.policies.strategy import Strategy

P = 60
"""Prompt tokens: decoding begins with worker 0 whether 1, 2, 3, 4, 5, 6, 8 or 12 workers stand in the ring."""


def line(c: t.Command) -> str:
    match c:
        case t.Load():
            host = "" if c.host_slot is None else f" {'from' if c.in_memory else 'through'} {c.host_slot}"
            return f"load {c.worker}.{c.slot} {c.expert.layer}/{c.expert.expert}{' ' + c.form if c.form else ''}{host}"
        case t.Evict():
            return f"evict {c.worker}.{c.slot} {c.expert.layer}/{c.expert.expert}"
        case t.Compute():
            assert c.visit.layer == c.expert.layer
            where = f"{c.worker}.{c.slot} {c.expert.layer}/{c.expert.expert}"
            last = " last" if c.evict else ""
            return f"compute {where} {c.visit.request}@{c.visit.position} {c.start}:{c.stop}{last}"
        case t.Resume():
            return f"resume {c.visit.request}@{c.visit.position} layer {c.visit.layer}"
        case t.Follow():
            return f"follow {c.request} from {c.step}"
        case t.Align():
            return f"align {c.request} step {c.step}{' token' if c.token else ''} kv {c.kv_start}:{c.kv_stop}"
        case t.Unfollow():
            return f"unfollow {c.request}"
        case t.Fail():
            return f"fail {c.request}: {c.reason}"
        case t.AuditDropped():
            return f"drop audit {c.audit}"
        case t.Route():
            rows = " | ".join(" ".join(map(str, row)) for row in c.experts)
            here = " ".join(map(str, c.resident))
            return (
                f"route {c.visit.request}@{c.visit.position} layer {c.visit.layer}: {rows or 'as chosen'}, here {here}"
            )


def compute(*places: str, at: str = f"1@{P}", rows: str = "0:1", last: bool = True) -> list[str]:
    """Lines of computations. `last`: after which the expert leaves its slot."""
    return [f"compute {place} {at} {rows}{' last' if last else ''}" for place in places]


in_place = partial(compute, last=False)
"""Computations after which the expert stays where it is."""


class Driver:
    """A core, and a record of what stands in every slot according to its commands: `in_slots`, by (worker, slot), and
    `calls` that were not answered. A worker without slots is a host. `validates`: the core's books are checked after
    each event, unless there are very many workers.

    `predictor` and so on: the strategy's five objects; those not given are OD-MoE's.
    """

    def __init__(
        self,
        workers: int = 8,
        slots: int = 1,
        group: int = 2,
        layers: int = 6,
        experts: int = 8,
        mini_batch: int | None = 128,
        periods: tuple[int, int] = (1, 1),
        kv_rows: str = ALL_ROWS,
        shadow: bool = True,
        by_layer: tuple[int, ...] = (),
        mixed: tuple[int, ...] = (),
        prefill: str = "ahead",
        predictor: Predictor | None = None,
        residency: Residency | None = None,
        router: Router | None = None,
        placement: Placement | None = None,
        precision: Precision | None = None,
        top_k: int = 2,
        host_slots: int = 0,
        host_residency: Residency | None = None,
    ) -> None:
        shape = t.ModelShape(tuple(range(layers)), experts, top_k=top_k, by_layer=by_layer)
        strategy = Strategy(
            predictor or NoPrediction(shape),
            residency or NoCache(),
            router or TopK(),
            placement or DeviceOnly(),
            precision or Full(),
            predicts=predictor is not None,
            host_residency=host_residency or NoCache(),
        )
        self.core = Core(shape, RoundRobin(group), Alignment(*periods, kv_rows), mini_batch, strategy, prefill)
        self.in_slots: dict[tuple[int, int], t.Load] = {}
        self.calls: dict[tuple[int, int], list[t.Compute]] = defaultdict(list)
        self.raw: list[t.Command] = []
        self.validates = workers < 100
        self.now = 0.0
        self.hosts: set[int] = set()
        for worker, size in enumerate(mixed or (slots,) * workers):
            assert self.do(t.WorkerJoined(worker, size, host_slots=host_slots if size else 0)) == []
            self.hosts |= {worker} if size == 0 else set()
        if shadow:
            assert self.do(t.ShadowJoined()) == []

    def do(self, event: t.Event) -> list[str]:
        self.raw = self.core.handle(event, self.now)
        if self.validates:
            self.core.validate()
        for c in self.raw:
            if isinstance(c, t.Load):
                assert (c.worker, c.slot) not in self.in_slots, f"{c} into a slot that is taken"
                self.in_slots[c.worker, c.slot] = c
            elif isinstance(c, t.Evict):
                assert self.in_slots.pop((c.worker, c.slot)).expert == c.expert
                self.calls.pop((c.worker, c.slot), None)
            elif isinstance(c, t.Compute):
                assert c.worker in self.hosts or self.in_slots[c.worker, c.slot].expert == c.expert
                self.calls[c.worker, c.slot].append(c)
        return [line(c) for c in self.raw]

    # --- facts --------------------------------------------------------------------------------------------------------

    def open(self, request: int = 1, prompt: int = P, decode: bool = True) -> list[str]:
        """Opens a request; `decode`: as if its prefill were over and its first decode pass had begun."""
        out = self.do(t.RequestOpened(request, prompt))
        if decode:
            out += self.token(0, request, prompt)
        return out

    def prefill(self, prompt: int = 16, request: int = 1) -> list[str]:
        """Opens a request and begins its prefill; the commands of the latter."""
        self.open(request, prompt, decode=False)
        return self.do(t.StepStarted((t.Pass(request, 0, prompt, prefill=True),)))

    def token(self, index: int, request: int = 1, prompt: int = P) -> list[str]:
        out = self.do(t.TokenDecoded(request, index))
        return out + self.do(t.StepStarted((t.Pass(request, prompt + index, 1, prefill=False),)))

    def step(self, *requests: int, prompt: int = P, index: int = 0) -> list[str]:
        """A step with the decode pass `index` of each of these requests."""
        return self.do(t.StepStarted(tuple(t.Pass(one, prompt + index, 1, prefill=False) for one in requests)))

    def begin(self, *passes: tuple[int, int] | tuple[int, int, int], prefill: Collection[int] = ()) -> list[str]:
        """A step begins. Of each pass: request, position, and tokens where it has several. `prefill`: requests whose
        passes read their prompts."""
        full = [(*one, 1)[:3] for one in passes]
        return self.do(t.StepStarted(tuple(t.Pass(r, p, tokens, r in prefill) for r, p, tokens in full)))

    def together(self, *requests: int, rows: int = 1) -> list[str]:
        """Opens requests, all as if their prefill were over, and begins a step with a decode pass of each."""
        out = [line for request in requests for line in self.do(t.RequestOpened(request, P))]
        out += [line for request in requests for line in self.do(t.TokenDecoded(request, 0))]
        return out + self.begin(*((request, P, rows) for request in requests))

    def predict(self, layer: int, *experts: int, at: int = P, request: int = 1) -> list[str]:
        return self.do(t.Predicted(request, at, layer, experts))

    def gate(
        self,
        layer: int,
        *experts: int,
        at: int = P,
        request: int = 1,
        rows: dict[int, int] | None = None,
        scores: tuple[tuple[float, ...], ...] = (),
        chosen: tuple[tuple[int, ...], ...] = (),
    ) -> list[str]:
        """`chosen`: in place of `experts`, for each row those that it chose."""
        named = rows or dict.fromkeys(experts, 1) or Counter(e for row in chosen for e in row)
        return self.do(t.GateFired(t.Visit(request, at, layer), tuple(sorted(named.items())), chosen, scores))

    def foresee(self, layer: int, *scores: tuple[float, ...], at: int = P, request: int = 1) -> list[str]:
        return self.do(t.Foreseen(request, at, layer, scores))

    def loaded(self, *workers: int, slot: int = 0, nbytes: int = 10) -> list[str]:
        return [c for w in workers for c in self.do(t.LoadEnded(self.in_slots[w, slot].load_id, nbytes))]

    def load_failed(self, worker: int, reason: str = "disk") -> list[str]:
        return self.do(t.LoadFailed(self.in_slots[worker, 0].load_id, reason))

    def computed(self, *workers: int, slot: int = 0) -> list[str]:
        """The oldest computation of each worker's slot has ended."""
        out = []
        for worker in workers:
            call = self.calls[worker, slot].pop(0)
            if call.evict:
                del self.in_slots[worker, slot]
            out += self.do(t.ComputeEnded(call.call_id))
        return out

    def lose(self, worker: int, reason: str = "cable") -> list[str]:
        for place in [place for place in self.in_slots if place[0] == worker]:
            del self.in_slots[place]
            self.calls.pop(place, None)
        return self.do(t.WorkerLost(worker, reason))

    # --- what is there ------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> list[tuple[int, int]]:
        """(worker, slot) of all that compute something."""
        return [place for place, calls in self.calls.items() if calls]

    @property
    def where(self) -> dict[int, t.ExpertId]:
        """Worker -> what stands in its slot 0."""
        return {worker: load.expert for (worker, slot), load in self.in_slots.items() if slot == 0}

    def stats(self, request: int = 1) -> RequestStats:
        return self.core.stats[request]
