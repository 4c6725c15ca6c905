"""Dense weights that a store keeps in few bits, restored by arithmetic of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def restored_weights(dense: Path, kept: str) -> dict[str, torch.Tensor]:
    """Parameter -> float32 [out, in]. `dense`: the folder in the store.

    A row of 4 bits has its first half of columns in the lower halves of its bytes.
    """
    parts: dict[str, torch.Tensor] = {}
    for file in dense.glob("encoded-*.safetensors"):
        parts |= load_file(file)
    found = {}
    for name in sorted({key.rpartition(".")[0] for key in parts}):
        codes, scales = parts[f"{name}.codes"], parts[f"{name}.scales"].float()
        numbers = torch.cat((codes % 16, codes // 16), dim=1) if kept == "int4" else codes
        groups = numbers.float().view(*scales.shape, -1)
        if kept == "int4":
            values = groups * scales[..., None] + parts[f"{name}.minimums"].float()[..., None]
        else:
            values = (groups - 128) * scales[..., None]
        found[name] = values.flatten(1)
    return found


def set_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Put them into a model in place of its own. Raises AttributeError for a name that it does not have."""
    with torch.no_grad():
        for name, value in weights.items():
            model.get_parameter(name).copy_(value)
