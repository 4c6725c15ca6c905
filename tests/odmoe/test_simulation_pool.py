"""Simulations in processes of a pool: the same figures, and no process that stays."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from odmoe import simulation_pool
from scheduler.errors import SimulationError
from scheduler.planning.plan import make_plan
from scheduler.planning.scaling import Each, Hardware, Policy, Run, Setup
from scheduler.timing.profile import find_profile
from scheduler.types import ModelSize

MODEL = ModelSize(
    "small", "bfloat16", 2, 4, 4, 8, 2, 512, 512 * 512 * 3, 4 * 8 * 512 * 512 * 3, *[10**7] * 5, 4096, 4096
)
SETUP = Setup(MODEL, Hardware(find_profile("rtx3090-1gbe"), 8), Policy())


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def process_of(run: Run) -> float:
    return float(os.getpid())


def killed(run: Run) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def terminated(run: Run) -> float:
    """As by `kill` of the whole group. The first simulation has ended before."""
    if run.group_size > 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
    return 0.0


@pytest.mark.usefixtures("short_plans", "few_visits")
def test_a_plan_is_the_same() -> None:
    with simulation_pool.simulation_pool() as each:
        assert make_plan(SETUP, each=each) == make_plan(SETUP)


def test_other_processes_simulate_and_end() -> None:
    with simulation_pool.simulation_pool() as each:
        found = set(each(process_of, [Run(SETUP, 1, 1)] * 8))
        assert found <= {float(child.pid or 0) for child in multiprocessing.active_children()}
    assert not multiprocessing.active_children()


def test_a_process_that_is_killed_ends_the_plan() -> None:
    began = time.monotonic()
    with pytest.raises(SimulationError, match="too little free memory"), simulation_pool.simulation_pool() as each:
        list(each(killed, [Run(SETUP, 1, 1)]))
    assert time.monotonic() - began < 60


def test_an_interrupt_whose_signal_ends_the_processes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool's thread, which fails what they were doing, has nothing to say."""
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    def interrupted(each: Each) -> None:
        results = each(terminated, [Run(SETUP, number, 1) for number in range(1, 21)])
        next(results)
        del results
        end = time.monotonic() + 60
        while multiprocessing.active_children():
            assert time.monotonic() < end
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), simulation_pool.simulation_pool() as each:
        interrupted(each)
    assert not raised


@pytest.mark.parametrize(("cores", "threads"), [({0}, 1), ({0, 1}, 2)])
def test_one_core_or_other_threads_need_no_processes(
    cores: set[int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    with simulation_pool.simulation_pool() as each:
        assert list(each(process_of, [Run(SETUP, 1, 1)])) == [float(os.getpid())]


@pytest.mark.parametrize("where", ["__init__", "submit"])
@pytest.mark.parametrize(
    "error", [PermissionError(13, "/dev/shm"), ImportError("sem_open"), NotImplementedError("max")]
)
def test_a_machine_that_makes_no_pool_simulates_in_this_process(
    where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: object, **named: object) -> None:
        raise error

    monkeypatch.setattr(ProcessPoolExecutor, where, refused)
    with simulation_pool.simulation_pool() as each:
        assert list(each(process_of, [Run(SETUP, 1, 1)])) == [float(os.getpid())]
    assert not multiprocessing.active_children()


def test_a_machine_that_forks_one_process_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is left that waits for work, and with it the end of this process."""
    process = multiprocessing.get_context("fork").Process
    start, begun = process.start, []

    def only_one(self: multiprocessing.Process) -> None:
        if begun:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        begun.append(self)
        start(self)

    monkeypatch.setattr(process, "start", only_one)
    with simulation_pool.simulation_pool() as each:
        assert list(each(process_of, [Run(SETUP, 1, 1)])) == [float(os.getpid())]
    assert begun
    assert not multiprocessing.active_children()
