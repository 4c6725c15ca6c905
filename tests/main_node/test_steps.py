"""Which passes a step has, on which thread they run, and what becomes of those that leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from main_node.engine.pace import RealPace
from main_node.engine.prediction_trial import PredictionTrial
from main_node.request import Request
from main_node.steps import PassJob, Steps
from scheduler import types as t
from scheduler.errors import DeadlineError, RequestFailedError
from support.nodes.engine_world import WAIT_S, Later, made_up
from wire.lent_threads import LentThreads

pytestmark = pytest.mark.timeout(60)


class Noted:
    """In the place of an engine: keeps the steps that were begun, and the requests that were closed."""

    def __init__(self) -> None:
        self.steps: list[tuple[t.Pass, ...]] = []
        self.closed: list[int] = []
        self.pace = RealPace()
        self.lent = LentThreads()
        self.deadlines = SimpleNamespace(waited_s=0.0)
        self.prediction_trial = PredictionTrial(weighs=False)

    def begin_step(self, passes: tuple[t.Pass, ...], batched: bool = False) -> None:
        self.steps.append(passes)

    def close_request(self, number: int) -> None:
        self.closed.append(number)


class Bench:
    """Steps of requests whose passes do as they are told."""

    def __init__(self, deadline_s: float = WAIT_S, chunk: int = 0) -> None:
        self.engine = Noted()
        self.steps = Steps(self.engine, deadline_s, chunk, batched=False)  # type: ignore[arg-type]
        self._requests: dict[int, Request] = {}
        self._parts: dict[int, ExitStack] = {}

    def job(
        self,
        request: int,
        act: Callable[[], object] = lambda: None,
        tokens: int = 1,
        position: int = 5,
        prefill: bool = False,
    ) -> PassJob:
        def forward(one: t.Pass) -> int | None:
            act()
            return 7 if one.tokens == tokens else None

        return PassJob(self._requests[request], position, tokens, prefill, forward, lambda one: None)

    def later(self, *args: Any, **named: Any) -> Later:
        job = self.job(*args, **named)
        return Later(lambda: self.steps.run(job))

    def ready(self, count: int) -> None:
        """Until so many passes wait for a step."""
        pause = threading.Event()
        for _ in range(int(WAIT_S * 1000)):
            if len(self.steps._ready) == count:
                return
            pause.wait(0.001)
        raise AssertionError(f"{len(self.steps._ready)} and not {count} wait")

    def open(self, *requests: int) -> None:
        for number in requests:
            self._requests[number], self._parts[number] = made_up(number), ExitStack()
            self._parts[number].enter_context(self.steps.taking_part(self._requests[number]))

    def close(self, request: int) -> None:
        self._parts[request].close()

    def sizes(self) -> list[list[tuple[int, int]]]:
        """The steps so far: (request, tokens) of each pass."""
        return [[(one.request, one.tokens) for one in step] for step in self.engine.steps]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for all requests of the one before it, however long they take."""
    monkeypatch.setattr("main_node.steps.GRACE_SHARE", 1e6)
    monkeypatch.setattr("main_node.steps.GRACE_S", WAIT_S)


@pytest.fixture
def held() -> Iterator[Any]:
    """A pass that is under way until `held.set()`; `held.begun` is set when it has begun."""

    class Held(threading.Event):
        def __init__(self) -> None:
            super().__init__()
            self.begun = threading.Event()

        def __call__(self) -> None:
            self.begun.set()
            assert self.wait(WAIT_S)

    made = Held()
    yield made
    made.set()


def test_a_lone_request_runs_on_its_own_thread_in_one_pass() -> None:
    bench, threads = Bench(chunk=4), []
    bench.open(1)
    assert bench.steps.run(bench.job(1, lambda: threads.append(threading.current_thread()), 20, 0, prefill=True)) == 7
    assert threads == [threading.current_thread()]
    assert bench.sizes() == [[(1, 20)]]
    assert bench.steps._thread is None


def test_requests_go_on_in_lock_step(patient: None, held: Any) -> None:
    """Every step after the first has all of them, in the order of their numbers, on one thread."""
    bench, threads, rounds = Bench(), set(), 30
    bench.open(1, 2, 3)

    def run(request: int) -> None:
        for _ in range(rounds):
            bench.steps.run(bench.job(request, lambda: threads.add(threading.current_thread().name)))
        bench.close(request)

    def run_third() -> None:
        bench.steps.run(bench.job(3, held))
        run(3)

    third = Later(run_third)
    assert held.begun.wait(WAIT_S)
    others = [Later(lambda request=request: run(request)) for request in (2, 1)]
    bench.ready(2)
    held.set()
    for one in (third, *others):
        one.result()
    assert bench.sizes() == [[(3, 1)], *[[(1, 1), (2, 1), (3, 1)]] * rounds]
    assert threads == {"odmoe-steps"}
    pause = threading.Event()
    while not bench.steps.idle():  # a pass has its outcome a moment before the step has ended
        pause.wait(0.001)


def test_a_step_does_not_wait_for_a_slow_client(held: Any) -> None:
    """Request 3 takes part once and is not back: the others go on without it."""
    bench = Bench()
    bench.open(1, 2, 3)
    first = bench.later(1, held)
    assert held.begun.wait(WAIT_S)
    others = [bench.later(request) for request in (2, 3)]
    bench.ready(2)
    held.set()
    for one in (first, *others):
        one.result()
    for _ in range(5):
        for one in [bench.later(request) for request in (1, 2)]:
            one.result()
    assert sum(len(step) for step in bench.sizes()) == 3 + 10


