"""A checkpoint of each family, with the script's layout and few, narrow experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.peers.checkpoints import Shape, make_checkpoint

TINY = {
    family: Shape(family, family, layers=2, experts=4, top_k=2, inner=64, hidden=128, heads=2, key_heads=1)
    for family in ("qwen3_moe", "mixtral")
}


@pytest.fixture(scope="session", params=TINY)
def shape(request: pytest.FixtureRequest) -> Shape:
    return TINY[request.param]


@pytest.fixture(scope="session")
def checkpoint(shape: Shape, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(shape, tmp_path_factory.mktemp("checkpoints"))
