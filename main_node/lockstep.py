"""One step: the forward passes of several requests on one thread, each suspended where it waits.

A pass runs to the gate of its next MoE layer, announces it and is suspended. Once all have been, the thread waits (and
computes experts of workers of this process) until the experts of a pass's layer have answered, and resumes it: first
done, first resumed. So one pass's next layer is computed while workers compute another's experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from checkpoint.coroutine import Coroutine
from checkpoint.linear_batch import LinearCall, keeps_bits, meeting, multiply
from main_node.engine.engine import Engine
from main_node.engine.layer import LayerWait
from scheduler import types as t


class Job(Protocol):
    """A pass, as its step sees it."""

    rounded: bool
    """Set where products were shared that may have lost the last bit by it."""

    one: t.Pass

    def forward(self) -> None:
        """The forward pass. Its outcome is kept."""

    def enter(self) -> None:
        """What follows on this thread is part of the pass."""

    def end(self, error: BaseException | None = None) -> None:
        """The pass has ended; `error`: what it raised."""


class _Run:
    """A pass of the step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.call = Coroutine(job.forward)
        self.begun = False
        self.waits: LayerWait | LinearCall | None = None

    def go_on(self, value: object = None, error: BaseException | None = None) -> None:
        """With what it waited for, or with an error, until it is suspended again or has ended. Nothing is raised
        here."""
        self.begun = True
        self.job.enter()
        try:
            waits = self.call.resume(value) if error is None else self.call.throw(error)
        except BaseException as error:  # noqa: BLE001 - raised in the thread of its request
            self.job.end(error)
            return
        if self.call.ended:
            self.job.end()
        else:
            self.waits = waits

    @property
    def layer(self) -> LayerWait | None:
        """The layer for which it waits, or None."""
        return self.waits if isinstance(self.waits, LayerWait) else None

    @property
    def product(self) -> LinearCall | None:
        """The product for which it waits, or None."""
        return self.waits if isinstance(self.waits, LinearCall) else None


class LockStep:
    """Runs the passes of `jobs` to their ends, in inference mode. `batched`: a layer of all passes begins together, so
    that their rows meet at each linear layer and are multiplied together."""

    def __init__(self, engine: Engine, jobs: Sequence[Job], batched: bool = False) -> None:
        self._engine = engine
        self._batched = batched
        self._runs = [_Run(job) for job in jobs]
        self._released: list[_Run] = []
        """In a batched step: passes of the layer under way that have not been resumed yet."""

    def run(self) -> None:
        """Each job is ended as soon as its pass is, with the error that the pass raised. A pass that raises does not
        disturb the others."""
        resume = self._resume_all if self._batched else self._resume_first
        while self._runs:
            if not (self._begin() or self._multiply() or resume() or self._foresee()):
                self._wait()
            self._runs = [run for run in self._runs if not run.call.ended]

    def _begin(self) -> bool:
        for run in self._runs:
            if not run.begun:
                run.go_on()
                return True
        return False

    def _multiply(self) -> bool:
        """Products of the linear layer that is furthest behind, once every pass that can go on waits for one."""
        products = [(run, call) for run in self._runs if (call := run.product)]
        if not products or self._released:
            return False
        met = [products[index] for index in meeting(call for _, call in products)]
        calls = [call for _, call in met]
        try:
            rounded = not keeps_bits(calls)
            outputs = multiply(calls)
        except Exception as error:  # noqa: BLE001 - raised in each of the passes
            for run, _ in met:
                run.go_on(error=error)
            return True
        for (run, _), output in zip(met, outputs, strict=True):
            run.job.rounded |= rounded
            run.go_on(output)
        return True

    def _resume_first(self) -> bool:
        """Resume the pass whose layer was done first."""
        done = [(wait.layer.ended, run) for run in self._runs if (wait := run.layer) and wait.layer.done]
        if not done:
            return False
        _, first = min(done, key=lambda one: one[0])
        first.go_on(True)
        return True

    def _resume_all(self) -> bool:
        """Resume every pass, one after the other, once all of their layers are done."""
        if not self._released:
            if not all((wait := run.layer) and wait.layer.done and not wait.foresight for run in self._runs):
                return False
            self._engine.pace.begin_layer(run.job.one.request for run in self._runs)
            self._released = list(self._runs)
        self._released.pop(0).go_on(True)
        return True

    def _foresee(self) -> bool:
        """A pass goes on with work for a predictor."""
        for run in self._runs:
            wait = run.layer
            if wait and wait.foresight and wait.ready():
                run.go_on(True)
                return True
        return False

    def _wait(self) -> None:
        """Until a pass can go on. One that has waited too long is resumed, to find out why."""
        waits = [(run, wait) for run in self._runs if (wait := run.layer)]
        least = min((wait.within_s for _, wait in waits), default=math.inf)
        combine = all if self._batched else any

        def can_go_on() -> bool:
            if any(wait.ready() for _, wait in waits if wait.foresight):
                return True
            return combine(wait.ready() and not wait.foresight for _, wait in waits)

        lent = self._engine.lent
        with lent.lend():
            if lent.run_until(can_go_on, least):
                return
        late = next(run for run, wait in waits if wait.within_s == least)
        late.go_on(False)
