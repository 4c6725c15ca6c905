"""The peers are what they are said to be: Transformers' tokens, experts on disk and read again at each use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.lib import peers

COUNT = 12


@pytest.fixture(scope="module")
def offloaded(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> peers.Peer:
    return peers.accelerate_peer(str(demo), "float32", tmp_path_factory.mktemp("experts"), cold=True)


@pytest.fixture(scope="module")
def one_layer(demo: Path) -> int:
    """Bytes of a layer's experts in float32, by the configuration."""
    config = json.loads((demo / "config.json").read_text())
    return config["num_local_experts"] * 3 * config["hidden_size"] * config["intermediate_size"] * 4


@pytest.mark.slow
def test_both_give_the_tokens_of_eager(
    demo: Path, offloaded: peers.Peer, reference: Callable[[str, int, int], Any]
) -> None:
    expected = reference("float32", 0, COUNT)
    whole = peers.transformers_peer(str(demo), "float32")
    for peer in (offloaded, whole):
        found = peer.answer(expected.prompt, COUNT)
        assert found.token_ids == expected.tokens
        assert found.ttft_s > 0
        assert found.decode_s > 0
        assert found.device_bytes > peer.weight_bytes


def test_a_layers_experts_are_in_memory_at_once_and_no_more(offloaded: peers.Peer, one_layer: int) -> None:
    experts = [module for name, module in offloaded.model.named_modules() if name.endswith(".experts")]
    assert len(experts) == 8
    assert all(p.is_meta for module in experts for p in module.parameters())
    assert offloaded.weight_bytes - peers.held_bytes(offloaded.model) == one_layer


def test_all_weights_together_are_those_of_the_checkpoint(demo: Path, offloaded: peers.Peer, one_layer: int) -> None:
    stored = (demo / "model.safetensors").stat().st_size  # bfloat16, and a header
    assert 2 * stored * 0.99 < peers.whole_bytes(str(demo), "float32") < 2 * stored
    dense = peers.held_bytes(offloaded.model)
    assert dense + 8 * one_layer == pytest.approx(peers.whole_bytes(str(demo), "float32"), abs=1024)  # buffers


def test_weights_that_change_on_disk_change_the_next_pass(demo: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    peer = peers.accelerate_peer(str(demo), "float32", tmp_path, cold=True)
    before = peer.logits([5, 6, 7])
    file = next(path for path in tmp_path.iterdir() if path.name.startswith("model.layers.3.mlp.experts.down_proj"))
    with file.open("r+b") as blob:  # safetensors: eight bytes of length, a header, the weights
        begin = 8 + int.from_bytes(blob.read(8), "little")
        blob.seek(begin)
        blob.write(bytes(file.stat().st_size - begin))
    changed = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32, experts_implementation="eager")
    with torch.inference_mode():
        changed.model.layers[3].mlp.experts.down_proj.zero_()
        expected = changed(input_ids=torch.tensor([[5, 6, 7]])).logits[0]
    found = peer.logits([5, 6, 7])
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, before)


def test_the_clock_leaves_out_what_happens_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(peers.time, "perf_counter", lambda: now[0])

    def between() -> None:
        now[0] += 100.0

    clock = peers.Clock(between)
    for wait in (0.0, 2.0, 1.0, 1.0):
        now[0] += wait
        clock.put(torch.zeros(1))
    assert clock.times == [0.0, 2.0, 3.0, 4.0]
