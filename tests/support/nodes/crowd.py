"""Crowds: requests that come, are cancelled and fail at drawn moments, and what must be true of the others.

Moments are numbers of gates: an event happens on the model's thread when so many gates have fired since the beginning.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from hypothesis import strategies as st

from main_node.steps import PassJob
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from odmoe.stores import prepare_store
from scheduler import types as t
from scheduler.errors import RequestCancelledError, RequestFailedError
from support.models.tiny_mixtral import save_tiny_mixtral
from support.nodes.exact import Alone, answers

WAIT_S = 60.0
PROMPTS, LONGEST, VOCABULARY = 12, 20, 96
TOKENS = 10
Fate = Literal["end", "cancel", "close", "choose", "forward", "interrupt"]
FATES: tuple[Fate, ...] = ("end", "end", "end", "cancel", "close", "choose", "forward", "interrupt")


KINDS: dict[str, dict[str, Any]] = {
    "one slot": {"workers": 3},
    "two slots, chunks": {"workers": 2, "slots": 2, "prefill_chunk": 8},
    "shadow": {"workers": 3, "shadow": "fp16"},
    "batched": {"workers": 2, "batch_dense": True, "parallel": 3},
}
"""Kinds of clusters."""


class Broken(Exception):
    """What a request's own code raises."""


class Interrupting(threading.Event):
    """Ctrl-C comes while it is waited for, the first time."""

    pressed = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self.pressed:
            self.pressed = True
            super().wait(0.0005)
            raise KeyboardInterrupt
        return super().wait(timeout)


@dataclass(frozen=True)
class Visitor:
    """A request. It comes when `arrives` gates have fired, or none is under way. `at`: when its fate comes, in gates
    after the arrival, or in tokens."""

    prompt: int
    tokens: int
    arrives: int
    fate: Fate
    at: int


visitors = st.builds(
    Visitor,
    prompt=st.integers(0, PROMPTS - 1),
    tokens=st.integers(1, TOKENS),
    arrives=st.integers(0, 40),
    fate=st.sampled_from(FATES),
    at=st.integers(0, 12),
)
crowds = st.lists(visitors, min_size=1, max_size=6)


def prompt_of(number: int) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, LONGEST))]


def alone_of(cluster: EmbeddedCluster) -> list[Alone]:
    """The answer to each prompt when no other request is open."""
    found = []
    for number in range(PROMPTS):
        report, logits = answers(cluster, prompt_of(number), TOKENS)
        found.append(Alone(prompt_of(number), report.token_ids, logits))
    return found


