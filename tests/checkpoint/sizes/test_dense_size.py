"""Dense parts in few bits, from config.json alone: the same as of the model that Transformers builds."""

from __future__ import annotations

import json

import pytest

from checkpoint.sizes.configured_size import configured_size
from checkpoint.sizes.dense_size import with_encoded_dense
from support.paths import CONFIGS


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["int4", "int8"])
@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-120b", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_the_same_as_by_building_the_model(name: str, kept: str) -> None:
    fields = json.loads((CONFIGS / f"{name}.json").read_text())
    size = configured_size(fields, "bfloat16", 4096, name)
    assert size is not None
    known = with_encoded_dense(size, fields, kept, known=True)
    assert known == with_encoded_dense(size, fields, kept)
    assert known.dense_saved > 0
