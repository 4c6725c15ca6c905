"""The shadow's weights: every linear layer and every expert quantised, by bitsandbytes where possible.

    fp16   float16 weights
    int8   LLM.int8(): int8 weights, a scale a row, activations quantised except outliers (Linear8bitLt)
    nf4    4-bit NormalFloat, a scale a block, float32 or bfloat16 activations (Linear4bit)
    int8-nf4, int8-int2   experts in fewer bits than the dense part: nf4, or int2 by HQQ (`checkpoint.forms`)

Routers, norms, embeddings and the output head are not quantised. Build that dense model in `compute_dtype(...)`.
Importing this module does not import bitsandbytes, which takes over a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoint import forms
from checkpoint.devices.transfer import to_device, to_host
from checkpoint.native.encoded_linear import EncodedLinear
from scheduler.errors import CheckpointError, ConfigError, StoreError

SCHEMES = ("fp16", "int8", "nf4")
MIXED_SCHEMES = ("int8-nf4", "int8-int2")
"""Dense part, then experts."""

INT8_THRESHOLD = 6.0
"""Activation columns above it are multiplied in floating point: the default of LLM.int8() and Transformers."""

_NF4_PACK_ROWS = 32
_FEW_ROWS = 4
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_NOT_CALLED = frozenset({"dt_proj"})
"""Linear layers that are never called: their family multiplies with their weights itself (Jamba's time steps)."""
_NOISE = {
    "bitsandbytes.autograd._functions": "MatMul8bitLt: inputs will be cast from",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
}


def check_scheme(name: str) -> str:
    """The name itself. Raises ConfigError for an unknown one."""
    if name not in (*SCHEMES, *MIXED_SCHEMES):
        raise ConfigError(f"shadow scheme {name!r} is unknown; allowed: {', '.join((*SCHEMES, *MIXED_SCHEMES))}")
    return name


def compute_dtype(scheme: str, device: str | torch.device) -> torch.dtype:
    """The dtype of the shadow's dense model, and so of hidden states, KV rows and unquantised weights.

    float32 on a CPU: it is fast everywhere, and routing is sensitive to rounding. On a GPU float16 for fp16 and int8,
    which bitsandbytes uses there anyway, and bfloat16 for nf4. Raises ConfigError.
    """
    check_scheme(scheme)
    if torch.device(device).type == "cpu":
        return torch.float32
    return torch.bfloat16 if scheme == "nf4" else torch.float16


class RestoredLinear(nn.Module):
    """y = x W^T + b, W in 2 bits and restored each time. [..., in] -> [..., out] in the dtype of x.

    Raises CheckpointError for a weight too large to be scaled.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> None:
        super().__init__()
        self._shape = weight.shape
        try:
            parts = forms.quantise_weight(weight, forms.FORMS["int2"])
        except OverflowError as error:
            raise CheckpointError(
                f"the shadow cannot quantise a weight of shape {tuple(weight.shape)} to int2: {error}; "
                "take another scheme, such as nf4"
            ) from error
        for name, tensor in parts.items():
            self.register_buffer(name, tensor.to(device), persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.empty(self._shape, dtype=x.dtype, device=x.device)
        parts = {f"weight.{name}": buffer for name, buffer in self.named_buffers()}
        scratch = _scratch(x.device)
        forms.restore_into({"weight": weight}, parts, forms.FORMS["int2"], scratch, torch.get_num_threads())
        return F.linear(x, weight, self.bias)


@cache
def _scratch(device: torch.device) -> forms.Scratch:
    return forms.Scratch.for_weights(forms.PIECE if device.type == "cpu" else forms.DEVICE_PIECE, str(device))


class HalfLinear(nn.Module):
    """y = x W^T + b, W in float16. [..., in] -> [..., out] in the dtype of x."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        # CPUs read float16 faster than float32, but multiply many rows of it slowly.
        if x.device.type == "cpu" and x.numel() > _FEW_ROWS * self.in_features:
            y = F.linear(x.float(), self.weight.float()).to(x.dtype)
        else:
            y = F.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)
        return y if self.bias is None else y + self.bias


def quantise_linear(
    weight: Tensor, bias: Tensor | None, scheme: str, device: str | torch.device, of_expert: bool = False
) -> nn.Module:
    """A quantised layer [n, in] -> [n, out] without references to `weight` [out, in] and `bias` [out].

    Raises ConfigError for an unknown scheme, CheckpointError for a weight that is not a matrix of numbers, or is too
    large for int2.
    """
    dtype, device = compute_dtype(scheme, device), torch.device(device)
    if weight.dim() != 2 or weight.is_meta or not weight.is_floating_point():
        raise CheckpointError(
            f"cannot quantise a {weight.dtype} weight of shape {tuple(weight.shape)} on {weight.device.type}; "
            "a linear layer's is [out, in], in floating point, with its values loaded"
        )
    weight = weight.detach()
    own_bias = None if bias is None else bias.detach().to(device, dtype, copy=True)
    dense, _, experts = scheme.partition("-")
    kind = experts or dense if of_expert else dense
    if kind == "int2":
        return RestoredLinear(weight, own_bias, device).eval()
    if kind == "fp16":
        return HalfLinear(weight.to(device, torch.float16, copy=True).contiguous(), own_bias).eval()
    layer = _int8_linear(weight) if kind == "int8" else _nf4_linear(weight, dtype)
    layer.bias = None if own_bias is None else nn.Parameter(own_bias, requires_grad=False)
    layer = layer.to(device).eval()  # eval: in training mode bitsandbytes dequantises on CPUs instead
    if kind == "nf4" and device.type == "cpu":
        layer(torch.zeros(1, weight.shape[1], dtype=dtype))  # repacks the weight now, not in the first pass
    return layer


