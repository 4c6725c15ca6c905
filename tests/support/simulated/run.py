"""Plays many seeds: `make world SEEDS=1000`, or `PYTHONPATH=tests python -m support.simulated.run --help`.

Not covered: an int8 or NF4 shadow. The one that plays is fp16, with noise on its weights.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.utils import logging as transformers_logging

from checkpoint.expert import ExpertArithmetic
from checkpoint.kernels import linear_of
from checkpoint.store import ExpertStore
from odmoe.stores import prepare_store
from shadow_node.model import ShadowModel
from support.simulated.baton import Violation
from support.simulated.defects import DEFECTS, planted
from support.simulated.hosts import Made
from support.simulated.plan import EXPERTS, LAYERS, PROMPTS, TOKENS, Plan, Played, draw
from support.simulated.referee import Referee

NOISE = 0.05
"""Of the shadow's weights, whose spread is 0.3."""


class Stage:
    """A tiny model of random weights, what Transformers answers with it, and the worlds that play on it."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        transformers_logging.disable_progress_bar()
        self._model = str(folder / "model")
        config = MixtralConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            initializer_range=0.3,  # an expert's output decides tokens: a wrong one shows
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            MixtralForCausalLM(config).save_pretrained(self._model)
        store = prepare_store(self._model, str(folder / "store"), "float32")
        arithmetic = ExpertArithmetic(store.manifest.config, store.manifest.dtype, linear_of("exact"))
        self._made = Made(store, arithmetic, _shadow(store))
        self.answers = {number: self._answer(list(prompt)) for number, prompt in enumerate(PROMPTS)}
        self._played = 0

    def _answer(self, prompt: list[int]) -> list[int]:
        """Of Transformers' own generation, with its `eager` experts."""
        model: Any = AutoModelForCausalLM.from_pretrained(self._model, experts_implementation="eager")
        tokens = model.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=1
        )
        return list(tokens[0, len(prompt) :].tolist())

    def play(self, seed: int) -> Played:
        """Raises Violation."""
        return self.play_plan(draw(seed))

    def play_plan(self, plan: Plan) -> Played:
        self._played += 1
        if self._played % 100 == 0:
            gc.collect()
        return Referee(plan, self._made, self._model, self.answers).play()


def _shadow(store: ExpertStore) -> ShadowModel:
    """It predicts wrongly at times: its dense weights are not quite the model's. Quantised, they would be slower."""
    shadow, random = ShadowModel(store, "fp16"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in shadow.dense.parameters():
            weight += NOISE * torch.randn(weight.shape, generator=random).to(weight.dtype)
    return shadow


@dataclass(frozen=True)
class Outcome:
    """Of one seed; `violation`: empty if there was none."""

    seed: int
    trace: int
    violation: str
    errors: tuple[str, ...] = ()
    tokens: int = 0


_stage: Stage | None = None


def _outcome(seed: int, defect: str = "") -> Outcome:
    global _stage
    if _stage is None:
        _stage = Stage(Path(tempfile.mkdtemp(prefix="odmoe-world-")))
    with planted(defect) if defect else contextlib.nullcontext():
        try:
            played = _stage.play(seed)
        except Violation as violation:
            return Outcome(seed, violation.trace, str(violation))
    return Outcome(seed, played.trace, "", tuple(one.partition(":")[0] for one in played.errors), played.tokens)


def find(defect: str, most: int) -> str:
    """The first seed that finds a defect, played twice more."""
    for seed in range(most):
        found = _outcome(seed, defect)
        if found.violation:
            again = [_outcome(seed, defect) for _ in range(2)]
            same = all((one.trace, one.violation) == (found.trace, found.violation) for one in again)
            told = found.violation.splitlines()[0]
            return f"{defect}: seed {seed}, replayed {'exactly, twice' if same else 'OTHERWISE'}: {told:.200}"
    return f"{defect}: NOT FOUND in {most} seeds"


def _met(plan: Plan) -> set[str]:
    """The kinds of fault in a plan."""
    leaves = {"client leaves"} if any(one.fate != "end" for one in plan.clients) else set()
    return {fault.kind for fault in plan.faults} | leaves or {"none"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Play seeds of the simulated world.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many play at a time")
    parser.add_argument("--defects", nargs="*", help="find these defects (by a part of their names), or all")
    given = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.processes, mp_context=spawn) as pool:
        if given.defects is not None:
            names = [name for name in DEFECTS if not given.defects or any(part in name for part in given.defects)]
            lines = []
            for line in pool.map(find, names, [given.seeds] * len(names)):
                lines.append(line)
                print(line, flush=True)
            return any("NOT FOUND" in line or "OTHERWISE" in line for line in lines)
        list(pool.map(_outcome, range(given.processes)))  # models are made
        began, errors, faults, tokens, violations = time.monotonic(), Counter[str](), Counter[str](), 0, 0
        for outcome in pool.map(_outcome, range(given.first, given.first + given.seeds), chunksize=10):
            errors.update(outcome.errors)
            faults.update(_met(draw(outcome.seed)))
            tokens += outcome.tokens
            if outcome.violation:
                violations += 1
                print(outcome.violation, flush=True)
        rate = given.seeds / (time.monotonic() - began)
    print(f"{given.seeds} seeds, {violations} violations; {rate:.1f} a second; {tokens} tokens; errors: {dict(errors)}")
    print("seeds by fault: " + ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items())))
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
