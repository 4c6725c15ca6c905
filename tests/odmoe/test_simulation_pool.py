"""Simulations in processes of a pool: the same figures, and no process that stays."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from odmoe import simulation_pool
from scheduler.planning.plan import make_plan
from scheduler.planning.scaling import Hardware, Policy, Run, Setup
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
    with pytest.raises(BrokenProcessPool), simulation_pool.simulation_pool() as each:
        list(each(killed, [Run(SETUP, 1, 1)]))
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(("cores", "threads"), [({0}, 1), ({0, 1}, 2)])
def test_one_core_or_other_threads_need_no_processes(
    cores: set[int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    with simulation_pool.simulation_pool() as each:
        assert list(each(process_of, [Run(SETUP, 1, 1)])) == [float(os.getpid())]
