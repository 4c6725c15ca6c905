"""Several prompts answered at once by a real cluster, each asked by a thread of its own."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from odmoe.commands.comparison import Answer

STARTED_S = 30.0


def answered_together(cluster: Any, prompts: list[list[int]], tokens: int) -> list[list[float]]:
    """The time of each token of each answer, in seconds from the moment at which all were asked. End of sequence is
    ignored."""
    ready = threading.Barrier(len(prompts) + 1)

    def answer(prompt: list[int]) -> list[float]:
        answered = cluster.generate(prompt, tokens, ignore_eos=True)
        ready.wait(STARTED_S)
        return [time.perf_counter() for step in answered if step.token_id is not None]

    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(answer, prompt) for prompt in prompts]
        ready.wait(STARTED_S)
        began = time.perf_counter()
        return [[end - began for end in one.result()] for one in asked]


def compared_together(cluster: Any, prompts: list[list[int]], tokens: int) -> list[tuple[Answer, Any]]:
    """Each greedy answer with its logits, and its report. For an embedded cluster: logits stay on the main node."""
    main = cluster.main
    answers = [main.generate(prompt, tokens, ignore_eos=True) for prompt in prompts]
    logits: dict[int, list[Any]] = {one.number: [] for one in answers}
    main.on_logits = lambda number, values: logits[number].append(values)

    def read(one: Any) -> Any:
        *_, last = one
        return last.report

    with ThreadPoolExecutor(len(prompts)) as pool:
        reports = list(pool.map(read, answers))
    return [(Answer(list(r.token_ids), logits[a.number]), r) for a, r in zip(answers, reports, strict=True)]
