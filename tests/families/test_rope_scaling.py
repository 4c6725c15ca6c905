"""RoPE scaling on both sides of its limits: answers are those of Transformers' `generate`, however they are computed.

Every family with every kind of scaling: `tests/families/test_every_rope_scaling.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint.generation.own_path import OwnPath
from checkpoint.generation.rotary import Rotary
from main_node.answer import collect
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from support.cases import slow_except
from support.models import families, ropes
from support.models.ropes import CHUNK, LIMIT, PROMPTS, TOKENS

LEAST_RECALL = 0.9
"""Of a shadow in float16 that is aligned before every pass; see `test_cluster`."""


@pytest.mark.parametrize(
    ("name", "kind", "chunks"),
    slow_except(
        [("gpt_oss", "longrope", (0,))],
        [("phimoe", "longrope", (0, CHUNK)), ("mixtral", "dynamic", (CHUNK,)), ("gpt_oss", "longrope", (0,))],
    ),
)
def test_answers_are_those_of_generate(name: str, kind: str, chunks: tuple[int, ...], tmp_path: Path) -> None:
    ropes.check(ropes.make(tmp_path, name, kind), chunks)


def test_the_shadow_follows_where_all_tokens_are_read_again(tmp_path: Path) -> None:
    scaled = ropes.make(tmp_path, "phimoe", "longrope")
    how = {"shadow": "fp16", "align_token": 1, "align_kv": 1, "departure": "late", "workers": 2, "threads": 1}
    cluster = EmbeddedCluster(Settings(model=str(scaled.path), mini_batch=4096, **how), scaled.store)
    try:
        found, report = collect(cluster.generate(PROMPTS[0], TOKENS, ignore_eos=True))
        lost = list(cluster.main.engine.peers.lost)
    finally:
        cluster.close()
    assert found == scaled.wanted[tuple(PROMPTS[0])]
    assert (report.exact, report.read_again, report.prefill_passes, lost) == (True, 1, 1, [])
    again = LIMIT - len(PROMPTS[0])
    unpredicted = {number for number, recall in enumerate(report.recall_by_token) if recall is None}
    assert again in unpredicted
    assert max(unpredicted) == again, "before it, what a slow shadow had still to predict; after it, nothing"
    assert report.recall_complete
    assert report.recall >= LEAST_RECALL


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_rotation_depends_on_no_call_before(kind: str) -> None:
    def positions(stop: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1), torch.arange(start, stop)[None]

    model = families.auto_class("mixtral").from_config(ropes.configuration("mixtral", kind))
    short, longer = (model.model.rotary_emb(*positions(stop)) for stop in (9, 2 * LIMIT))
    rotary = Rotary(model)
    for stop, wanted in ((9, short), (2 * LIMIT, longer), (LIMIT, None), (9, short)):
        cos, sin = model.model.rotary_emb(*positions(stop))
        assert wanted is None or (torch.equal(cos, wanted[0]) and torch.equal(sin, wanted[1]))
    rotary.tokens = 2 * LIMIT  # of which these are chunks
    for start, stop in ((0, 9), (9, LIMIT)):
        cos, _ = model.model.rotary_emb(*positions(stop, start))
        assert torch.equal(cos, longer[0][:, start:stop])
    assert not torch.equal(longer[0][:, :9], short[0])


def test_a_way_of_its_own_that_is_not_followed_is_said() -> None:
    model = families.build("phimoe")
    assert OwnPath(model).unfollowed == []

    class Wider(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, *args: object, **how: object) -> object:
            given = super().prepare_inputs_for_generation(*args, **how)
            return given | {"position_ids": given["position_ids"] + 1}

    class Drawing(type(model)):  # type: ignore[misc]
        def _sample(self, *args: object, **how: object) -> object:
            return super()._sample(*args, **how)

    model.__class__ = Wider
    path, cache = OwnPath(model), families.families.new_cache(model.config)
    assert path.unfollowed == []
    assert not path.reads_again([5, 7, 9], 3, cache)
    assert [name.rpartition(".")[2] for name in path.unfollowed] == ["prepare_inputs_for_generation of Transformers"]
    model.__class__ = Drawing
    assert [name.rpartition(".")[2] for name in OwnPath(model).unfollowed] == ["_sample of Transformers"]
