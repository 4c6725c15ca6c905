"""Threads that restore parts of a weight."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from checkpoint.native import threads


def test_an_error_is_raised_when_all_jobs_have_ended() -> None:
    """They write into memory that the caller may use again."""
    begun, ended = threading.Event(), threading.Event()

    def fail() -> None:
        assert begun.wait(10)
        raise ValueError("of the first job")

    def last() -> None:
        begun.set()
        time.sleep(0.2)
        ended.set()

    with pytest.raises(ValueError, match="of the first job"):
        threads.together([fail, last])
    assert ended.is_set()


def test_fewer_jobs_run_on_threads_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start of threads changes torch's number of threads for a moment, also for others."""
    monkeypatch.setattr(threads, "_pools", {})
    threads.start_threads(3)
    seen: set[str] = set()
    for count in (1, 2, 3):
        threads.together([lambda: seen.add(threading.current_thread().name)] * count)
    assert list(threads._pools) == [3]
    assert all(name.startswith("odmoe-restore") for name in seen)
    for pool in threads._pools.values():
        pool.shutdown()


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others end, torch has its number of threads, and the next call begins anew."""
    monkeypatch.setattr(threads, "_pools", {})
    monkeypatch.setattr(threads, "START_S", 30.0)
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    before = torch.get_num_threads()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.start_threads(3)
        assert time.monotonic() - begun < 20.0, "those that have started wait for the others"
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()
    assert torch.get_num_threads() == before
    assert not threads._pools
    threads.start_threads(3)
    for pool in threads._pools.values():
        pool.shutdown()


def test_each_has_one_thread_of_torch() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found: list[int] = []
        threads.together([lambda: found.append(torch.get_num_threads())] * 2)
        assert found == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
