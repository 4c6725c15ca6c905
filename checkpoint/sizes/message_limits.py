"""The limits that a store's model sets to messages between nodes."""

from __future__ import annotations

from checkpoint import family
from checkpoint.store import ExpertStore
from scheduler.model_limits import ModelLimits

SMALLEST_FORM = 16
"""No form is smaller than the full one by more than this factor."""


def message_limits(store: ExpertStore) -> ModelLimits:
    """From a store's manifest and configuration; no weights are read."""
    manifest = store.manifest
    config = family.config_from_dict(manifest.config)
    text = config.get_text_config()
    forms = [manifest.blob_bytes, *(form.blob_bytes for form in manifest.forms.values())]
    hidden = int(text.hidden_size)
    return ModelLimits(
        experts={layer: len(spec.blobs) for layer, spec in manifest.layers.items()},
        context=family.context_of(config),
        vocabulary=getattr(text, "vocab_size", None) or 0,
        hidden=hidden,
        widths={
            layer: frozenset(
                {hidden, *(size for tensor in manifest.restored_layout(layer).tensors for size in tensor.shape)}
            )
            for layer in manifest.layers
        },
        depth=max(getattr(text, "num_hidden_layers", None) or 0, max(manifest.moe_layers) + 1),
        slot_bytes=max(forms),
        least_slot_bytes=manifest.blob_bytes // SMALLEST_FORM,
    )