def _int8_linear(weight: Tensor) -> Any:
    """Quantised when moved from the CPU to a device. Rows are float16, as LLM.int8() needs."""
    nn8 = _bitsandbytes().nn
    out_features, in_features = weight.shape
    layer = nn8.Linear8bitLt(
        in_features, out_features, bias=False, has_fp16_weights=False, threshold=INT8_THRESHOLD, device="meta"
    )
    layer.weight = nn8.Int8Params(weight.to("cpu", torch.float16), requires_grad=False, has_fp16_weights=False)
    plain = layer.forward

    def forward(x: Tensor) -> Tensor:
        """As `plain`, without its work for training, a third of a small layer's time. Flattens rows, since bitsandbytes
        takes at most three dimensions and latent attention has four."""
        if layer.state.CB is None or layer.training or not x.numel():
            return plain(x.flatten(0, -2)).unflatten(0, x.shape[:-1]) if x.dim() > 3 else plain(x)
        rows = x.reshape(-1, x.shape[-1])
        ops = torch.ops.bitsandbytes
        quantised, scale, outliers = ops.int8_vectorwise_quant.default(rows.to(torch.float16), INT8_THRESHOLD)
        out, _ = ops.int8_mixed_scaled_mm.default(
            rows, quantised, layer.state.CB, scale, layer.state.SCB, outliers, layer.bias
        )
        return out.view(*x.shape[:-1], -1)

    layer.forward = forward
    return layer


def _nf4_linear(weight: Tensor, dtype: torch.dtype) -> Any:
    """Blocks of 64, or of 32 if only those fill a row: the fused CPU kernel takes no block that spans two rows."""
    nn4 = _bitsandbytes().nn
    out_features, in_features = weight.shape
    block = 64 if in_features % 64 == 0 or in_features % 32 else 32
    layer = nn4.Linear4bit(
        in_features,
        out_features,
        bias=False,
        compute_dtype=dtype,
        compress_statistics=False,
        quant_type="nf4",
        device="meta",
    )
    layer.weight = nn4.Params4bit(
        weight, requires_grad=False, blocksize=block, compress_statistics=False, quant_type="nf4", module=layer
    )
    if in_features % block or out_features % _NF4_PACK_ROWS:
        layer.support_avx512bf16_for_cpu = False  # would fail an assertion; such a layer is dequantised as it is used
    return layer


def quantised_layers(model: Any) -> dict[str, Any]:
    """Name -> each nn.Linear and EncodedLinear of a Transformers model that a shadow quantises.

    Not the output head, routers, layers that are never called, and experts modules, which are empty: their parameters
    go to `ShadowExperts`.
    """
    head = model.get_output_embeddings()
    # By exact type: a subclass may do more than multiply.
    return {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) in (nn.Linear, EncodedLinear)
        and layer is not head
        and _ROUTERS.isdisjoint(name.split("."))
        and name.rpartition(".")[2] not in _NOT_CALLED
    }


def quantise_model(model: Any, scheme: str, device_of: Callable[[str], torch.device]) -> None:
    """Replace the `quantised_layers` by their quantised forms, in place, and move each module to its device.

    `device_of`: that of a module by its name. Raises ConfigError, or CheckpointError for a layer whose weight was not
    loaded.
    """
    check_scheme(scheme)
    for name, layer in quantised_layers(model).items():
        parent, _, child = name.rpartition(".")
        quantised = quantise_linear(layer.weight, layer.bias, scheme, device_of(name))
        setattr(model.get_submodule(parent), child, quantised)
    _move(model, device_of)


def _move(model: nn.Module, device_of: Callable[[str], torch.device]) -> None:
    """Move what is not on its device yet, in place. Tied weights stay tied."""
    moved: dict[int, Tensor] = {}
    for module_name, module in model.named_modules():
        device = device_of(module_name)
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None or tensor.is_meta or tensor.device == device:
                    continue
                if id(tensor) not in moved:
                    there = tensor.detach().to(device)
                    moved[id(tensor)] = nn.Parameter(there, False) if isinstance(tensor, nn.Parameter) else there
                own[name] = moved[id(tensor)]  # type: ignore[assignment]


