"""Stores whose dense part is in few bits: a cluster's answer is that of Transformers with the restored weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
