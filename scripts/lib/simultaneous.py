"""Several prompts answered at once by a real cluster, each asked by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Any

STARTED_S = 30.0


@dataclass(frozen=True, slots=True)
class Timed:
    """An answer among others. `ends_s`: the time of each token, in seconds from the moment at which all were asked."""

    ends_s: list[float]
    last: Any
    """Its last step, which has the report."""
    first: Any
    """What the caller noted at its first token."""


def timed_together(
    cluster: Any, prompts: list[list[int]], tokens: int, note: Callable[[Any], Any] = lambda answered: None
) -> list[Timed]:
    """End of sequence is ignored. `note`: called with an answer's steps when its first token is there."""
    ready = threading.Barrier(len(prompts) + 1)

    def answer(prompt: list[int]) -> Timed:
        answered = cluster.generate(prompt, tokens, ignore_eos=True)
        ready.wait(STARTED_S)
        ends: list[float] = []
        last = first = None
        for last in answered:
            if last.token_id is not None:
                ends.append(time.perf_counter())
                first = note(answered) if len(ends) == 1 else first
        return Timed(ends, last, first)

    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(answer, prompt) for prompt in prompts]
        ready.wait(STARTED_S)
        began = time.perf_counter()
        found = [one.result() for one in asked]
    return [Timed([end - began for end in one.ends_s], one.last, one.first) for one in found]


def answered_together(cluster: Any, prompts: list[list[int]], tokens: int) -> list[list[float]]:
    """The time of each token of each answer, in seconds from the moment at which all were asked. End of sequence is
    ignored."""
    return [one.ends_s for one in timed_together(cluster, prompts, tokens)]


@dataclass(frozen=True, slots=True)
class AnsweredTogether:
    """Several answers at once. `cpu_s`: the processor's seconds from the last first token on."""

    answers: list[Timed]
    prefill_bytes: int
    cpu_s: float

    def figures(self) -> dict[str, Any]:
        """As those of a single answer in `bench.py`, of all together. `tpot_s`: the time of a pass, in which each
        request gets a token; `token_s`: that over the requests. Both are of the time in which all decode. Raises
        SystemExit if there is none."""
        reports = [one.last.report for one in self.answers]
        begins = max(one.ends_s[0] for one in self.answers)
        ends = min(one.ends_s[-1] for one in self.answers)
        shared = sum(begins < end <= ends for one in self.answers for end in one.ends_s)
        if not shared:
            raise SystemExit("one answer had ended before another began; give more --tokens, or a smaller --batch")
        after = sum(begins < end for one in self.answers for end in one.ends_s)
        token_s = (ends - begins) / shared
        return {
            **figures_of(reports, self.prefill_bytes),
            "tpot_s": token_s * len(reports),
            "token_s": token_s,
            "requests_per_step": min(report.requests_per_step for report in reports),
            "cpu_s_a_token": self.cpu_s / after,
        }


def figures_of(reports: Sequence[Any], prefill_bytes: int) -> dict[str, Any]:
    """What a cell keeps of answers that were given together, or of one. Rates are None if there was nothing to count.
    `prefill_bytes`: that had been loaded when the first tokens were there."""
    count = sum(report.new_tokens - 1 for report in reports)
    named = sum(report.named for report in reports)
    loaded = sum(report.bytes_loaded for report in reports)
    return {
        "token_ids": [token for report in reports for token in report.token_ids],
        "ttft_s": fmean(report.ttft_s for report in reports),
        "hit_rate": sum(report.hits for report in reports) / named if named else None,
        "named": named,
        "recall": _mean(report.recall for report in reports),
        "recall_in_time": _mean(report.recall_in_time for report in reports),
        "loads_a_token": sum(report.loads - report.prefill_loads for report in reports) / count,
        "bytes_a_token": (loaded - prefill_bytes) / count,
        "prefill_bytes": prefill_bytes,
        "unused_loads": sum(report.unused_loads for report in reports),
        "stall_s_a_token": sum(report.stall_s for report in reports) / count,
        "device_bytes": max(sum(report.memory_bytes["workers"]) for report in reports),
        "shadow_bytes": max(report.memory_bytes["shadow"] for report in reports),
        "total_bytes": max(sum(report.memory_shares.values()) for report in reports),
        "resident_max": max(sum(report.resident_experts_max) for report in reports),
        "host_computed": sum(report.host_computed for report in reports),
        "exact": all(report.exact for report in reports),
        "emulated": reports[0].emulated,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    """None if one is."""
    found = list(values)
    known = [value for value in found if value is not None]
    return fmean(known) if len(known) == len(found) else None


def ask_together(cluster: Any, prompts: list[list[int]], tokens: int) -> AnsweredTogether:
    """Answers at once of a cluster in this process; end of sequence is not heeded."""
    stats = cluster.main.engine.core.stats
    answers = timed_together(
        cluster, prompts, tokens, lambda answered: (stats[answered.number].bytes_loaded, time.process_time())
    )
    cpu_s = time.process_time() - max(seconds for _, seconds in (one.first for one in answers))
    return AnsweredTogether(answers, sum(loaded for loaded, _ in (one.first for one in answers)), cpu_s)
