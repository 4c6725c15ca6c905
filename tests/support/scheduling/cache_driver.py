"""One device with a residency, as the core drives it: gates in, hits out. Computations end when a slot is wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from scheduler.policies.precision import FULL, INT4
from scheduler.policies.predictors.base import Scores
from scheduler.policies.residency.base import Residency
from scheduler.types import ExpertId, ModelShape, Visit


class Device:
    """`kept`: what is in a slot -> whether it may stay. `idle`: kept ones that nobody needs, the longest first.
    `users`: what a gate needs now; `foretold`: what only predictions need, the next one first."""

    def __init__(self, policy: Residency, shape: ModelShape, slots: int, worker: int = 0) -> None:
        self.policy, self.shape, self.slots, self.worker = policy, shape, slots, worker
        self.kept: dict[ExpertId, bool] = {}
        self.idle: list[ExpertId] = []
        self.users: list[ExpertId] = []
        self.foretold: list[ExpertId] = []
        self.loads = 0
        self.position = 0
        """Of the pass."""
        policy.check(shape, slots)

    def gate(
        self,
        layer: int,
        named: Iterable[int] | Mapping[int, int],
        scores: Scores = (),
        prefill: bool = False,
        request: int = 0,
        smaller: Collection[int] = (),
    ) -> list[bool]:
        """A gate names experts, all are computed; for each of them, ascending, whether it was there. `smaller`:
        those for which int4 will do."""
        rows = dict(named) if isinstance(named, Mapping) else dict.fromkeys(named, 1)
        self.policy.on_gate_fired(Visit(request, self.position, layer), rows, scores, prefill)
        wanted = [ExpertId(layer, number) for number in sorted(rows)]
        for expert in [e for e in self.foretold if e.layer == layer and e not in wanted]:
            self.foretold.remove(expert)
            self._needed_no_more(expert)
        brought = set(self.foretold)
        hits = [expert in self.kept for expert in wanted]
        for expert in wanted:
            if expert in self.kept:
                self._join(expert)
                self.policy.on_used(
                    self.worker, expert, expert not in brought, INT4 if expert.expert in smaller else FULL
                )
        for expert in [expert for expert, hit in zip(wanted, hits, strict=True) if not hit]:
            while not self._bring(expert, predicted=False):
                self._free_one()
            self.users.append(expert)
            self.policy.on_used(self.worker, expert, False, INT4 if expert.expert in smaller else FULL)
        while self.users:
            self._needed_no_more(self.users.pop(0))
        return hits

    def predict(self, layer: int, experts: Iterable[int]) -> None:
        """What has no slot to come into stays where it is."""
        for expert in [ExpertId(layer, number) for number in experts]:
            if expert in self.foretold:
                continue
            if expert in self.kept and expert in self.idle:
                self.idle.remove(expert)
                self.foretold.append(expert)
            elif expert not in self.kept and self._bring(expert, predicted=True):
                self.foretold.append(expert)

    def warm(self) -> None:
        """What is to be there stays needed until all of it is there."""
        wanted = [ExpertId(*expert) for expert in self.policy.warm(self.slots)]
        held = [expert for expert in wanted if expert in self.kept]
        for expert in held:
            self.idle.remove(expert)
        for expert in wanted:
            if expert not in self.kept and self._bring(expert, predicted=True):
                held.append(expert)
        for expert in held:
            self._needed_no_more(expert)

    def _join(self, expert: ExpertId) -> None:
        for group in (self.idle, self.foretold):
            if expert in group:
                group.remove(expert)
        self.users.append(expert)

    def _bring(self, expert: ExpertId, predicted: bool) -> bool:
        if self.policy.full(expert) or len(self.kept) == self.slots:
            victim = self.policy.victim(self.worker, expert, tuple(self.idle)) if self.idle else None
            if victim is None and not predicted and self.idle and len(self.idle) == self.slots:
                victim = self.idle[0]
            if victim is not None:
                assert victim in self.idle
                self.idle.remove(victim)
                self._leave(victim)
        if len(self.kept) == self.slots:
            return False
        self.kept[expert] = self.policy.keeps(self.worker, expert, predicted)
        self.loads += 1
        return True

    def _free_one(self) -> None:
        """What is computed first, or what was only predicted and is wanted last, gives way."""
        if self.users:
            self._needed_no_more(self.users.pop(0))
        else:
            self._leave(self.foretold.pop())

    def _needed_no_more(self, expert: ExpertId) -> None:
        if self.kept[expert]:
            self.idle.append(expert)
        else:
            del self.kept[expert]

    def _leave(self, expert: ExpertId) -> None:
        if self.kept.pop(expert):
            self.policy.on_left(self.worker, expert)
