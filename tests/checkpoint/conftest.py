"""Small checkpoints made by Transformers, in every layout that we read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore
from support.models.checkpoints import build
from support.models.store_making import shard


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny(family, dtype, **config)`: the directory that save_pretrained made, one a session."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(family: str = "mixtral", dtype: str = "float32", max_shard_size: str = "1GB", **changes: Any) -> Path:
        key = (family, dtype, max_shard_size, *sorted(changes.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            model = build(family, **changes).to(getattr(torch, dtype))
            model.save_pretrained(made[key], max_shard_size=max_shard_size)
        return made[key]

    return make


@pytest.fixture(scope="session")
def layouts(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same tiny Mixtral as one file, as many files, and under its old and its fused names."""
    one = tiny("mixtral")
    fused = build("mixtral").state_dict()
    found = {"one file": one, "many files": tiny("mixtral", max_shard_size="20KB")}
    old: dict[str, torch.Tensor] = {}
    for name, value in fused.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(part.chunk(2) for part in value):
                stem = name.replace(".mlp.", ".block_sparse_moe.").replace("gate_up_proj", str(expert))
                old[f"{stem}.w1.weight"], old[f"{stem}.w3.weight"] = gate.contiguous(), up.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, part in enumerate(value):
                stem = name.replace(".mlp.", ".block_sparse_moe.").replace("down_proj", str(expert))
                old[f"{stem}.w2.weight"] = part.clone()
        else:
            old[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = value
    for layout, weights in (("old names", old), ("fused names", fused)):
        found[layout] = tmp_path_factory.mktemp("layout")
        shutil.copy(one / "config.json", found[layout])
        save_file({k: v.contiguous() for k, v in weights.items()}, found[layout] / "model.safetensors")
    return found


@pytest.fixture
def copied(tmp_path: Path, tiny: Callable[..., Path]) -> Path:
    """A tiny Mixtral to damage."""
    return Path(shutil.copytree(tiny("mixtral"), tmp_path / "copied"))


@pytest.fixture
def copied_many(tmp_path: Path, layouts: dict[str, Path]) -> Path:
    """The same, in many files with an index."""
    return Path(shutil.copytree(layouts["many files"], tmp_path / "copied-many"))


@pytest.fixture(scope="session")
def store_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ExpertStore]:
    """`store_of(model, dtype)`: its store, one a session."""
    made: dict[tuple[Path, str | None], ExpertStore] = {}

    def make(model: Path, dtype: str | None = None) -> ExpertStore:
        if (model, dtype) not in made:
            made[model, dtype] = shard(open_source(model), tmp_path_factory.mktemp("stores") / "store", dtype)
        return made[model, dtype]

    return make


@pytest.fixture
def tiny_store(tmp_path: Path, tiny: Callable[..., Path], store_of: Callable[..., ExpertStore]) -> ExpertStore:
    """A store to damage, in bfloat16: 2 layers of 3 experts."""
    made = store_of(tiny("mixtral", "bfloat16", num_local_experts=3, num_hidden_layers=2))
    return ExpertStore.open(Path(shutil.copytree(made.path, tmp_path / "store")))


@pytest.fixture(scope="session")
def rewrite() -> Callable[[Path, Callable[[dict[str, torch.Tensor]], object]], None]:
    """`rewrite(file, change)`: a safetensors file with its tensors changed in place."""

    def again(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        weights = load_file(file)
        change(weights)
        save_file(weights, file, metadata={"format": "pt"})

    return again


@pytest.fixture(scope="session")
def flip() -> Callable[[Path, int], None]:
    """`flip(file, bit)`: turn one bit over, bits counted from the start of the file."""

    def turn(file: Path, bit: int) -> None:
        with file.open("r+b") as stream:
            stream.seek(bit // 8)
            byte = stream.read(1)[0]
            stream.seek(bit // 8)
            stream.write(bytes([byte ^ 1 << bit % 8]))

    return turn