def test_a_failure_is_that_of_its_request_alone(held: Any) -> None:
    bench = Bench()
    bench.open(1, 2, 3, 4)

    def fail() -> None:
        raise KeyError("its own")

    first = bench.later(1, held)
    assert held.begun.wait(WAIT_S)
    second, third, fourth = bench.later(2), bench.later(3, fail), bench.later(4)
    bench.ready(3)
    held.set()
    assert [one.result() for one in (first, second, fourth)] == [7, 7, 7]
    with pytest.raises(KeyError, match="its own"):
        third.result()
    assert bench.sizes() == [[(1, 1)], [(2, 1), (3, 1), (4, 1)]]


# --- waits that end otherwise ----------------------------------------------------------------------------------------


def test_time_in_which_workers_were_missing_does_not_count(held: Any) -> None:
    bench = Bench(deadline_s=0.05)
    bench.open(1, 2)
    first = bench.later(1, held)
    assert held.begun.wait(WAIT_S)
    second = bench.later(2)
    bench.ready(1)
    bench.engine.deadlines.waited_s = WAIT_S
    pause = threading.Event()
    pause.wait(0.2)
    held.set()
    assert (first.result(), second.result()) == (7, 7)


def test_a_wait_for_a_step_has_an_end(held: Any) -> None:
    bench = Bench(deadline_s=0.05)
    bench.open(1, 2)
    first = bench.later(1, held)
    assert held.begun.wait(WAIT_S)
    with pytest.raises(DeadlineError, match=r"request 2 waited 0\.05 s for a step"):
        bench.later(2).result()
    held.set()
    first.result()
    bench.open(3)
    assert bench.later(3).result() == 7


def test_a_request_that_is_closed_waits_no_longer(held: Any) -> None:
    bench = Bench()
    bench.open(1, 2)
    first = bench.later(1, held)
    assert held.begun.wait(WAIT_S)
    second = bench.later(2)
    bench.ready(1)
    bench.close(2)
    with pytest.raises(RequestFailedError, match="request 2 was closed"):
        second.result()
    held.set()
    first.result()
    bench.close(1)
    assert bench.sizes() == [[(1, 1)]]


@pytest.mark.parametrize("under_way", [False, True])
def test_an_interrupted_request_leaves(under_way: bool, held: Any) -> None:
    """Ctrl-C while it waits for its step, or for its pass: then the pass is given up, and ends before it goes on."""
    bench = Bench()
    bench.open(1, 2, 3)
    first = bench.later(1, held)
    assert held.begun.wait(WAIT_S)
    job, begun, go_on = bench.job(2, lambda: (begun.set(), go_on.wait(WAIT_S))), threading.Event(), threading.Event()
    wait = job.ended.wait

    def interrupted(timeout: float | None = None) -> bool:
        if under_way:
            held.set()
            assert begun.wait(WAIT_S)
        job.ended.wait = wait  # type: ignore[method-assign]
        threading.Timer(0.02, go_on.set).start()
        raise KeyboardInterrupt

    job.ended.wait = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        bench.steps.run(job)
    assert bench.engine.closed == ([2] if under_way else [])
    assert job.ended.is_set() or not under_way
    held.set()
    first.result()
    assert bench.later(3).result() == 7


def test_the_thread_ends_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("main_node.steps.IDLE_S", 0.01)
    bench = Bench()
    bench.open(1, 2)
    for _ in range(3):
        assert bench.later(1).result() == 7
        thread = bench.steps._thread
        if thread is not None:
            thread.join(WAIT_S)
            assert not thread.is_alive()


# --- prompts in chunks ------------------------------------------------------------------------------------------------


def read(bench: Bench, request: int, prompt: int) -> None:
    """Read a prompt, as the token loop does."""
    position = 0
    while position < prompt:
        job = bench.job(request, tokens=prompt - position, position=position, prefill=True)
        bench.steps.run(job)
        position += job.one.tokens


@settings(deadline=None, max_examples=12)
@given(prompts=st.lists(st.integers(1, 40), min_size=1, max_size=4), chunk=st.integers(1, 16))
def test_between_two_tokens_of_a_request_at_most_a_chunk_is_read(prompts: list[int], chunk: int) -> None:
    bench, rest = Bench(chunk=chunk), list(range(2, 2 + len(prompts)))
    bench.open(1, *rest)
    reading = [Later(lambda at=at: read(bench, at[0], at[1])) for at in zip(rest, prompts, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("main_node.steps.GRACE_SHARE", 1e6)  # the next chunk is there when the next step begins
        bench.steps.run(bench.job(1))
        while any(one._thread.is_alive() for one in reading):
            bench.steps.run(bench.job(1))
    for one in reading:
        one.result()
    begun = next(n for n, step in enumerate(bench.engine.steps) if any(one.request == 1 for one in step))
    for step in bench.engine.steps[begun:]:
        assert sum(one.tokens for one in step if one.prefill) <= chunk
    for request, prompt in zip(rest, prompts, strict=True):
        passes = [one for step in bench.engine.steps for one in step if one.request == request]
        assert sum(one.tokens for one in passes) == prompt
        assert [one.position for one in passes] == [sum(p.tokens for p in passes[:n]) for n in range(len(passes))]
        if prompt <= chunk:
            assert len(passes) == 1, "a short prompt is read whole"
