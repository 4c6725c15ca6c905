"""Stores whose dense part is in few bits: a cluster's answer is that of Transformers with the restored weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpoint.dense import load_dense
from checkpoint.family import experts_modules
from checkpoint.gate_search import find_gate
from checkpoint.native.encoded_linear import EncodedLinear
from checkpoint.sharding.source import open_source
from support.models import families
from support.models.published import aligned
from support.models.restored_dense import restored_weights, set_weights
from support.models.store_making import shard
from support.nodes.exact import check_as_transformers

TOKENS = 16
KEPT = "int4"


def test_answer_is_that_of_the_restored_weights(tiny: Any, tmp_path: Path) -> None:
    store = shard(open_source(tiny.path), tmp_path / "store", dense=KEPT)
    restored = restored_weights(store.dense, KEPT)
    assert restored, "nothing is encoded: a comparison would prove nothing"
    model = families.auto_class(tiny.family).from_pretrained(tiny.path, experts_implementation="eager").eval()
    set_weights(model, restored)
    check_as_transformers(aligned(model), tiny.path, store, tiny.prompt, TOKENS)


def test_gates_beside_an_encoded_shared_expert_are_found(tiny_of: Callable[..., Any], tmp_path: Path) -> None:
    """Policies that read scores compute the block by itself, with the shared expert that stays encoded."""
    tiny = tiny_of("qwen2_moe")
    store = shard(open_source(tiny.path), tmp_path / "store", dense="int8")
    model = load_dense(store.dense, store.manifest.config, torch.float32)
    for name, experts in experts_modules(model).values():
        block = model.get_submodule(name.rpartition(".")[0])
        assert any(isinstance(layer, EncodedLinear) for layer in block.modules())
        plain = tiny.model.get_submodule(name.rpartition(".")[0])
        assert find_gate(model, block, experts, name) == find_gate(tiny.model, plain, plain.experts, name)
