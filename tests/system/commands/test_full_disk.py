"""A disk that is full while the service runs: its log and its KV caches are on it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.machines.processes import wait_until
from support.machines.served_process import SERVED_SMALL, client_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
PROMPT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. " * 3


def test_answers_go_on_and_the_log_comes_back(demo: Path, small_disk: Path) -> None:
    log, filler = small_disk / "log", small_disk / "filler"
    flags = ("--kv-disk", str(small_disk / "kv"), "--kv-memory", "1MiB")
    command = [sys.executable, "-m", "odmoe", "serve", "-m", str(demo), *SERVED_SMALL, *flags]
    with log.open("wb") as err, subprocess.Popen(command, stderr=err, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: b"serving demo-moe at" in log.read_bytes() or process.poll() is not None)
            found = re.search(r"serving demo-moe at (\S+)", log.read_text())
            assert found is not None, log.read_text()
            client = client_of(found[1])

            def answer() -> str:
                return (
                    client.completions.create(model="demo-moe", prompt=PROMPT, max_tokens=8, temperature=0)
                    .choices[0]
                    .text
                )

            first = answer()
            filler.write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096))
            lines = log.read_text().count("/v1/completions")
            for _ in range(80):  # more lines than the log's last page takes
                assert answer() == first
            assert os.statvfs(small_disk).f_bavail == 0
            filler.unlink()
            wait_until(lambda: answer() == first and "lines are lost" in log.read_text())
            assert log.read_text().count("/v1/completions") > lines
            assert not list((small_disk / "kv").glob("*.part"))
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
