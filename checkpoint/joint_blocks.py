"""Several blocks of a prompt in one forward pass of the dense part, each row with the bits of a pass for its block.

Attention is computed block by block, as such passes would; all else for the rows of all blocks at once. That a row's
bits do not depend on the rows beside it is found out by comparison, once for a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from checkpoint import family, kv
from checkpoint.dense import experts_replaced
from checkpoint.devices.inference import inference
from checkpoint.expert import is_elementwise
from checkpoint.joint_rows import LEAST_ROWS, PROBE_ROWS
from checkpoint.kernels import KernelLinear, probes
from checkpoint.linear_batch import BatchLinear

MOST_TOKENS = 512
"""Of a pass. More would be hardly faster, and take longer to compare."""
_MOST_WEIGHTS = 1 << 26
"""Of the products that are compared: with more the comparison could take seconds."""
_GATES = 2
"""So many layers with experts are compared as a whole."""
_LANES = 32
"""Of the longest vector of a processor."""
_OTHERS = torch.nn.Linear, torch.nn.Embedding
"""Modules with a weight of two dimensions that are no gates, or that are compared as linear layers."""
_ATTENTION = "sdpa"
_block: ContextVar[int] = ContextVar("block", default=0)


@contextlib.contextmanager
def in_blocks(block: int) -> Iterator[None]:
    """Meanwhile the calling coroutine's passes compute attention for so many of their tokens at a time."""
    token = _block.set(block)
    try:
        yield
    finally:
        _block.reset(token)


def joint_tokens(model: Any, block: int) -> int:
    """Most tokens of a pass that computes several blocks as passes of their own would; `block`: it computes one.

    To find out, some products are computed, and two layers of random tokens.
    """
    most = MOST_TOKENS // block * block
    if most <= block or not _can_compare(model, block):
        return block
    _install()
    with inference():
        return most if _share_products(model, most) and _have_same_bits(model, block, most) else block


def _can_compare(model: Any, block: int) -> bool:
    config = model.config.get_text_config()
    plain = (torch.nn.Linear.forward, KernelLinear.forward, BatchLinear.forward)
    for module in model.modules():
        if isinstance(module, KernelLinear) and module.kernel.kernel != "exact":
            return False
        if hasattr(module, "in_features") and type(module).forward not in plain:
            return False
    if model.device.type != "cpu" or config._attn_implementation != _ATTENTION:
        return False
    if torch.get_num_threads() == 1 and block % _LANES == 0:  # a value is in the same lane of a vector either way
        return True
    return is_elementwise(ACT2FN[getattr(config, "hidden_act", None) or "silu"], model.dtype)


def _share_products(model: Any, most: int) -> bool:
    """Whether a row has the same bits in a product of `most` rows and in one of fewer, down to `LEAST_ROWS`."""
    ends = [one.weight for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]
    weights = [one for one in model.parameters() if one.dim() == 2 and not any(one is end for end in ends)]
    biased = {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Linear) and one.bias is not None}
    shapes = {(one.shape, one.dtype, id(one) in biased): one for one in weights if not one.is_meta}
    if sum(shape.numel() for shape, _, _ in shapes) > _MOST_WEIGHTS:
        return False
    return all(_shares(weight, most, has_bias) for (_, _, has_bias), weight in shapes.items())


