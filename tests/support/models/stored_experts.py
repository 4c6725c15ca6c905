"""Experts of a store, from its files."""

from __future__ import annotations

import torch

from checkpoint.native.parameters import ExpertParameters
from checkpoint.store import ExpertStore


def bytes_of(store: ExpertStore, layer: int, expert: int, form: str = "") -> torch.Tensor:
    file, blob = store.locate(layer, expert, form)
    return torch.frombuffer(bytearray(file.read_bytes()[blob.offset :][: blob.length]), dtype=torch.uint8)


def parameters(store: ExpertStore, layer: int, expert: int, form: str = "") -> dict[str, torch.Tensor]:
    held = bytes_of(store, layer, expert, form)
    found = ExpertParameters(store.manifest, ("", *store.manifest.forms), threads=1).of(held, layer, form)
    return {name: value.clone() for name, value in found.items()}


def check_same_parameters(one: ExpertStore, other: ExpertStore, form: str = "") -> None:
    for layer, spec in one.manifest.layers.items():
        for expert in range(len(spec.blobs)):
            found, expected = parameters(one, layer, expert, form), parameters(other, layer, expert, form)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), (layer, expert, name)
