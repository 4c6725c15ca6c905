"""How an answer's tokens are chosen, as the client says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "guidance_scale": (None, 1.0),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "stop_strings": (None,),
    "use_cache": (None, True),
    "cache_implementation": ("dynamic", "dynamic_full", "offloaded", None),
    "prefill_chunk_size": (None,),
}
"""Generation settings that are not supported, since they need several passes a token, the tokenizer or another cache.
With them, the values that change nothing."""

NEUTRAL = {name: values[-1] for name, values in UNSUPPORTED.items()}
"""Keyword arguments with which `generate` uses none of them."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Arguments of Transformers' `generate`, and those of OpenAI's API that it lacks. None: as in the model's
    generation settings.

    A temperature above 0, top-k, top-p or min-p draw even without `draw`. Temperature 0 never does. Penalties and
    biases change the logits before temperature, top-k, top-p and min-p do; a token that is not drawn is the one whose
    logit is then the highest.
    """

    draw: bool = False
    """Draw with the model's own settings."""
    temperature: float | None = None
    top_k: int | None = None
    """0: among all tokens. Transformers' own default is 50."""
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    """None: a random one."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the answer has so far. The prompt's do not count."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as the answer has it so far."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    min_p: float | None = None
    """Draw among tokens of at least this share of the most probable one's probability (Transformers'
    MinPLogitsWarper)."""

    @property
    def is_random(self) -> bool:
        """Whether tokens are drawn. Else the most probable one is taken."""
        given = bool(self.temperature) or any(one is not None for one in (self.top_k, self.top_p, self.min_p))
        return self.temperature != 0 and (self.draw or given)

    def overrides(self) -> dict[str, Any]:
        """Keyword arguments for `generate`."""
        names = ("temperature", "top_k", "top_p", "min_p") if self.is_random else ()
        given = {name: getattr(self, name) for name in (*names, "repetition_penalty")}
        return {"do_sample": self.is_random} | {name: value for name, value in given.items() if value is not None}


GREEDY = Sampling()


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `MainNode.generate` beside prompt and length. It documents them."""

    ignore_eos: bool
    sampling: Sampling
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logprobs: int | None
    prompt_logprobs: int | None
    schema: str | None


def ignored_settings(model: Any) -> list[str]:
    """`name=value` of the model's generation settings that would change its tokens and are not supported."""
    settings = model.generation_config
    found = {name: getattr(settings, name, None) for name in UNSUPPORTED}
    return [f"{name}={value}" for name, value in found.items() if value not in UNSUPPORTED[name]]