def _shares(weight: torch.Tensor, most: int, has_bias: bool = False) -> bool:
    bias = weight.new_zeros(len(weight)) if has_bias else None  # of no value, or it would hide how sums are rounded
    for rows, made in probes((most,), weight):
        whole = functional.linear(rows, made, bias)
        for count in (most // 2, *(one for one in PROBE_ROWS if LEAST_ROWS <= one < most)):
            first, last = (functional.linear(one.clone(), made, bias) for one in (rows[:count], rows[-count:]))
            if not (torch.equal(first, whole[:count]) and torch.equal(last, whole[-count:])):
                return False
    return True


@contextlib.contextmanager
def _watching(model: Any, found: dict[torch.nn.Module, list[torch.Tensor]]) -> Iterator[None]:
    """Meanwhile `found` gets the logits [T, E] of each gate that is no linear layer. Such a gate may multiply in
    another dtype than its weight's, and round what it gives."""

    def keep(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        for one in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(one, torch.Tensor) and one.is_floating_point() and one.shape[-1] == len(module.weight):  # type: ignore[arg-type]
                found.setdefault(module, []).append(one.flatten(0, -2))

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.Tensor) and weight.dim() == 2 and not isinstance(module, _OTHERS):
                hooks.callback(module.register_forward_hook(keep).remove)
        yield


class _Seen(Exception):
    """Ends a pass whose gates have been seen."""


def _have_same_bits(model: Any, block: int, most: int) -> bool:
    """Compares what the first gates get and give, and the cache's rows, of a pass over several blocks and of one a
    block. Also whether the gates' products share rows, in the dtype of their logits."""
    config = model.config.get_text_config()
    whole_count = 3 * block + LEAST_ROWS + 1
    count = min(whole_count, getattr(config, "max_position_embeddings", None) or whole_count)
    if count < block + LEAST_ROWS:
        return False
    vocabulary, generator = model.get_input_embeddings().num_embeddings, torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (1, count), generator=generator)
    logits: dict[torch.nn.Module, list[torch.Tensor]] = {}
    with _watching(model, logits):
        joint = _gates(model, tokens, count, block)
    wholes = {module: torch.cat(parts) for module, parts in logits.items()}
    logits.clear()
    with _watching(model, logits):
        apart = _gates(model, tokens, block, block)
    for module, whole in wholes.items():
        weight: Any = module.weight
        if not torch.equal(whole, torch.cat(logits[module])):
            return False
        if whole.dtype != weight.dtype and not _shares(weight.to(whole.dtype), most):
            return False
    return len(joint) == len(apart) and all(torch.equal(*pair) for pair in zip(joint, apart, strict=True))


def _gates(model: Any, tokens: torch.Tensor, at_once: int, block: int) -> list[torch.Tensor]:
    """What the first gates get and give of `tokens` [1, T], of which a pass reads so many, and the cache's rows."""
    cache, seen = family.new_cache(model.config), dict[int, list[tuple[torch.Tensor, ...]]]()
    last = list(family.experts_modules(model))[:_GATES][-1]

    def experts_of(layer: int) -> Any:
        def experts(*found: torch.Tensor) -> torch.Tensor:
            seen.setdefault(layer, []).append(found)
            if layer == last:
                raise _Seen
            return found[0].clone()

        return experts

    with experts_replaced(model, experts_of), in_blocks(block):
        for part in tokens.split(at_once, dim=1):
            with contextlib.suppress(_Seen):
                model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    gates = [torch.cat(parts) for layer in seen.values() for parts in zip(*layer, strict=True)]
    return gates + [rows.tensor for layer in cache.layers for rows in kv.growing_of(layer).values()]


def _install() -> None:
    """Once for the process: outside of `in_blocks`, attention is Transformers' own."""
    own = ALL_ATTENTION_FUNCTIONS[_ATTENTION]
    if getattr(own, "by_blocks", False):
        return

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **how: Any,
    ) -> tuple[torch.Tensor, None]:
        """`query` [1, heads, T, D], `key` and `value` [1, heads, K, D] -> [1, T, heads, D]."""
        block, count, past = _block.get(), query.shape[2], key.shape[2] - query.shape[2]
        if not block or count <= block:
            return own(module, query, key, value, attention_mask, **how)  # type: ignore[no-any-return]
        outputs = []
        for start in range(0, count, block):
            stop = min(start + block, count)
            keys, values = (one[:, :, : past + stop] for one in (key, value))
            part = _mask(attention_mask, past, start, stop, query.device)
            outputs.append(own(module, query[:, :, start:stop], keys, values, part, **how)[0])
        return torch.cat(outputs, dim=1), None

    vars(attention)["by_blocks"] = True
    ALL_ATTENTION_FUNCTIONS[_ATTENTION] = attention


def _mask(mask: torch.Tensor | None, past: int, start: int, stop: int, device: torch.device) -> torch.Tensor | None:
    """As Transformers makes it for a pass over [start, stop). None: each token sees all before it."""
    if mask is not None:
        return mask[:, :, start:stop, : past + stop].contiguous()
    if not past + start:
        return None
    whole = torch.ones(stop - start, past + stop, dtype=torch.bool, device=device)
    return whole.tril(past + start)[None, None]
