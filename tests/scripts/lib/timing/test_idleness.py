"""What others use of the processor, and what this process uses itself."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import namedtuple

import psutil
import pytest

from scripts.lib.timing import idleness
from scripts.lib.timing.idleness import Others, mark

Times = namedtuple("Times", "user nice system irq softirq steal idle")


def test_own_work_is_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three cores' seconds in a second, this process used one."""
    whole = iter([Times(10, 0, 0, 0, 0, 0, 0), Times(11.5, 0.5, 0.5, 0.1, 0.1, 0.3, 9)])
    own, clock = iter([5.0, 6.0]), iter([100.0, 101.0])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(whole))
    monkeypatch.setattr(idleness, "_own_s", lambda: next(own))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with Others() as others:
        pass
    assert others.cores == pytest.approx(2.0)


@pytest.mark.slow
def test_a_busy_process_beside_this_one_is_seen() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        with Others() as others:
            time.sleep(1.0)
    finally:
        busy.kill()
        busy.wait()
    assert others.cores > idleness.BUSY
    assert mark(others.cores) == "*"


def test_marks() -> None:
    assert (mark(0.05), mark(None), mark(0.2)) == ("", "", "*")