class ShadowExperts(nn.Module):
    """All experts of one MoE layer, quantised. `family` is the layer's own experts module; only its computation between
    the two products is used, not its parameters."""

    def __init__(self, family: nn.Module, scheme: str, device: str | torch.device) -> None:
        """Raises ConfigError for an unknown scheme."""
        super().__init__()
        self.scheme = check_scheme(scheme)
        self.device = torch.device(device)
        self.experts = nn.ModuleDict()
        # Not registered as a submodule: it may contain us, or belong to the model as we do.
        self._family: tuple[Any] = (family,)
        names = ("gate_up_proj" if self._family[0].has_gate else "up_proj", "down_proj")
        self._names = tuple((name, f"{name}_bias" if self._family[0].has_bias else None) for name in names)

    def add(self, expert: int, tensors: dict[str, Tensor]) -> None:
        """Quantise one expert from its full-precision parameters, named as in `family` but without the expert
        dimension: `gate_up_proj` [2I, H] or, where the family transposes, [H, 2I], and so on. Keeps none of them.

        Raises CheckpointError for a missing or unknown parameter.
        """
        expected = {name for pair in self._names for name in pair if name is not None}
        if expected != tensors.keys():
            raise CheckpointError(
                f"expert {expert} has parameters {sorted(tensors)}, its family's arithmetic wants {sorted(expected)}"
            )
        layers = []
        for name, bias in self._names:
            weight = tensors[name].T if self._family[0].is_transposed else tensors[name]
            layers.append(quantise_linear(weight, tensors[bias] if bias else None, self.scheme, self.device, True))
        self.experts[str(expert)] = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden [T, H], index and weights [T, k] -> [T, H]. Rows and sums in the order of the family's eager forward.

        With `hidden` on an accelerator the index may be on the host, where it is needed. Raises StoreError for a chosen
        expert that was never added.
        """
        if not hidden.is_cpu:
            return self._forward_there(hidden, to_host(top_k_index)[0], top_k_weights)
        out = torch.zeros_like(hidden)
        for expert in top_k_index.unique().tolist():  # ascending
            if expert >= self._family[0].num_experts:
                continue  # how Transformers says "none"
            place, token = torch.where(top_k_index.T == expert)
            y = self._compute(expert, hidden[token]) * top_k_weights[token, place, None]  # [n, H]
            out.index_add_(0, token, y.to(out.dtype))
        return out

    def _forward_there(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """On an accelerator; `index` is on the host. The rows' numbers go there in one copy, and nothing comes back."""
        chosen = [expert for expert in index.unique().tolist() if expert < self._family[0].num_experts]
        places = [torch.where(index.T == expert) for expert in chosen]
        out = torch.zeros_like(hidden)
        if len(hidden) == 1:
            for expert, (place, _) in zip(chosen, places, strict=True):
                for one in place.tolist():
                    out += (self._compute(expert, hidden) * weights[:, one, None]).to(out.dtype)
            return out
        counts = [len(token) for _, token in places]
        flat = [torch.cat([pair[side] for pair in places]) for side in (0, 1)] if places else [index.new_empty(0)] * 2
        place_of, token_of = (there.split(counts) for there in to_device(hidden.device, *flat))
        for expert, place, token in zip(chosen, place_of, token_of, strict=True):
            y = self._compute(expert, hidden[token]) * weights[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out

    def _compute(self, expert: int, rows: Tensor) -> Tensor:
        """One expert's output before its weight. [n, H] -> [n, H]"""
        if str(expert) not in self.experts:
            raise StoreError(f"the shadow was given no expert {expert} of this layer; make the expert store again")
        family = self._family[0]
        up, down = self.experts[str(expert)].children()
        y = up(rows)  # [n, 2I], or [n, I] without a gate
        y = down(family._apply_gate(y) if family.has_gate else family.act_fn(y))
        return family.post_expert_norm(y) if family.has_post_expert_norm else y


def module_bytes(model_or_modules: nn.Module | Iterable[nn.Module]) -> int:
    """Bytes of all tensors of the modules, bitsandbytes' own included. Each storage counts once, in full."""
    modules = [model_or_modules] if isinstance(model_or_modules, nn.Module) else list(model_or_modules)
    storages = [t.untyped_storage() for t in _tensors(modules, set()) if not t.is_meta]
    return sum({(s.device, s.data_ptr()): s.nbytes() for s in storages}.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors reachable through containers, modules, parameters' attributes and bitsandbytes' state objects."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    if isinstance(value, dict):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    elif isinstance(value, Tensor | nn.Module) or type(value).__module__.startswith("bitsandbytes."):
        inner = getattr(value, "__dict__", {}).values()
    else:
        return
    for item in inner:
        yield from _tensors(item, seen)


def _quiet(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NOISE[record.name])


def _bitsandbytes() -> ModuleType:
    """bitsandbytes without two log messages: one for every product, one about an optional kernel."""
    for name in _NOISE:
        logging.getLogger(name).addFilter(_quiet)
    import bitsandbytes

    return bitsandbytes
