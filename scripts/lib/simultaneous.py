"""Several prompts answered at once by a real cluster, each asked by a thread of its own."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

STARTED_S = 30.0


def answered_together(cluster: Any, prompts: list[list[int]], tokens: int) -> list[list[float]]:
    """The time of each token of each answer, in seconds from the moment at which all were asked. End of sequence is
    ignored."""
    ready = threading.Barrier(len(prompts) + 1)

    def answer(prompt: list[int]) -> list[float]:
        answered = cluster.generate(prompt, tokens, ignore_eos=True)
        ready.wait(STARTED_S)
        *steps, last = [(time.perf_counter(), step.report) for step in answered]
        times = [when for when, _ in steps]
        # With the last token comes the report, after the last predictions.
        return [*times, times[0] + last[1].decode_s] if times else [last[0]]

    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(answer, prompt) for prompt in prompts]
        ready.wait(STARTED_S)
        began = time.perf_counter()
        return [[end - began for end in one.result()] for one in asked]
