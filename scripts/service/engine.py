"""The engine alone in a process of its own: its own answers, and the time that they take without a service. Asked over
its standard input, a JSON line a turn."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Self

import psutil

from scripts.lib.paths import DEMO, ROOT
from scripts.service.clients import Question

TURN_S = 900.0
THREADS = 256
"""Most questions at once."""


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

    def answers(self, questions: Iterable[Question]) -> dict[Question, str]:
        """What it answers to each question, one after the other. Raises RuntimeError."""
        asked = list(dict.fromkeys(questions))
        found = [self._turn([question])["texts"][0] for question in asked]
        return dict(zip(asked, found, strict=True))

    def turn(self, questions: list[Question]) -> tuple[float, float]:
        """Answer all at once: seconds from the first question to the last token, and processor seconds."""
        before = self._cpu_s()
        found = self._turn(questions)
        return found["seconds"], self._cpu_s() - before

    def _turn(self, questions: list[Question]) -> dict[str, Any]:
        assert self._process.stdin is not None
        asked = [{**asdict(one), "options": one.options} for one in questions]
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._hear()

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
    with odmoe.load(settings.pop("model"), **settings) as model, ThreadPoolExecutor(THREADS) as pool:

        def answer(asked: dict[str, Any]) -> tuple[str, float]:
            stream = model.stream(asked["prompt"], max_new_tokens=asked["tokens"], ignore_eos=True, **asked["options"])
            texts = [str(chunk) for chunk in stream]
            ended = time.perf_counter()
            if len(texts) != asked["tokens"]:
                raise RuntimeError(f"the engine gave {len(texts)} of {asked['tokens']} tokens")
            return "".join(texts), ended

        print("{}", flush=True)
        for line in sys.stdin:
            began = time.perf_counter()
            answers = list(pool.map(answer, json.loads(line)))
            seconds = max(ended for _, ended in answers) - began
            print(json.dumps({"seconds": seconds, "texts": [text for text, _ in answers]}), flush=True)


if __name__ == "__main__":
    run()
