"""The whole shadow model against Transformers in float32: near, smaller, and its routing told in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from scheduler.errors import ConfigError
from shadow_node.model import ShadowModel

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def prompts(demo: Any, gsm8k: list[str]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    return [tokenizer(text)["input_ids"][:40] for text in gsm8k[:3]]


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """Of every position. [T, V]"""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0].float()


# Relative error of all logits, and how many of the positions have the same best token. The worst of
# these prompts: 6e-5 and 1, 0.049 and 0.92, 0.094 and 0.72.
@pytest.mark.parametrize(("scheme", "error", "agree"), [("fp16", 1e-3, 1.0), ("int8", 0.1, 0.85), ("nf4", 0.2, 0.6)])
def test_logits_are_near_float32(
    scheme: str, error: float, agree: float, shadow_model: Any, whole: Any, prompts: list[list[int]]
) -> None:
    for tokens in prompts:
        expected, got = logits_of(whole, tokens), logits_of(shadow_model(scheme).dense, tokens)
        assert got.shape == expected.shape
        assert float((got - expected).norm() / expected.norm()) < error
        assert float((got.argmax(-1) == expected.argmax(-1)).float().mean()) >= agree
        if scheme == "fp16":
            assert float((got - expected).abs().max()) < 0.02


@pytest.mark.parametrize(("scheme", "most"), [("fp16", 0.55), ("int8", 0.32), ("nf4", 0.20)])
def test_bytes_shrink(scheme: str, most: float, shadow_model: Any, whole: Any) -> None:
    full = sum(p.nbytes for p in whole.parameters())
    assert 0 < shadow_model(scheme).device_bytes < most * full


def test_greedy_answer_of_fp16_is_the_models(shadow_model: Any, whole: Any, prompts: list[list[int]]) -> None:
    """Pass by pass with the cache, as the shadow runs it."""
    tokens, model = prompts[0], shadow_model("fp16")
    with torch.inference_mode():
        out = whole.generate(
            torch.tensor([tokens]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=1
        )
    cache = model.new_cache()
    got = [model.forward(tokens, cache)]
    while len(got) < 6:
        got.append(model.forward(got[-1:], cache))
    assert got == out[0, len(tokens) :].tolist()
    assert cache.get_seq_length() == len(tokens) + 5


def test_routing_is_told_before_its_experts_run(shadow_model: Any, prompts: list[list[int]], monkeypatch: Any) -> None:
    """The last token's experts, best first, each layer once, and only then that layer's products."""
    model, log = shadow_model("nf4"), []
    told: dict[int, tuple[list[int], list[float]]] = {}

    def routed(layer: int, experts: list[int], scores: list[float]) -> None:
        log.append(("told", layer))
        told[layer] = (experts, scores)

    seen: dict[int, tuple[list[int], list[float]]] = {}
    for layer, experts in model.experts.items():

        def forward(hidden: Any, index: Any, weights: Any, layer: int = layer, inner: Any = experts.forward) -> Any:
            log.append(("computed", layer))
            seen[layer] = (index[-1].tolist(), weights[-1].tolist())
            return inner(hidden, index, weights)

        monkeypatch.setattr(experts, "forward", forward)
    monkeypatch.setattr(model, "on_routed", routed)
    model.forward(prompts[0], model.new_cache())
    assert log == [(what, layer) for layer in range(8) for what in ("told", "computed")]
    assert told == seen
    assert all(len(set(e)) == 2 and s == sorted(s, reverse=True) for e, s in told.values())


def test_what_stops_a_pass_stops_it_before_its_experts(
    shadow_model: Any, prompts: list[list[int]], monkeypatch: Any
) -> None:
    model = shadow_model("fp16")

    class Stop(Exception):
        pass

    def routed(layer: int, experts: list[int], scores: list[float]) -> None:
        if layer == 3:
            raise Stop

    monkeypatch.setattr(model, "on_routed", routed)
    monkeypatch.setattr(model.experts[3], "forward", lambda *a: pytest.fail("layer 3 was computed"))
    with pytest.raises(Stop):
        model.forward(prompts[0], model.new_cache())
    assert not torch.is_inference_mode_enabled()


def test_progress_and_unknown_schemes(demo_store: Callable[[str], Any]) -> None:
    told: list[tuple[int, int]] = []
    ShadowModel(demo_store("float32"), "fp16", progress=lambda done, of: told.append((done, of)))
    assert told == [(n, 8) for n in range(1, 9)]
    with pytest.raises(ConfigError, match="int3"):
        ShadowModel(demo_store("float32"), "int3")
