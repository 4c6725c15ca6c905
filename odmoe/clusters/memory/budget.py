"""`--memory`: a budget for all that the nodes of this machine hold. The workers' slots get what the rest leaves."""

from __future__ import annotations

import json
from dataclasses import dataclass

from checkpoint.family import config_from_dict, parse_dtype
from checkpoint.mtp_head import head_bytes
from checkpoint.sizes.configured_size import configured_size
from checkpoint.sizes.model_size import count
from checkpoint.store import ExpertStore
from main_node.shape import limited_context, model_shape
from odmoe.settings.declarations import CUDA
from odmoe.settings.settings import Settings
from odmoe.settings.units import parse_memory
from odmoe.terminal import megabytes
from scheduler.core.dispatch import LEAST_ROWS, MOST_PARTS
from scheduler.planning.role_bytes import CPU_REST_BYTES, GPU_REST_BYTES, quantised_bytes
from scheduler.planning.shadow_bytes import SHADOW_BYTES
from scheduler.timing.profile import find_profile
from scheduler.types import ModelShape, ModelSize

ACTIVATION_BYTES = 256 << 20
"""Memory for the rows that one expert computes at once, within a process."""

_ROWS_KEPT = 16
"""Assumed: rows as wide as an embedding that a layer of the main node has at once, for each row of a pass."""
_INT8_SCALE_BYTES = 4
"""For each row of a quantised weight."""
_sizes: dict[tuple[str, str, int], ModelSize] = {}


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes. `shares`: of everything but the slots and the memory to restore experts, by name."""

    total: int
    shares: dict[str, int]

    @property
    def bytes_left(self) -> int:
        """For the slots of all workers, and for restoring experts; negative where there is nothing left."""
        return self.total - sum(self.shares.values())

    def text(self, more: dict[str, int] | None = None) -> str:
        """`dense 12 MB, kv 3 MB, ...`, and `more` shares."""
        return ", ".join(f"{name} {megabytes(size)}" for name, size in (self.shares | (more or {})).items() if size)


def memory_budget(memory: str, settings: Settings, store: ExpertStore, predictor_bytes: int) -> MemoryBudget:
    """Of `memory`, bytes or a share of the whole model: its dense weights, and all experts as the store keeps them.

    `predictor_bytes`: of the weights of a predictor of experts. KV caches have room for --parallel requests of
    --ctx-size tokens, activations for a prompt as long as that. The page-locked copy of all experts from which --loader
    cuda copies is host memory, as a store is: it is no share.
    """
    shape = model_shape(store)
    tokens = limited_context(shape.context, settings.ctx_size)
    size = _model_size(store, tokens)
    dense = size.dense * size.item_bytes - store.manifest.dense_saved
    total = parse_memory(memory, dense + store.manifest.expert_bytes)
    kv = settings.parallel * size.cache * size.item_bytes
    if settings.drafts_by_head:
        predictor_bytes += head_bytes(store)
        kv += kv // _attending_layers(store)
    shares = {
        "dense": dense,
        "kv": kv + settings.kept_bytes,
        "activations": _activation_bytes(settings, store, shape, tokens),
        "predictor": predictor_bytes,
        "shadow": _shadow_bytes(settings, store, size) + settings.shadow_kept_bytes if settings.has_shadow else 0,
    }
    return MemoryBudget(total, shares)


def _attending_layers(store: ExpertStore) -> int:
    """Of which the KV cache has rows."""
    fields = store.manifest.config
    return fields.get("layer_types", []).count("full_attention") or int(fields["num_hidden_layers"])


def rows_travel(settings: Settings) -> bool:
    """Between processes, or over a network that is emulated. Raises ConfigError for a profile that there is not."""
    emulated = settings.profile is not None and find_profile(settings.profile).is_networked
    return settings.cluster != "embedded" or emulated


def rows_at_once(store: ExpertStore, shape: ModelShape) -> int:
    """Within a process no row travels, so that mini-batches would only repeat the work for an expert: it computes all
    rows of a prompt at once, as many as `ACTIVATION_BYTES` allow."""
    return max(LEAST_ROWS, ACTIVATION_BYTES // _bytes_a_row(store, shape))


def _bytes_a_row(store: ExpertStore, shape: ModelShape) -> int:
    """Of what an expert computes for a row."""
    itemsize = parse_dtype(store.manifest.dtype).itemsize
    return (store.manifest.restored_bytes // itemsize // shape.hidden + shape.hidden) * itemsize


def _activation_bytes(settings: Settings, store: ExpertStore, shape: ModelShape, tokens: int) -> int:
    """Of the main node's pass over a whole prompt, with the rows that it sends and gets back, and of every worker's
    computation."""
    itemsize = parse_dtype(store.manifest.dtype).itemsize
    main = tokens * shape.hidden * (_ROWS_KEPT + 2 * shape.top_k) * itemsize
    if settings.mini_batch is not None:
        rows = settings.mini_batch
    elif not rows_travel(settings):
        rows = rows_at_once(store, shape)
    else:
        rows = max(LEAST_ROWS, -(-tokens // MOST_PARTS))
    return main + settings.workers * min(rows, tokens) * _bytes_a_row(store, shape)


def _shadow_bytes(settings: Settings, store: ExpertStore, size: ModelSize) -> int:
    """Weights, and KV caches as the main node's, twice: rows that were aligned are kept beside the shadow's own. On a
    CPU what is not quantised has 4 bytes an element."""
    device = settings.device_of("shadow").partition(",")[0]
    rest = CPU_REST_BYTES if device in ("auto", "cpu") and settings.loader_used != CUDA else GPU_REST_BYTES
    item = SHADOW_BYTES[settings.shadow]
    in_int8 = size.linear * (item.linear == 1) + size.experts_all * (item.expert == 1)
    tensors = [spec for layer in store.manifest.layers for spec in store.manifest.restored_layout(layer).tensors]
    narrowest = min(spec.shape[-1] for spec in tensors if len(spec.shape) > 1)
    scales = _INT8_SCALE_BYTES * in_int8 // min(narrowest, size.hidden)
    unquantised = size.dense - size.linear + 2 * settings.parallel * size.cache
    return quantised_bytes(size, settings.shadow) + scales + unquantised * rest


def _model_size(store: ExpertStore, tokens: int) -> ModelSize:
    """With a KV cache of so many tokens. Raises CheckpointError where the configuration does not tell."""
    manifest = store.manifest
    key = json.dumps(manifest.config, sort_keys=True), manifest.dtype, tokens
    if key not in _sizes:
        found = configured_size(manifest.config, manifest.dtype, tokens, "model")
        dtype = parse_dtype(manifest.dtype)
        _sizes[key] = found or count(config_from_dict(manifest.config), dtype, tokens)
    return _sizes[key]
