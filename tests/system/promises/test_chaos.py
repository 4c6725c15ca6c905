"""Real faults, drawn one after the other from the table of `odmoe chaos`, under load, with its referee.

`make chaos` goes on for CHAOS_S seconds on CHAOS_CLUSTERS at a time, from CHAOS_SEED on; CHAOS_FAULTS has names, or
`none` for CHAOS_REQUESTS alone. The figures are printed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from main_node.engine import reconnector
from odmoe.chaos import faults
from odmoe.chaos.faults import chosen_faults
from odmoe.chaos.run import Disturbance, Plan, ask_cluster
from odmoe.commands.texts.chaos_text import as_text
from support.faults.disturbed import DisturbedNodes
from support.promises import TOKENS, greedy

SECONDS = float(os.environ.get("CHAOS_S", 30))
REQUESTS = int(os.environ["CHAOS_REQUESTS"]) if "CHAOS_REQUESTS" in os.environ else None
pytestmark = [pytest.mark.system, pytest.mark.timeout(2 * SECONDS + 1000)]
LENGTHS = (3, 12, 23)
STEADY_S = 2.0
"""A loss is forgotten soon, so that workers that are struck all the time come back within seconds."""
COUNT = 12 if REQUESTS else TOKENS
"""Most tokens of an answer: many short ones for a soak."""


def test_faults_one_after_the_other(nodes: Any, tiny: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(reconnector, "STEADY_S", STEADY_S)
    monkeypatch.setattr(faults, "SOON_S", 0.0)
    made = DisturbedNodes(nodes, tmp_path)
    main: Any = made.cluster.main
    ask, draw = ask_cluster(main), random.Random(0)
    prompts = [[draw.randrange(2, 96) for _ in range(length)] for length in LENGTHS]
    for prompt in prompts:
        with ask(prompt, COUNT) as answer:
            assert list(answer) == greedy(tiny, prompt, COUNT)
    chosen = chosen_faults(os.environ.get("CHAOS_FAULTS"), ["shadow", "hosts"])
    plan = Plan(SECONDS, chosen, int(os.environ.get("CHAOS_SEED", 0)), 2, REQUESTS)
    verdict = Disturbance(made, ask, prompts, COUNT, [5] * (main.shape.context + 1)).run(plan)
    with capsys.disabled():
        print(f"\n{as_text(verdict)}")
    if verdict.interrupted:
        raise KeyboardInterrupt
    assert verdict.violations == []
    assert REQUESTS or verdict.costs
