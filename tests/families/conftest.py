"""One tiny checkpoint a family, made by save_pretrained, its expert store, and what Transformers answers with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore
from support.models import families
from support.models.published import aligned
from support.models.store_making import shard
from support.nodes.exact import answer_of

PROMPT = [5, 17, 3, 88, 41, 9, 9, 60, 2, 71, 33, 12]
TOKENS, MOST_TOKENS = 12, 20
"""Of an answer: as many as it takes until there are some different ones."""


@dataclass(frozen=True)
class Tiny:
    """A family's checkpoint at `path`, Transformers' model of it, and its greedy answer to `prompt` with its logits."""

    family: str
    path: Path
    store: ExpertStore
    model: Any
    prompt: list[int]
    answer: list[int]
    logits: list[torch.Tensor]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marked = [mark for mark in metafunc.definition.iter_markers("parametrize") if "family" in mark.args[0]]
    if "family" in metafunc.fixturenames and not marked:
        metafunc.parametrize("family", families.every(families.FEW))


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """`tiny_of(family)`: made once a session, in float32. `build`: makes its model, where another is wanted."""
    made: dict[str, Tiny] = {}

    def make(family: str, build: Callable[[], Any] | None = None) -> Tiny:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            (build() if build else families.build(family)).save_pretrained(path / "model")
            store = shard(open_source(path / "model"), path / "store")
            auto = families.auto_class(family)
            model = aligned(auto.from_pretrained(path / "model", experts_implementation="eager").eval())
            answer, logits = answer_of(model, PROMPT, MOST_TOKENS)
            count = next((n for n in range(TOKENS, MOST_TOKENS + 1) if len(set(answer[:n])) > 3), 0)
            assert count, "the model says nothing: a comparison would prove nothing"
            made[family] = Tiny(family, path / "model", store, model, PROMPT, answer[:count], logits[:count])
        return made[family]

    return make


@pytest.fixture
def tiny(family: str, tiny_of: Callable[..., Tiny]) -> Tiny:
    return tiny_of(family)
