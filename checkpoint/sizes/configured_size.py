"""How large a model of a well-known family is, from its config.json alone: without torch and Transformers, whose import
takes longer than a plan.

Exact or nothing. What the family does not read, or what would change its layers in a way that is not known here, is
left to `checkpoint.sizes.model_size`, which builds the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scheduler.types import ModelSize

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LEAST_WINDOW = 2
"""The cache keeps a token less than the window."""
_LEAST_GROUP = 2
"""A group of experts is chosen by the sum of its best two scores."""


def configured_size(fields: Mapping[str, Any], dtype: str | None, context: int, name: str) -> ModelSize | None:
    """The same as `checkpoint.sizes.model_size.count`, or None where this file cannot be sure of that.

    `fields`: config.json. `dtype`: that of the weights; None for the checkpoint's own.
    """
    found = _Fields(fields)
    family = _FAMILIES.get(str(found.any("model_type")))
    try:
        return None if family is None else _size(found, family, dtype, context, name)
    except _NotSureError:
        return None


class _NotSureError(Exception):
    """The configuration has a key or a value whose effect is not known here."""


@dataclass(frozen=True, slots=True)
class _Attention:
    """Numbers of elements in one layer. `linear` stands for the weights of `nn.Linear`, which the shadow quantises,
    `other` for the rest, such as biases and norms."""

    linear: int
    other: int
    cache_row: int
    """Keys and values of one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """Numbers of elements, as in `_Attention`. Routers are not quantised."""

    attention: _Attention
    windows: tuple[int | None, ...] = ()
    """The window of each layer's attention, None where it forgets nothing; () for no windows at all."""
    experts: int
    expert: int
    top_k: int
    moe_layers: int
    moe_linear: int = 0
    """Shared experts of one MoE layer."""
    moe_other: int
    dense_mlp: int = 0
    """The MLP of one layer without experts."""


