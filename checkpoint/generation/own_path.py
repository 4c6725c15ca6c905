"""What a model's own `generate` would have it read in a pass: the next token, or once more all of them.

Phi-MoE drops its cache where its rotary factors change. Its class says so in `prepare_inputs_for_generation`, which is
asked here before every pass of a model whose class has its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationMixin

from checkpoint.devices.transfer import token_ids
from checkpoint.row_caches import seen_at

_ASKED = "prepare_inputs_for_generation"
_PROVED = {
    "Glm4vMoeForConditionalGeneration._prepare_position_ids_for_generation",
    "Qwen3VLMoeForConditionalGeneration._prepare_position_ids_for_generation",
    "Glm4vMoeForConditionalGeneration._expand_multimodal_outputs",
}
"""Methods of families that change nothing for a text alone: `tests/families` compares their answers."""
_PLAIN = {"past_key_values", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "inputs_embeds"}
"""What may be passed beside the tokens. Without images and padding, the model's `forward` makes the same of nothing."""


class OwnPath:
    """Of one model. `unfollowed`: in words, where its `generate` does what is not done here; empty: nowhere so far."""

    def __init__(self, model: Any) -> None:
        own = _own_methods(type(model))
        self.unfollowed = sorted(f"{name} of Transformers" for method, name in own.items() if method != _ASKED)
        self._own = own.get(_ASKED)
        self._model = model

    @property
    def asks(self) -> bool:
        """Whether the family has its own way. Else all tokens but the new ones are always in the cache."""
        return self._own is not None

    def reads_again(self, tokens: Sequence[int], new: int, cache: Any) -> bool:
        """Whether a pass over the last `new` of `tokens` begins with an empty cache and all of them instead. `cache`:
        of those before; only its length matters."""
        if not self.asks:
            return False
        ids = token_ids(tokens, self._model.device)
        positions = torch.arange(len(tokens), device=ids.device)[None]
        try:
            given = self._model.prepare_inputs_for_generation(
                ids,
                next_sequence_length=new,
                past_key_values=cache,
                attention_mask=torch.ones_like(ids),
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
            )
        except Exception as error:  # noqa: BLE001 - a family's own code, which may want what is not known here
            self.unfollowed = [f"{self._own} of Transformers ({type(error).__name__})"]
            self._own = None
            return False
        kept = given.get("past_key_values") is cache
        count = new if kept else len(tokens)
        followed = (
            (kept or given.get("past_key_values") is None)
            and {name for name, value in given.items() if value is not None} <= {"input_ids", *_PLAIN}
            and torch.equal(given["input_ids"], ids[:, -count:])
            and torch.equal(given.get("position_ids", positions)[..., -count:], positions[:, -count:])
        )
        if not followed and not self.unfollowed:
            self.unfollowed = [f"{self._own} of Transformers"]
        return followed and not kept

    def until_again(self, tokens: Sequence[int], more: tuple[int, ...], cache: Any) -> tuple[int, ...]:
        """Of `more`, read one by one after `tokens`, those before which nothing is read again. `cache`: of `tokens` but
        the last."""
        read = list(tokens)
        for count, token in enumerate(more):
            read.append(token)
            if self.reads_again(read, 1, seen_at(cache, len(read) - 1)):
                return more[:count]
        return more


def _own_methods(cls: type) -> dict[str, str]:
    """Method of Transformers' `generate` -> its full name, where the class has another one than usual."""
    found = {}
    for name, usual in vars(GenerationMixin).items():
        method = inspect.getattr_static(cls, name)
        if inspect.isfunction(usual) and method is not usual:
            found[name] = getattr(inspect.unwrap(method), "__qualname__", f"{cls.__name__}.{name}")
    return {name: full for name, full in found.items() if full not in _PROVED}
