"""Blocks of a prompt that share forward passes give the bits of blocks that are read one by one, in every family."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from checkpoint import joint_blocks
from checkpoint.dense import load_dense
from checkpoint.kv_blocks import are_rows_only
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from support.nodes.exact import answers

BLOCK = 32
DRAW = random.Random(4)
PROMPTS = [[DRAW.randrange(1, 96) for _ in range(count)] for count in (2 * BLOCK + 2, 3 * BLOCK, 3 * BLOCK + 17)]
"""One ends with a block of too few rows to share products."""


def read(tiny: Any) -> tuple[int, list[tuple[list[int], list[torch.Tensor]]]]:
    """Tokens of a forward pass at most, and the prompts' answers with their logits."""
    fields: dict[str, Any] = {"shadow": "none", "workers": 2, "threads": 1, "mini_batch": 4096, "kv_memory": "1GB"}
    cluster = EmbeddedCluster(Settings(model=tiny.family, prefill_chunk=BLOCK, **fields), tiny.store)
    try:
        found = [answers(cluster, prompt, 3) for prompt in PROMPTS]
        return cluster.main.kept._joint, [(report.token_ids, logits) for report, logits in found]
    finally:
        cluster.close()


@pytest.mark.slow
def test_blocks_that_share_a_pass_keep_their_bits(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not are_rows_only(tiny.model.config):
        pytest.skip("its blocks have passes of their own")
    most, joint = read(tiny)
    monkeypatch.setattr("main_node.kept_prompts.joint_tokens", lambda model, block: block)
    _, apart = read(tiny)
    if tiny.family in ("mixtral", "qwen3_moe"):
        assert most == joint_blocks.MOST_TOKENS
    for (tokens, logits), (others, other_logits) in zip(joint, apart, strict=True):
        assert tokens == others
        assert all(torch.equal(one, other) for one, other in zip(logits, other_logits, strict=True))


@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_a_row_that_depends_on_the_rows_beside_it_is_found(
    family: str, tiny_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tiny_of(family).store
    model = load_dense(store.dense, store.manifest.config, torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert joint_blocks.joint_tokens(model, BLOCK) == joint_blocks.MOST_TOKENS
        with monkeypatch.context() as patch:
            patch.setattr(joint_blocks, "_mask", lambda mask, past, start, stop, device: None)
            assert joint_blocks.joint_tokens(model, BLOCK) == BLOCK
        norm = model.model.layers[0].input_layernorm
        own = norm.forward
        norm.forward = lambda rows: own(rows) + rows.mean() * 1e-3
        assert joint_blocks.joint_tokens(model, BLOCK) == BLOCK
    finally:
        torch.set_num_threads(threads)


def test_a_gate_that_rounds_its_weights_is_compared_before(tiny_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies in float32: logits that differ in the last bit may choose other experts for another prompt."""
    store = tiny_of("ernie4_5_moe").store
    model = load_dense(store.dense, store.manifest.config, torch.bfloat16)
    monkeypatch.setattr(joint_blocks, "_share_products", lambda model, most: True)
    joint_blocks._install()
    router = model.model.layers[1].mlp.gate
    own = router.forward

    def depends(hidden: torch.Tensor) -> Any:
        logits, *others = own(hidden)
        return logits * (1 + 2**-22 * (len(hidden) > BLOCK)), *others

    with torch.inference_mode():
        monkeypatch.setattr(joint_blocks, "_shares", lambda *_: True)
        assert joint_blocks._have_same_bits(model, BLOCK, joint_blocks.MOST_TOKENS)
        router.forward = depends
        assert not joint_blocks._have_same_bits(model, BLOCK, joint_blocks.MOST_TOKENS)
        router.to(torch.bfloat16).forward = own
        monkeypatch.setattr(joint_blocks, "_shares", lambda weight, most: weight.dtype != torch.float32)
        assert not joint_blocks._have_same_bits(model, BLOCK, joint_blocks.MOST_TOKENS)