def _size(
    fields: _Fields, family: Callable[[_Fields], _Layers], dtype: str | None, context: int, name: str
) -> ModelSize:
    stored = fields.dtype()
    dtype = dtype or stored
    hidden, depth, vocab = (fields.count(key) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    longest, tied = fields.count("max_position_embeddings"), fields.truth("tie_word_embeddings")
    layers = family(fields)
    fields.check_rest(vocab)
    if dtype not in _ITEM_BYTES or layers.top_k > layers.experts or not 1 <= layers.moe_layers <= depth:
        raise _NotSureError
    linear = depth * layers.attention.linear + layers.moe_layers * layers.moe_linear
    linear += (depth - layers.moe_layers) * layers.dense_mlp
    norms = (2 * depth + 1) * hidden
    other = depth * layers.attention.other + layers.moe_layers * layers.moe_other + norms
    embedding = vocab * hidden
    dense = linear + other + (embedding if tied else 2 * embedding)
    context = min(context, longest)

    def cache(tokens: int) -> int:
        windows = layers.windows or (None,) * depth
        return layers.attention.cache_row * sum(tokens if w is None else min(tokens, w - 1) for w in windows)

    return ModelSize(
        name=f"{name} ({fields.any('model_type')}, {dtype})",
        dtype=dtype,
        item_bytes=_ITEM_BYTES[dtype],
        depth=depth,
        layers=layers.moe_layers,
        experts=layers.experts,
        top_k=layers.top_k,
        hidden=hidden,
        expert=layers.expert,
        experts_all=layers.moe_layers * layers.experts * layers.expert,
        dense=dense,
        read=dense - (0 if tied else embedding),
        linear=linear,
        cache_token=cache(1),
        cache=cache(context),
        context=context,
        context_max=longest,
        head=_head(fields, layers, hidden),
    )


def _head(fields: _Fields, layers: _Layers, hidden: int) -> int:
    """A layer with experts, and what joins a state with the next token's embedding (DeepSeek-V3 report, 2.2)."""
    if not has_head(fields.any("model_type"), fields.any("num_nextn_predict_layers")):
        return 0
    attention, experts = layers.attention.linear + layers.attention.other, layers.experts * layers.expert
    return attention + layers.moe_linear + layers.moe_other + experts + head_beside(hidden)


def has_head(model_type: object, count: object) -> bool:
    """Whether a model's weights may have a multi-token-prediction layer that can be read (`checkpoint.mtp_head`).
    `count`: `num_nextn_predict_layers`; None, 1 as for Transformers. What is published without says 1, too."""
    named = isinstance(count, int) and count > 0
    return model_type in ("deepseek_v3", "glm4_moe") and (count is None or named)


def head_beside(hidden: int) -> int:
    """Elements of norms and of the projection of such a layer, beside its attention and its experts."""
    return (2 + 3) * hidden + 2 * hidden * hidden


# --- families ---------------------------------------------------------------------------------------------------


def _attention(fields: _Fields, qkv_bias: bool = False, out_bias: bool = False, head_norms: bool = False) -> _Attention:
    """Grouped-query attention. `head_norms`: norms over each head's query and key."""
    hidden, heads, kv_heads = (
        fields.count(key) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    width = fields.count("head_dim", hidden // heads if hidden % heads == 0 else None)
    if heads % kv_heads or width % 2:
        raise _NotSureError
    query, keys = heads * width, kv_heads * width
    other = qkv_bias * (query + 2 * keys) + out_bias * hidden + head_norms * 2 * width
    return _Attention(hidden * (2 * query + 2 * keys), other, 2 * keys)


def _latent_attention(fields: _Fields) -> _Attention:
    """DeepSeek's multi-head latent attention; the cache keeps the latent and the rotary part of the keys."""
    hidden, heads, query_rank, rank, plain, rotary, values = (
        fields.count(key)
        for key in (
            *("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"),
            *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        )
    )
    if fields.count("num_key_value_heads") != heads or fields.truth("attention_bias", False) or rotary % 2:
        raise _NotSureError
    query = hidden * query_rank + query_rank * heads * (plain + rotary)
    keys = hidden * (rank + rotary) + rank * heads * (plain + values)
    return _Attention(query + keys + heads * values * hidden, query_rank + rank, rank + rotary)


def _mlp(fields: _Fields, width: str) -> int:
    """Gate, up and down projection."""
    return 3 * fields.count("hidden_size") * fields.count(width)


def _mixtral(fields: _Fields) -> _Layers:
    experts = fields.count("num_local_experts")
    window = fields.window()
    if not fields.has("head_dim") and fields.is_rope_scaled():  # then Transformers does not build it
        raise _NotSureError
    if window is not None and window < _LEAST_WINDOW:
        raise _NotSureError
    return _Layers(
        attention=_attention(fields),
        windows=() if window is None else (window,) * fields.count("num_hidden_layers"),
        experts=experts,
        expert=_mlp(fields, "intermediate_size"),
        top_k=fields.count("num_experts_per_tok"),
        moe_layers=fields.count("num_hidden_layers"),
        moe_other=experts * fields.count("hidden_size"),
    )


def _qwen(fields: _Fields, attention: _Attention, shared_linear: int = 0, shared_other: int = 0) -> _Layers:
    depth, experts, step = (
        fields.count("num_hidden_layers"),
        fields.count("num_experts"),
        fields.count("decoder_sparse_step", 1),
    )
    fields.window()
    if fields.truth("use_sliding_window", False):
        raise _NotSureError
    plain = fields.numbers("mlp_only_layers")
    return _Layers(
        attention=attention,
        experts=experts,
        expert=_mlp(fields, "moe_intermediate_size"),
        top_k=fields.count("num_experts_per_tok"),
        moe_layers=sum(layer not in plain and (layer + 1) % step == 0 for layer in range(depth)),
        moe_linear=shared_linear,
        moe_other=experts * fields.count("hidden_size") + shared_other,
        dense_mlp=_mlp(fields, "intermediate_size"),
    )


def _qwen2_moe(fields: _Fields) -> _Layers:
    if set(fields.layer_types() or ()) - {"full_attention"}:
        raise _NotSureError
    attention = _attention(fields, qkv_bias=fields.truth("qkv_bias", True))
    # The shared expert's gate is a linear layer of one output that is not quantised.
    return _qwen(fields, attention, _mlp(fields, "shared_expert_intermediate_size"), fields.count("hidden_size"))


def _qwen3_moe(fields: _Fields) -> _Layers:
    bias = fields.truth("attention_bias", False)
    return _qwen(fields, _attention(fields, bias, bias, head_norms=True))


def _olmoe(fields: _Fields) -> _Layers:
    bias, experts = fields.truth("attention_bias", False), fields.count("num_experts")
    attention = _attention(fields, bias, bias)
    if fields.has("head_dim"):
        raise _NotSureError
    norms = fields.count("hidden_size") + attention.cache_row // 2  # over all heads
    attention = replace(attention, other=attention.other + norms)
    return _Layers(
        attention=attention,
        experts=experts,
        expert=_mlp(fields, "intermediate_size"),
        top_k=fields.count("num_experts_per_tok"),
        moe_layers=fields.count("num_hidden_layers"),
        moe_other=experts * fields.count("hidden_size"),
    )


def _gpt_oss(fields: _Fields) -> _Layers:
    depth, hidden, experts = (fields.count(key) for key in ("num_hidden_layers", "hidden_size", "num_local_experts"))
    bias, width = fields.truth("attention_bias", True), fields.count("intermediate_size")
    attention = _attention(fields, bias, bias)
    attention = replace(attention, other=attention.other + fields.count("num_attention_heads"))  # a sink for each head
    types = fields.layer_types() or ("sliding_attention", "full_attention") * depth
    window = fields.window()
    if window is None or window < _LEAST_WINDOW or not fields.has("head_dim"):
        raise _NotSureError
    return _Layers(
        attention=attention,
        windows=tuple(window if kind == "sliding_attention" else None for kind in types[:depth]),
        experts=experts,
        expert=3 * hidden * width + 2 * width + hidden,
        top_k=fields.count("num_experts_per_tok"),
        moe_layers=depth,
        moe_other=experts * (hidden + 1),
    )


def _after_dense_layers(fields: _Fields, attention: _Attention) -> _Layers:
    """The first layers are dense; each of the others has experts, in groups, and shared experts."""
    experts, groups = fields.count("n_routed_experts"), fields.count("n_group")
    if experts % groups or experts // groups < _LEAST_GROUP or fields.count("topk_group") > groups:
        raise _NotSureError
    return _Layers(
        attention=attention,
        experts=experts,
        expert=_mlp(fields, "moe_intermediate_size"),
        top_k=fields.count("num_experts_per_tok"),
        moe_layers=fields.count("num_hidden_layers") - fields.number("first_k_dense_replace"),
        moe_linear=_mlp(fields, "moe_intermediate_size") * fields.count("n_shared_experts"),
        moe_other=experts * fields.count("hidden_size"),
        dense_mlp=_mlp(fields, "intermediate_size"),
    )


def _deepseek_v3(fields: _Fields) -> _Layers:
    return _after_dense_layers(fields, _latent_attention(fields))


def _glm4_moe(fields: _Fields) -> _Layers:
    bias, norms = fields.truth("attention_bias", False), fields.truth("use_qk_norm", False)
    return _after_dense_layers(fields, _attention(fields, qkv_bias=bias, head_norms=norms))


_FAMILIES: dict[str, Callable[[_Fields], _Layers]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
}

# --- the fields of config.json ----------------------------------------------------------------------------------

_WITHOUT_EFFECT: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("architectures", "auto_map"), (list, dict)),
    **dict.fromkeys(("transformers_version", "_name_or_path", "scoring_func", "topk_method"), (str,)),
    **dict.fromkeys(("initializer_range", "rms_norm_eps", "router_aux_loss_coef", "aux_loss_alpha"), (float,)),
    **dict.fromkeys(("routed_scaling_factor", "router_jitter_noise", "partial_rotary_factor"), (float,)),
    **dict.fromkeys(("attention_dropout", "rope_theta"), (float, int)),
    **dict.fromkeys(("use_cache", "output_router_logits", "norm_topk_prob", "seq_aux"), (bool,)),
    **dict.fromkeys(("max_window_layers", "pretraining_tp", "ep_size", "num_nextn_predict_layers"), (int,)),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), (int, type(None))),
}
"""Keys that leave the sizes as they are, with the types for which that is certain."""
_ROPE_KEYS = ("rope_parameters", "rope_scaling")
_ROPE = {
    "default": {"rope_theta", "partial_rotary_factor"},
    "yarn": {
        *("rope_theta", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("original_max_position_embeddings", "partial_rotary_factor"),
    },
}
"""Kinds of rotary embeddings, and what each reads."""


class _Fields:
    """Reads config.json and notes what has been read. Every method raises _NotSureError for a value that it does not
    expect."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self._read = {"pad_token_id", "hidden_act", *_ROPE_KEYS}

    def has(self, key: str) -> bool:
        return self._fields.get(key) is not None

    def any(self, key: str) -> Any:
        self._read.add(key)
        return self._fields.get(key)

    def number(self, key: str, default: int | None = None) -> int:
        """An integer of at least 0."""
        found = self.any(key) if key in self._fields else default
        if type(found) is not int or found < 0:
            raise _NotSureError
        return found

    def count(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        found = self.number(key, default)
        if found < 1:
            raise _NotSureError
        return found

    def truth(self, key: str, default: bool | None = None) -> bool:
        found = self.any(key)
        if key not in self._fields and default is not None:
            return default
        if type(found) is not bool:
            raise _NotSureError
        return found

    def numbers(self, key: str) -> list[int]:
        found = self.any(key) or []
        if type(found) is not list or any(type(one) is not int for one in found):
            raise _NotSureError
        return found

    def window(self) -> int | None:
        found = self.any("sliding_window")
        if found is not None and (type(found) is not int or found < 0):
            raise _NotSureError
        return found

    def layer_types(self) -> tuple[str, ...] | None:
        """A type for each layer."""
        found = self.any("layer_types")
        if found is None:
            return None
        if type(found) is not list or len(found) != self.count("num_hidden_layers"):
            raise _NotSureError
        if any(kind not in ("full_attention", "sliding_attention") for kind in found):
            raise _NotSureError
        return tuple(found)

    def dtype(self) -> str:
        """The checkpoint's."""
        found = [self.any(key) for key in ("dtype", "torch_dtype") if key in self._fields]
        if len(found) > 1 or any(type(one) is not str or one not in _ITEM_BYTES for one in found):
            raise _NotSureError
        return found[0] if found else "float32"

    def is_rope_scaled(self) -> bool:
        found = [self._fields.get(key) or {} for key in _ROPE_KEYS]
        return any(
            type(one) is not dict or one.get("rope_type", "default") != "default" or "type" in one for one in found
        )

    def check_rest(self, vocab: int) -> None:
        """Whether every key that was not read is without effect."""
        padding = self._fields.get("pad_token_id")
        if padding is not None and (type(padding) is not int or not 0 <= padding < vocab):
            raise _NotSureError
        if self._fields.get("hidden_act", "silu") != "silu":
            raise _NotSureError
        for key in _ROPE_KEYS:
            _check_rope(self._fields.get(key))
        for key in self._fields.keys() - self._read:
            value = self._fields[key]
            if type(value) not in _WITHOUT_EFFECT.get(key, ()) or (type(value) is float and not math.isfinite(value)):
                raise _NotSureError


def _check_rope(found: Any) -> None:
    if found is None:
        return
    if type(found) is not dict:
        raise _NotSureError
    kind = found.get("rope_type", found.get("type"))
    values = {key: value for key, value in found.items() if key not in ("rope_type", "type")}
    if (
        type(kind) is not str
        or kind not in _ROPE
        or values.keys() - _ROPE[kind]
        or (kind == "yarn" and "factor" not in values)
    ):
        raise _NotSureError
    if any(type(value) not in (int, float, bool) for value in values.values()):
        raise _NotSureError