class Crowd:
    """Lets visitors into a cluster, each in a thread, and compares what they get with their answers `alone`."""

    def __init__(self, cluster: EmbeddedCluster, alone: list[Alone], visitors: list[Visitor]) -> None:
        self._cluster, self._main = cluster, cluster.main
        self._alone = alone
        self._visitors = visitors
        self._changed = threading.Condition()
        self._gates = self._inside = 0
        self._cancels: list[tuple[int, Any]] = []
        self._broken: dict[int, int] = {}
        self._interrupted: dict[int, int] = {}
        self._logits: dict[int, list[torch.Tensor]] = {}
        self._errors: list[BaseException] = []

    def run(self) -> None:
        engine, experts = self._main.engine, self._main.experts
        fired, compute, job = engine.on_gate_fired, experts.compute, self._main._job
        self._main.on_logits = lambda number, row: self._logits[number].append(row)
        try:
            engine.on_gate_fired = lambda visit, layer: self._fired(fired, visit, layer)  # type: ignore[method-assign]
            experts.compute = lambda visit, *rest, **how: self._compute(compute, visit, *rest, **how)  # type: ignore[method-assign]
            self._main._job = lambda request, *rest, **named: self._job(job(request, *rest, **named))  # type: ignore[method-assign]
            threads = [threading.Thread(target=self._visit, args=(one,), daemon=True) for one in self._visitors]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
                assert not thread.is_alive(), "a request does not end"
        finally:
            engine.on_gate_fired, experts.compute, self._main._job = fired, compute, job  # type: ignore[method-assign]
        if self._errors:
            raise self._errors[0]
        self._check_nothing_left()

    # --- what happens at a gate ---------------------------------------------------------------------------------

    def _fired(self, fired: Any, visit: t.Visit, layer: Any) -> None:
        with self._changed:
            self._gates += 1
            due = [answer for at, answer in self._cancels if at <= self._gates]
            self._cancels = [(at, answer) for at, answer in self._cancels if at > self._gates]
            self._changed.notify_all()
        for answer in due:
            answer.cancel()
        fired(visit, layer)

    def _compute(self, compute: Any, visit: t.Visit, *rest: Any, **how: Any) -> Any:
        if visit.request in self._broken:
            self._broken[visit.request] -= 1
            if self._broken[visit.request] < 0:
                raise Broken("in its forward")
        return compute(visit, *rest, **how)

    def _job(self, job: PassJob) -> PassJob:
        """Its thread is interrupted where it waits for the pass, at the drawn one."""
        number = job.request.number
        if number in self._interrupted:
            self._interrupted[number] -= 1
            if self._interrupted[number] < 0:
                job.ended = Interrupting()
        return job

    # --- a visitor ----------------------------------------------------------------------------------------------

    def _visit(self, one: Visitor) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._gates >= one.arrives or not self._inside, WAIT_S)
            self._inside += 1
        try:
            self._answer(one)
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._errors.append(error)
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _answer(self, one: Visitor) -> None:
        alone = self._alone[one.prompt]
        answer = self._main.generate(alone.prompt, one.tokens, ignore_eos=True)
        logits = self._logits[answer.number] = []
        self._doom(one, answer)
        tokens: list[int] = []
        report = None
        expected: tuple[type[BaseException], ...] = {
            "cancel": (RequestCancelledError, RequestFailedError),
            "choose": (Broken,),
            "forward": (Broken,),
            "interrupt": (KeyboardInterrupt,),
        }.get(one.fate, ())
        try:
            for step in answer:
                report = step.report
                if step.token_id is None:
                    continue
                tokens.append(step.token_id)
                if one.fate == "close" and len(tokens) > one.at:
                    answer.close()
                    break
        except expected:
            report = None
        assert tokens == alone.tokens[: len(tokens)]
        if one.fate == "end":
            assert len(tokens) == one.tokens
        if report is not None and report.exact:
            assert all(torch.equal(a, b) for a, b in zip(logits, alone.logits, strict=False))

    def _doom(self, one: Visitor, answer: Any) -> None:
        """Have its fate come about."""
        request = answer.request
        if one.fate == "cancel":
            with self._changed:
                self._cancels.append((self._gates + one.at, answer))
        elif one.fate == "forward":
            self._broken[answer.number] = one.at
        elif one.fate == "choose":
            choose, left = request.chooser.choose, iter(range(one.at))

            def breaking(row: torch.Tensor) -> int:
                if next(left, None) is None:
                    raise Broken("in its chooser")
                return choose(row)

            request.chooser.choose = breaking
        elif one.fate == "interrupt":
            self._interrupted[answer.number] = one.at

    def _check_nothing_left(self) -> None:
        engine, steps, end = self._main.engine, self._main.steps, time.monotonic() + WAIT_S
        while not (engine.idle() and steps.idle()) and time.monotonic() < end:
            time.sleep(0.001)  # an answer is there a moment before its step has ended
        assert engine.idle()
        assert steps.idle()
        assert not engine.core.stats
        assert self._main.admission.counts() == (0, 0)


@contextmanager
def making_crowds(folder: Path) -> Iterator[Callable[[str, list[Visitor]], Crowd]]:
    """Crowds in a cluster of some kind, which is made once for all, of a model that is made in `folder`."""
    path = save_tiny_mixtral(folder / "model")
    store = prepare_store(str(path), str(folder / "store"), "float32")
    made: dict[str, tuple[EmbeddedCluster, list[Alone]]] = {}

    def crowd(kind: str, visitors: list[Visitor]) -> Crowd:
        if kind not in made:
            fields: dict[str, Any] = {"shadow": "none", "loader": "memory", "threads": 1} | KINDS[kind]
            cluster = EmbeddedCluster(Settings(model=str(path), **fields), store)
            made[kind] = cluster, alone_of(cluster)
        return Crowd(*made[kind], visitors)

    yield crowd
    for cluster, _ in made.values():
        cluster.close()
