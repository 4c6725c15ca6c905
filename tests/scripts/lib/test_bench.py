"""Clusters that are asked in turns, and the prompts that they are asked."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

import scripts.lib.bench
from odmoe.settings import settings as settings_module
from scripts.lib.bench import Bench, Side


@pytest.fixture
def side(demo_store: Any) -> Any:
    """`side()`: a new one, of a static hot set in 25 % of the experts' bytes; four prompts."""
    bench = Bench(Namespace(dtype="float32"), {"static": {"system": "static"}})
    made: list[Side] = []

    def make() -> Side:
        prompts = [[[0, 5, 17, 300 + n, 41]] for n in range(4)]
        of = Side(demo_store("float32"), lambda name: bench.settings("models/demo-moe", name, 25), prompts, 5)
        made.append(of)
        return of

    yield make
    for one in made:
        one.close()


@pytest.mark.slow
def test_a_run_that_goes_on_asks_what_was_asked_before(side: Any) -> None:
    """What stands in the slots at a prompt is the same whether the prompts before it were measured in this run."""
    names = ("token_ids", "loads_a_token", "hit_rate", "bytes_a_token", "prefill_bytes", "device_bytes")
    whole, later = side(), side()
    for number in range(3):
        last = whole.ask("static", number).figures()
    alone = later.ask("static", 2).figures()
    assert {name: last[name] for name in names} == {name: alone[name] for name in names}
    first = side().ask("static", 0).figures()
    assert first["prefill_bytes"] != alone["prefill_bytes"]  # a new cluster has nothing in its slots


@pytest.mark.slow
def test_each_cluster_has_its_own_number_of_threads(demo_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the cores with a shadow, all without one: also where the one with a shadow was started last."""
    monkeypatch.setattr(settings_module, "available_cores", lambda: 2)
    before, seen = torch.get_num_threads(), []

    def ask(*of: Any) -> Any:
        seen.append(torch.get_num_threads())
        return answer(*of)

    answer = scripts.lib.bench.ask
    monkeypatch.setattr(scripts.lib.bench, "ask", ask)
    variants = {"static": {"system": "static"}, "sep-arc": {"system": "sep-arc", "shadow": "fp16"}}
    bench = Bench(Namespace(dtype="float32"), variants)
    of = Side(
        demo_store("float32"), lambda name: bench.settings("models/demo-moe", name, 25), [[[0, 5, 17, 300]]] * 2, 3
    )
    try:
        for number in range(2):
            for variant in variants:
                of.ask(variant, number)
    finally:
        of.close()
        torch.set_num_threads(before)
    assert seen == [2, 1, 2, 1]
