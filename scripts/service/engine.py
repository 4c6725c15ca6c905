"""The engine alone in a process of its own, for the cost of what a service adds to it. Asked over its standard input, a
JSON line a turn."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from scripts.lib.paths import DEMO, ROOT

TURN_S = 600.0


class EngineAlone:
    """The same cluster as the server's, without the service. `settings`: arguments of `odmoe.load`."""

    def __init__(self, **settings: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.service.engine", json.dumps({"model": str(DEMO), **settings})],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._hear()

    def turn(self, prompts: list[str], tokens: int) -> tuple[float, float, int]:
        """Answer all prompts at once: seconds from the first to the last token of all, processor seconds, tokens."""
        assert self._process.stdin is not None
        before = self._cpu_s()
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        found = self._hear()
        return found["seconds"], self._cpu_s() - before, found["tokens"]

    def _cpu_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def _hear(self) -> dict[str, Any]:
        """Raises RuntimeError where the process is silent or gone."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(TURN_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise RuntimeError("the engine's process has ended, or took too long")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run() -> None:
    """In the process."""
    import odmoe

    settings = json.loads(sys.argv[1])
    with odmoe.load(settings.pop("model"), **settings) as model, ThreadPoolExecutor(64) as pool:
        print("{}", flush=True)
        for line in sys.stdin:
            asked = json.loads(line)

            def answer(prompt: str, tokens: int = asked["tokens"]) -> list[float]:
                stream = model.stream(prompt, max_new_tokens=tokens, ignore_eos=True)
                return [time.perf_counter() for _ in stream]

            began = time.perf_counter()
            times = list(pool.map(answer, asked["prompts"]))
            ended = max(max(one) for one in times)
            print(json.dumps({"seconds": ended - began, "tokens": sum(map(len, times))}), flush=True)


if __name__ == "__main__":
    run()
