"""The shape of a store's model, and which prompts fit it."""

from __future__ import annotations

from dataclasses import replace

from checkpoint import family
from checkpoint.store import ExpertStore
from scheduler import types as t
from scheduler.errors import ConfigError, PromptError, PromptTooLongError


def model_shape(store: ExpertStore) -> t.ModelShape:
    """Layers, experts, top-k, hidden size and context of a store's model, for the scheduler."""
    manifest = store.manifest
    config = family.config_from_dict(manifest.config)
    by_layer = tuple(len(manifest.layers[layer].blobs) for layer in manifest.moe_layers)
    return family.shape_of(config, manifest.moe_layers, manifest.experts, by_layer)


def with_context(shape: t.ModelShape, context: int | None) -> t.ModelShape:
    """The shape with a smaller context. Raises ConfigError for one beyond the model's own."""
    return replace(shape, context=limited_context(shape.context, context))


def limited_context(own: int, limit: int | None) -> int:
    """The model's own context, or a smaller limit. Raises ConfigError for a limit beyond the model's own."""
    if limit is None:
        return own
    if not 2 <= limit <= own:
        raise ConfigError(f"ctx-size is {limit}; allowed: 2 to {own}, the model's own limit")
    return limit


def check_prompt(prompt: list[int], context: int, vocabulary: int) -> None:
    """Raises PromptError for a prompt that is empty, leaves no room for an answer or has an unknown token."""
    if not prompt:
        raise PromptError("the prompt is empty; give at least one token")
    if len(prompt) >= context:
        raise PromptTooLongError(f"the prompt has {len(prompt)} tokens, the model's context is {context}; shorten it")
    wrong = [token for token in prompt if not 0 <= token < vocabulary]
    if wrong:
        raise PromptError(
            f"the prompt has token {wrong[0]}; allowed: 0 to {vocabulary - 1}; use this model's tokenizer"
        )
