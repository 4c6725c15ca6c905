"""Rotary position embeddings that remember nothing, so that an answer does not depend on others.

Transformers' rotary modules choose their factors by the largest position that a pass reads (`longrope`, Phi-MoE), and
`dynamic` keeps those of the longest pass so far. Both are right for one request whose prompt is read at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


class Rotary:
    """Of one model: each call gives what a new model would for a request alone.

    While a pass reads a chunk of a prompt, `tokens` is the number of tokens of the whole; else 0.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.tokens = 0
        self.chunks = True
        """A prompt may be read in chunks. Not so where layers rotate compressed rows by factors that depend on the
        length, of which the last one's position counts (DeepSeek-V4)."""
        self.by_length = False
        """Factors depend on the length of the whole prompt, and so do the keys of all its tokens."""
        self.unfollowed: list[str] = []
        """As `OwnPath.unfollowed`: there, `dynamic` goes on from the length of the pass before."""
        for name, module in model.named_modules():
            kinds = _kinds(module)
            self.by_length |= any(kind == "longrope" or "dynamic" in kind for kind in kinds.values())
            if ".layers." in name and any(kind == "longrope" or "dynamic" in kind for kind in kinds.values()):
                self.chunks = False
                if any("dynamic" in kind for kind in kinds.values()):
                    self.unfollowed = ["dynamic RoPE scaling of compressed rows"]
            if set(kinds.values()) - {"default"}:
                kept = [prefix for prefix, kind in kinds.items() if "dynamic" in kind]
                vars(module)["forward"] = partial(self._forward, module, module.forward, kept)

    def _forward(
        self,
        module: Any,
        own: Any,
        kept: list[str],
        x: torch.Tensor,
        position_ids: torch.Tensor,
        *args: Any,
        **how: Any,
    ) -> Any:
        """As the module's `own` forward. `position_ids` [..., T] -> a tensor, or several, [..., T, D]."""
        for prefix in kept:  # what `dynamic` has computed before
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
        if not self.tokens:
            return own(x, position_ids, *args, **how)
        last = position_ids.new_full((*position_ids.shape[:-1], 1), self.tokens - 1)
        found = own(x, torch.cat([position_ids, last], dim=-1), *args, **how)
        return found[..., :-1, :] if isinstance(found, torch.Tensor) else tuple(one[..., :-1, :] for one in found)


def _kinds(module: torch.nn.Module) -> dict[str, str]:
    """Prefix of a rotary module's attributes -> kind of scaling; one for each type of layer that it serves."""
    found: Any = getattr(module, "rope_type", None)
    if isinstance(found, dict):
        return {f"{layers}_": kind for layers, kind in found.items()}
    return {"": found} if isinstance(found, str) else {}
