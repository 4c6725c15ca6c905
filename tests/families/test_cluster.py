"""Every family on the whole cluster: main node, shadow and workers, tokens of Transformers `eager`, aligned to the end.

Prompt and answer are longer than any sliding window, so that rows are forgotten before they are aligned again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from checkpoint import kv
from main_node.engine.sequence import Sequence
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from support.models import families
from support.models.families import build_with_vision
from support.nodes.engine_world import nothing_left
from support.nodes.exact import Alone, answer_of, check_together

RUNS: dict[str, dict[str, Any]] = {
    "fp16": {"shadow": "fp16", "align_token": 1, "align_kv": 1, "departure": "late"},
    "nf4": {"shadow": "nf4", "align_token": 3, "align_kv": 3, "departure": "late"},
    "int8": {"shadow": "int8", "align_token": 1, "align_kv": 4, "workers": 2, "slots": 2, "departure": "late"},
}
COUNTS = (10, 4, 6)
"""Tokens of each of several answers at once."""
LEAST_RECALL = 0.9
"""A shadow whose weights are the main model's, rounded to float16, and whose cache is the main model's before every
pass errs only where two experts' scores are almost the same. Guessing finds k of E: 0.38 and less."""


@dataclass
class Caches:
    """Both caches whole, at each KV alignment by its position: the main model's, and the shadow's when it has it."""

    main: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    shadow: dict[int, list[torch.Tensor]] = field(default_factory=dict)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> Caches:
    seen = Caches()
    kv_rows, put = Sequence.kv_rows, kv.put

    def whole(cache: Any, stop: int) -> list[torch.Tensor]:
        taken = kv.take(cache, 0, stop)
        return [row.tensor.clone() for row in taken.rows] + taken.states

    def telling(self: Sequence, start: int, stop: int, states: bool = True) -> kv.CachePiece:
        if start < stop:
            seen.main[stop] = whole(self.cache, stop)
        return kv_rows(self, start, stop, states)

    def putting(cache: Any, start: int, sent: list[torch.Tensor]) -> int:
        """The last part of an alignment says how it ends."""
        stop = put(cache, start, sent)
        seen.shadow[stop] = whole(cache, stop)
        return stop

    monkeypatch.setattr(Sequence, "kv_rows", telling)
    monkeypatch.setattr(kv, "put", putting)
    return seen


def answered(tiny: Any, **settings: Any) -> tuple[Any, list[str]]:
    """The report of an answer, and the nodes that were lost on the way."""
    fields = {"workers": 3, "threads": 1, "mini_batch": 4096} | settings
    cluster = EmbeddedCluster(Settings(model=tiny.family, **fields), tiny.store)
    try:
        *_, last = cluster.generate(tiny.prompt, len(tiny.answer), ignore_eos=True)
        return last.report, list(cluster.main.engine.peers.lost)
    finally:
        cluster.close()


@pytest.mark.parametrize(
    ("family", "run"), families.every_in_turns((*families.SHARING, "glm_moe_dsa", "nemotron_h"), tuple(RUNS))
)
def test_tokens_of_eager_and_a_shadow_that_follows(
    family: str, run: str, tiny: Any, caches: Caches, record_property: Any
) -> None:
    report, lost = answered(tiny, **RUNS[run])
    assert report.token_ids == tiny.answer
    assert lost == []
    assert len(report.recall_by_token) == len(tiny.answer) - 1, "the shadow did not predict every pass"
    if run == "fp16":
        assert report.recall >= LEAST_RECALL
    steps = range(0, len(tiny.answer) - 1, RUNS[run]["align_kv"])
    assert list(caches.main) == list(caches.shadow) == [len(tiny.prompt) + step for step in steps]
    for stop, told in caches.main.items():
        equal = [torch.equal(a, b) for a, b in zip(told, caches.shadow[stop], strict=True)]
        assert all(equal), f"at position {stop} the shadow's cache is not the main model's: {equal}"
    record_property("recall", report.recall)


@pytest.mark.parametrize("family", families.every(("mixtral", "qwen3_next")))
def test_three_requests_at_once(family: str, tiny: Any) -> None:
    """Each with the tokens and logits of `generate` alone, though their passes stop at every layer."""
    settings = Settings(model=family, workers=3, threads=1, mini_batch=4096, shadow="int8")
    prompts = [tiny.prompt, tiny.prompt[3:], [*reversed(tiny.prompt), 8]]
    asked = zip(prompts, COUNTS, strict=True)
    alone = [Alone(prompt, *answer_of(tiny.model, prompt, count)) for prompt, count in asked]
    cluster = EmbeddedCluster(settings, tiny.store)
    try:
        together = check_together(cluster.main, alone)
        assert min(one.report.requests_per_step for one in together) > 1
        assert nothing_left(cluster.main.engine)
    finally:
        cluster.close()


def test_the_language_model_of_one_that_also_sees(tiny_of: Any) -> None:
    """As AutoModelForCausalLM takes it out of the checkpoint of the whole."""
    tiny = tiny_of("qwen3_5_moe", build_with_vision)
    index = json.loads((tiny.store.dense / "model.safetensors.index.json").read_text())
    assert any(".visual." in name for name in index["weight_map"])
    report, lost = answered(tiny, **RUNS["fp16"])
    assert report.token_ids == tiny.answer
    assert lost == []
    assert report.recall >= LEAST_RECALL
