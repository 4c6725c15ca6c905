"""Kill -9 of workers, and now and then of the shadow, at random points of answers, on a `local` cluster.

.venv/bin/python -m scripts.testbed.kills              # ten kills, a table
.venv/bin/python -m scripts.testbed.kills --json       # the same as one JSON object

Each answer is compared with Transformers' own (`eager`). A killed node counts as back and used when a later answer's
report says so: nobody is missing, every worker has loaded an expert since its process began, the shadow predicts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import threading
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from odmoe.clusters.process import prepare_libraries
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from odmoe.stores import prepare_store
from scheduler.errors import ODMoEError
from scripts.lib.flags import script_parser
from scripts.lib.paths import DEMO
from scripts.lib.prompts import gsm8k_prompts
from scripts.lib.provenance import command, header, machine, save_rows
from scripts.lib.tables import Column, text_table

BACK_S = 300.0
POLL_S = 0.25
SHORT = 8
"""Tokens of the answers that ask whether a node is back."""
COLUMNS = (
    Column("killed", "killed"),
    Column("after token", "after_token", "d"),
    Column("outcome", lambda row: outcome(row)),
    Column("longest pause s", "longest_gap_s", ".2f"),
    Column("undisturbed s", "longest_gap_calm_s", ".2f"),
    Column("median pause s", "median_gap_calm_s", ".3f"),
    Column("answer s", "answer_s", ".1f"),
    Column("undisturbed s", "answer_calm_s", ".1f"),
    Column("in use again after s", "back_and_used_s", ".1f"),
)


def outcome(row: dict[str, Any]) -> str:
    return row["error"] or ("tokens equal" if row["tokens_equal"] else "TOKENS DIFFER")


def greedy(model_dir: str, texts: list[str], count: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, tokens) of Transformers' own `generate`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, experts_implementation="eager")
    answers = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=1)
        prompt = inputs["input_ids"][0].tolist()
        answers.append((prompt, out[0, len(prompt) :].tolist()))
    return answers


class Disturbed:
    """One answer in whose middle a process is killed: `after` tokens and `delay_s` seconds."""

    def __init__(self, cluster: Any, pid: int | None, after: int = 0, delay_s: float = 0.0) -> None:
        self.tokens: list[int] = []
        self.gaps: list[float] = []
        self.error: str | None = None
        self.report: Any = None
        self.killed_at = 0.0
        self._cluster, self._pid, self._after, self._delay_s = cluster, pid, after, delay_s

    def run(self, prompt: list[int], count: int) -> Disturbed:
        last = time.perf_counter()
        self._arm(0)
        try:
            for step in self._cluster.generate(prompt, count, ignore_eos=True):
                self.report = step.report
                if step.token_id is None:
                    break
                now = time.perf_counter()
                self.gaps.append(now - last)
                last = now
                self.tokens.append(step.token_id)
                self._arm(len(self.tokens))
        except ODMoEError as error:
            self.gaps.append(time.perf_counter() - last)
            self.error = f"{type(error).__name__}: {error}"
        return self

    def _arm(self, tokens: int) -> None:
        if self._pid is not None and tokens == self._after:
            threading.Timer(self._delay_s, self._kill, (self._pid,)).start()

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.killed_at = time.perf_counter()


def until_used(cluster: Any, since: float, answer: tuple[list[int], list[int]], workers: int, shadow: bool) -> float:
    """Seconds from `since` until every node serves again. Raises RuntimeError after BACK_S, or for a wrong token."""
    prompt, tokens = answer
    while time.perf_counter() - since < BACK_S:
        asked = Disturbed(cluster, None).run(prompt, SHORT)
        report = asked.report
        if asked.error is None and asked.tokens != tokens[:SHORT]:
            raise RuntimeError(f"after a kill the answer is {asked.tokens}, not {tokens[:SHORT]}")
        if report is not None and sorted(report.cluster.lost) == sorted(report.cluster.rejoined):
            used = len(report.resident_experts_max) == workers and min(report.resident_experts_max) >= 1
            if used and (not shadow or (report.recall or 0) > 0.5):
                return time.perf_counter() - since
        time.sleep(POLL_S)
    raise RuntimeError(f"a killed node was not back and used within {BACK_S:g} s")


def kill_once(cluster: Any, args: argparse.Namespace, rng: random.Random, victim: str, answer: Any) -> dict[str, Any]:
    """One answer, one kill; then wait until everyone is back."""
    prompt, tokens = answer
    calm = Disturbed(cluster, None).run(prompt, args.tokens)
    after = rng.randrange(args.tokens - 4)
    usual_s = statistics.median(calm.gaps[1:])
    delay_s = rng.uniform(0, calm.gaps[0] if after == 0 else usual_s)
    hit = Disturbed(cluster, cluster.pid(victim), after, delay_s).run(prompt, args.tokens)
    back_s = until_used(cluster, hit.killed_at, answer, args.workers, args.shadow != "none")
    wanted = tokens[: len(hit.tokens)] if hit.error else tokens
    same = calm.tokens == tokens and hit.tokens == wanted
    return {
        "killed": victim,
        "after_token": after,
        "tokens_equal": same,
        "tokens": len(hit.tokens),
        "error": hit.error,
        "longest_gap_s": max(hit.gaps[1:]),
        "longest_gap_calm_s": max(calm.gaps[1:]),
        "median_gap_calm_s": usual_s,
        "answer_s": sum(hit.gaps),
        "answer_calm_s": sum(calm.gaps),
        "back_and_used_s": back_s,
    }


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--shadow", default="nf4")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if not args.json:
        header("Kill -9 at random points of answers, local cluster")
    prepare_libraries(1)
    answers = greedy(args.model, gsm8k_prompts(args.kills), args.tokens)
    rng = random.Random(args.seed)
    victims = [f"worker {rng.randrange(args.workers)}" for _ in range(args.kills)]
    if args.shadow != "none":
        for place in rng.sample(range(args.kills), max(1, args.kills // 4)):
            victims[place] = "shadow"
    settings = Settings(
        model=args.model, cluster="local", workers=args.workers, shadow=args.shadow, threads=1, mini_batch=4096
    )
    cluster = start_cluster(settings, prepare_store(args.model, None, "float32"))
    rows = []
    try:
        # Everyone is there and has been used once before the first kill.
        until_used(cluster, time.perf_counter(), answers[0], args.workers, args.shadow != "none")
        for victim, answer in track(
            list(zip(victims, answers, strict=True)), console=Console(stderr=True), description="kills"
        ):
            rows.append(kill_once(cluster, args, rng, victim, answer))
    finally:
        cluster.close()
    if args.json:
        print(json.dumps({"machine": machine(), "command": command(), "rows": rows}, indent=1))
        return
    print(text_table(COLUMNS, rows))
    right = sum(row["tokens_equal"] and row["error"] is None for row in rows)
    named = sum(row["error"] is not None for row in rows)
    print(f"{right} of {len(rows)} answers with Transformers' tokens, {named} with a named error")
    print(f"written to {save_rows('kills', rows)}")


if __name__ == "__main__":
    main()
