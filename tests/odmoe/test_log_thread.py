"""Lines that are written in a thread, also where nobody reads them."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from odmoe.log_thread import LogThread

WAIT_S = 30.0


@contextlib.contextmanager
def pipe() -> Iterator[io.TextIOWrapper]:
    """The reading end of standard error."""
    reading, writing = os.pipe()
    closing = contextlib.suppress(BrokenPipeError)
    with open(reading) as read, closing, open(writing, "w") as written, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", written)
        yield read


@pytest.mark.timeout(60)
def test_a_pipe_that_nobody_reads_blocks_nobody() -> None:
    lines = [f"{number} {'x' * 8_000}" for number in range(50)]  # a pipe takes 64 KiB
    with pipe() as read, LogThread() as log:
        for line in lines:
            log.line(line)
        assert [read.readline().rstrip("\n") for _ in lines] == lines


def test_lines_over_the_limit_are_lost_and_counted() -> None:
    begun, go_on = threading.Event(), threading.Event()
    written: list[str] = []

    def write(text: str) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        written.append(text)

    err = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, LogThread(places=3) as log:
        patch.setattr(sys, "stderr", err)
        log.line("a", write)
        assert begun.wait(WAIT_S)
        for text in "bcdefg":  # three have a place
            log.line(text, write)
        go_on.set()
        while len(written) < 4:
            threading.Event().wait(0.01)
        log.line("h", write)
    assert written == ["a", "b", "c", "d", "h"]
    assert err.getvalue() == "3 lines are lost: standard error is not read, or on a full disk\n"


def test_a_reader_that_has_gone_ends_nothing_else() -> None:
    with pipe() as read:
        read.close()
        with LogThread() as log:
            for _ in range(5):
                log.line("nobody reads this")


def test_at_the_end_all_lines_have_been_written() -> None:
    written: list[str] = []
    with LogThread() as log:
        for number in range(1000):
            log.line(str(number), written.append)
    assert written == [str(number) for number in range(1000)]


@pytest.mark.timeout(60)
def test_a_disk_that_is_full_for_a_while(small_disk: Path) -> None:
    """Standard error is a file there. Lines come again once there is room."""
    file, other = small_disk / "log", small_disk / "other"
    with file.open("w") as err, pytest.MonkeyPatch.context() as patch, LogThread() as log:
        patch.setattr(sys, "stderr", err)
        log.line("before")
        while "before" not in file.read_text():
            threading.Event().wait(0.01)
        other.write_bytes(b"x" * 4096)
        for _ in range(3):
            log.line("y" * 5_000)
        while log._lost < 3:
            threading.Event().wait(0.01)
        other.unlink()
        file.write_text("")
        while "after" not in file.read_text():
            log.line("after")
            threading.Event().wait(0.05)
    assert "lines are lost: standard error is not read, or on a full disk" in file.read_text()
