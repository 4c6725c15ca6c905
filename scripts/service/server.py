"""An `odmoe serve` in a process of its own, as the script sees it from outside."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families

from scripts.lib.paths import DEMO, ROOT

START_S = 300.0
END_S = 60.0
SCRAPE_S = 20.0
_SERVING = re.compile(r"serving .* at (http://\S+)/v1")


class ServerFailed(Exception):
    """The server did not start, or has ended. The message has its last lines."""


class ServerProcess:
    """Starts `odmoe serve` on any free port and waits until it listens. `flags`: beside model and address."""

    def __init__(self, *flags: str, model: Path = DEMO) -> None:
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115  closed with the process
        command = [sys.executable, "-m", "odmoe", "serve", "-m", str(model), "--bind", "127.0.0.1:0", *flags]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self.url = self._wait_until_it_serves()
        except BaseException:
            self.close()
            raise
        self._client = httpx2.Client(base_url=self.url, timeout=SCRAPE_S)

    def _wait_until_it_serves(self) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            if found := _SERVING.search(self.log()):
                return found.group(1)
            time.sleep(0.05)
        raise ServerFailed(f"the server did not start: {self.log()[-2000:]}")

    def log(self) -> str:
        """What it has printed."""
        return Path(self._log.name).read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self._process.pid

    def family(self) -> list[psutil.Process]:
        """It and every process that it has started."""
        top = psutil.Process(self.pid)
        return [top, *top.children(recursive=True)]

    def node_processes(self, role: str) -> list[psutil.Process]:
        """Processes of a local cluster's nodes, by what Ray calls their actors: `Main`, or `NodeActor` for a worker or
        the shadow. Raises ServerFailed where there is none."""
        titles = {one.pid: " ".join(one.cmdline())[:60].strip() for one in self.family()}
        found = [pid for pid, title in titles.items() if title.startswith(f"ray::{role}")]
        if not found:
            raise ServerFailed(f"the server has no process ray::{role}; it has {sorted(titles.values())}")
        return [psutil.Process(pid) for pid in found]

    def resident_bytes(self) -> int:
        return sum(one.memory_info().rss for one in self.family())

    def cpu_s(self) -> float:
        """Processor time of it alone so far."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def threads(self) -> int:
        """Those that stay: a scrape has one of its own for a moment."""
        counts = []
        for _ in range(5):
            counts.append(psutil.Process(self.pid).num_threads())
            time.sleep(0.02)
        return min(counts)

    def metrics(self) -> dict[str, float]:
        """Sums over labels, but for the phase of loads. Raises httpx2.HTTPError."""
        answer = self._client.get("/metrics")
        answer.raise_for_status()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def open_requests(self) -> tuple[float, float, float]:
        """Requests that wait, that are answered, and those that the main node has, where there is one."""
        found = self.metrics()
        return found["odmoe_answers_waiting"], found["odmoe_answers_under_way"], found.get("odmoe_main_requests", 0.0)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self, limit_s: float = END_S) -> int | None:
        """The exit code; None: it has not ended within `limit_s`."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """End it, by force where it does not end by itself."""
        if self._process.poll() is None:
            self.terminate()
            self.terminate()
            if self.wait() is None:
                for one in self.family():
                    one.kill()
                self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self.close()


class MemoryWatch:
    """Resident memory of a server, every `period_s`."""

    def __init__(self, server: ServerProcess, period_s: float = 1.0) -> None:
        self._server, self._period_s = server, period_s
        self.samples: list[tuple[float, int]] = []
        """(seconds since the beginning, bytes)."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def _watch(self) -> None:
        began = time.monotonic()
        while True:
            try:
                self.samples.append((time.monotonic() - began, self._server.resident_bytes()))
            except psutil.NoSuchProcess:
                return
            if self._ended.wait(self._period_s):
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def facts(self) -> dict[str, Any]:
        """Bytes: at first, at most, at last; and growth a minute by least squares, without the first quarter."""
        later = self.samples[len(self.samples) // 4 :]
        return {
            "rss_first": self.samples[0][1],
            "rss_most": max(size for _, size in self.samples),
            "rss_last": self.samples[-1][1],
            "rss_growth_a_minute": 60.0 * slope(later),
        }


def slope(points: list[tuple[float, int]]) -> float:
    """By least squares; 0 of fewer than two points."""
    if len(points) < 2:
        return 0.0
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((a - x) ** 2 for a, _ in points)
    return sum((a - x) * (b - y) for a, b in points) / spread if spread else 0.0
