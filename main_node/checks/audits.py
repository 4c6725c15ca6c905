"""Audits: a share of the workers' computations is done twice, and the outputs are compared."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

import torch

from main_node.checks.suspects import Arithmetic, Source
from scheduler import types as t

AUTO_SHARE = 0.01
"""The share of computations that are audited unless it is set: so few cost workers that are idle next to nothing."""
MOST_BYTES = 4 << 20
"""Rows and outputs that are kept for audits under way, and for each that waits for the arbiter. Larger computations, as
of a long prompt, are not audited."""
MOST_DUE = 4.0
"""Audits that are made up for when a worker is idle again."""
PATIENCE = 8
"""Audits of a worker that were dropped in a row, until the main node does one itself. Only where a share was set."""

BUSY, LARGE, SMALLER = "busy", "large", "smaller form"
"""Why a computation was not audited: neither a worker nor the main node had time, it has more than `MOST_BYTES` of rows
(or those under way have), or the expert is in a smaller form."""

_BOUNDS = {torch.bfloat16: 1.25 * 2**-7, torch.float16: 1.25 * 2**-10, torch.float32: 1e-4}
"""By dtype: how far outputs of the same rows may lie apart, as the norm of their difference over their norm, where the
devices differ and so add in another order. 1.25 epsilons are three times what rounding does, and less than the 1 % by
which an output may be scaled and still read well. float32's error grows with the number of addends instead."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A computation that is checked."""

    request: int
    expert: t.ExpertId
    hidden: torch.Tensor
    """[n, H]"""
    weights: torch.Tensor
    """[n]"""
    outputs: Mapping[Source, torch.Tensor]
    """Each worker's output [n, H]. The first one is part of the request's answer."""
    passes: tuple[int, ...] = ()
    """Of its rows, see `wire.messages.Compute`."""

    def copy(self) -> Case:
        """The same in memory of its own: the model may change its rows and outputs in place, and a view would keep the
        whole layer's."""
        outputs = {source: output.clone() for source, output in self.outputs.items()}
        return replace(self, hidden=self.hidden.clone(), weights=self.weights.clone(), outputs=outputs)

    @property
    def nbytes(self) -> int:
        """Of rows and two outputs; the second one comes when the audit is done."""
        first = next(iter(self.outputs.values()))
        return self.hidden.nbytes + self.weights.nbytes + 2 * first.nbytes


@dataclass(slots=True)
class _Account:
    """One worker's."""

    due: float
    """Audits that its computations so far are due. Starts at random, so that workers take turns."""
    dropped: int = 0
    """Audits that were dropped in a row."""
    pause: int = 0
    """Computations until the next attempt."""


@dataclass(slots=True)
class Audits:
    """Chooses which computations are audited, and keeps their rows meanwhile.

    Each worker is owed audits of `share` of its own computations. `patient`: audits are done by idle workers alone.
    Not thread-safe: the engine holds its lock.
    """

    share: float
    patient: bool = True
    random: Random = field(default_factory=Random)
    """Of which computation an audit is made."""
    done: int = 0
    """Audits whose outputs were compared."""
    missed: Counter[str] = field(default_factory=Counter)
    """Attempts that came to nothing, by their reason."""
    _accounts: dict[Source, _Account] = field(default_factory=dict)
    _cases: dict[int, Case] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def wants(self, worker: Source) -> bool:
        """A worker has computed. True if an audit of that is to be tried."""
        account = self._accounts.get(worker)
        if account is None:
            account = self._accounts[worker] = _Account(self.random.random())
        account.due = min(account.due + self.share, MOST_DUE)
        if account.due < 1:
            return False
        account.pause -= 1
        # one of the next two, at random: layers come round at a fixed pace, and audits must not keep step with them
        return account.pause < 0 and (self.share >= 0.5 or self.random.random() < 0.5)

    def begin(
        self,
        call: t.Compute,
        worker: Source,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        passes: tuple[int, ...] = (),
    ) -> int | None:
        """Keep a computation's rows and output for an audit; returns its number. None where they are too many bytes."""
        case = Case(call.visit.request, call.expert, hidden, weights, {worker: output}, passes)
        if case.nbytes + sum(kept.nbytes for kept in self._cases.values()) > MOST_BYTES:
            self.missed[LARGE] += 1
            return None
        number = next(self._numbers)
        self._cases[number] = case.copy()
        return number

    def case(self, audit: int) -> Case | None:
        return self._cases.get(audit)

    def impatient(self, case: Case) -> bool:
        """No worker was idle for too long, so that the main node must do this one."""
        return not self.patient and self._account_of(case).dropped >= PATIENCE

    def drop(self, audit: int, why: str = BUSY) -> None:
        """It is not done; a later computation of the worker is tried, after a pause that doubles."""
        case = self._cases.pop(audit, None)
        if case is not None:
            self.missed[why] += 1
            account = self._account_of(case)
            account.dropped += 1
            account.pause = min(1 << min(account.dropped, 16), max(1, round(0.25 / self.share)))

    def end(self, audit: int, by_worker: bool = True) -> Case | None:
        """Its outputs are compared. The main node goes on until a worker has done one."""
        case = self._cases.pop(audit, None)
        if case is not None:
            account = self._account_of(case)
            account.due -= 1
            account.pause = 0
            if by_worker:
                account.dropped = 0
            self.done += 1
        return case

    def _account_of(self, case: Case) -> _Account:
        return self._accounts[next(iter(case.outputs))]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference over the norm of `other`; infinite where one of them is not finite."""
    one, other = one.double(), other.double()
    norm = float(other.norm())
    found = float((one - other).norm()) / norm if norm else float(one.norm() > 0)
    return found if found < float("inf") else float("inf")


def agree(case: Case) -> bool:
    """Whether the outputs of two workers can both be right."""
    (one, first), (other, second) = case.outputs.items()
    if first.dtype == second.dtype and torch.equal(first, second):
        return True
    return one.arithmetic != other.arithmetic and distance(first, second) <= _bound(case)


def liars(case: Case, truth: torch.Tensor, arithmetic: Arithmetic) -> dict[Source, float]:
    """Workers whose outputs are not what the expert computes, with their distance from it. `truth` [n, H] was computed
    by `arithmetic`. Where a worker's is the same, half the bound is enough: other numbers of threads may still add in
    another order."""
    if not truth.isfinite().all():
        return {}
    far = {source: distance(output, truth) for source, output in case.outputs.items()}
    return {
        source: found
        for source, found in far.items()
        if found > _bound(case) * (0.5 if source.arithmetic == arithmetic else 1.0)
    }


def in_doubt(case: Case, truth: torch.Tensor | None, arithmetic: Arithmetic) -> set[Source]:
    """Workers that differ, and whose outputs may have lost the last bits. `truth`: see `liars`; None where it could not
    be computed."""
    sources = set(case.outputs)
    if truth is None:
        return sources
    if len(sources) == 1:  # nothing differs from it but the main node, which may add in another order
        return set()
    if not truth.isfinite().all() or len({source.arithmetic for source in sources}) > 1:  # as is to be expected
        return set()
    right = {one for one, output in case.outputs.items() if one.arithmetic == arithmetic and torch.equal(output, truth)}
    return sources - right


def _bound(case: Case) -> float:
    return _BOUNDS.get(case.hidden.dtype, _BOUNDS[torch.float32])
