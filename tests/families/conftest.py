"""One tiny checkpoint a family, made by save_pretrained, its expert store, and what Transformers answers with it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from checkpoint.sharding.shard import shard
from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore


def _load(name: str) -> ModuleType:
    """A module beside this one: test files do not import each other."""
    spec = importlib.util.spec_from_file_location(f"families_{name}", Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


catalogue = _load("catalogue")
PROMPT = [5, 17, 3, 88, 41, 9, 9, 60, 2, 71, 33, 12]
TOKENS = 20


@dataclass(frozen=True)
class Tiny:
    """A family's checkpoint at `path`, Transformers' model of it, and its greedy answer to `prompt`."""

    family: str
    path: Path
    store: ExpertStore
    model: Any
    prompt: list[int]
    answer: list[int]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        chosen = catalogue.FAMILIES if os.environ.get("FAMILIES") == "all" else catalogue.TESTED
        metafunc.parametrize("family", chosen)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Matrices this small are slower on two threads, far slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def vision() -> Callable[[], Any]:
    """Makes a Qwen3.5-MoE that also sees."""
    return catalogue.build_with_vision


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """`tiny_of(family)`: made once a session, in float32. `build`: makes its model, where the catalogue does not."""
    made: dict[str, Tiny] = {}

    def make(family: str, build: Callable[[], Any] | None = None) -> Tiny:
        if family not in made:
            from transformers import AutoModelForCausalLM

            path = tmp_path_factory.mktemp(family)
            (build() if build else catalogue.build(family)).save_pretrained(path / "model")
            store = shard(open_source(path / "model"), path / "store")
            model = AutoModelForCausalLM.from_pretrained(path / "model", experts_implementation="eager").eval()
            with torch.inference_mode():
                told = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False)
            answer = told[0, len(PROMPT) :].tolist()
            assert len(set(answer)) > 3, "the model says nothing: a comparison would prove nothing"
            made[family] = Tiny(family, path / "model", store, model, PROMPT, answer)
        return made[family]

    return make


@pytest.fixture
def tiny(family: str, tiny_of: Callable[..., Tiny]) -> Tiny:
    return tiny_of(family)
