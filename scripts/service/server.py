"""An `odmoe serve` in a process of its own, as the script sees it from outside."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families

from scripts.lib.paths import DEMO, ROOT

START_S = 900.0
END_S = 60.0
SCRAPE_S = 20.0
_SERVING = re.compile(r"serving .* at (http://\S+)/v1")


class ServerFailed(Exception):
    """The server did not start, or has ended. The message has its last lines."""


class ServerProcess:
    """Starts `odmoe serve` on any free port and waits until it listens. `flags`: beside model and address. `record`: a
    file for the record of each request's loads, see `scripts.service.recorded`."""

    def __init__(self, *flags: str, model: Path = DEMO, record: Path | None = None) -> None:
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115  closed with the process
        program = ["odmoe"] if record is None else ["scripts.service.recorded", str(record)]
        command = [sys.executable, "-m", *program, "serve", "-m", str(model), "--bind", "127.0.0.1:0", *flags]
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

    def resident_bytes(self) -> int | None:
        """Of it and its children; None once it has ended."""
        return resident_bytes(self.pid)

    def cpu_s(self) -> float:
        """Processor time of it alone so far."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def threads(self) -> int:
        return int(psutil.Process(self.pid).num_threads())

    def files(self) -> int:
        """Open files, connections included."""
        return int(psutil.Process(self.pid).num_fds())

    def metrics(self) -> dict[str, float]:
        """Sums over labels, but for the phase of loads. Raises httpx2.HTTPError."""
        answer = self._client.get("/metrics")
        answer.raise_for_status()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def ready(self) -> bool:
        """What /ready says."""
        try:
            return self._client.get("/ready").status_code == 200
        except httpx2.HTTPError:
            return False

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


def resident_bytes(pid: int) -> int | None:
    """Of a process and its children, some of which may just be ending; None once it has ended itself."""
    try:
        top = psutil.Process(pid)
        size = top.memory_info().rss
        children = top.children(recursive=True)
        ended = top.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    for one in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            size += one.memory_info().rss
    return None if ended else int(size)
