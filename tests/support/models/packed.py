"""Tiny checkpoints of random weights in the packed formats, by each format's own tools where they run here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.models.families import auto_class
from support.models.published import aligned

KEPT = ("embed", "norm", "gate.weight", "lm_head", "router", "shared_expert_gate", "vision_tower", "mm_projector")
"""Words in the names of weights that no publisher quantises."""
INT4 = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 8,
    "format": "pack-quantized",
}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "format": "float-quantized"}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
NVFP4 |= {"format": "nvfp4-pack-quantized"}
MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
MXFP4 |= {"format": "mxfp4-pack-quantized", "scale_dtype": "torch.uint8"}


def saved(model: Any, path: Path) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of its family's published checkpoints, in bfloat16."""
    model.to(torch.bfloat16).save_pretrained(path)
    return load_file(path / "model.safetensors")


def written(path: Path, weights: dict[str, torch.Tensor], quantisation: dict[str, Any] | None) -> Path:
    path.mkdir(exist_ok=True)
    tensors = {name: value.contiguous() for name, value in weights.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if quantisation is not None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}, indent=1))
    return path


def write_plain(path: Path, weights: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> None:
    """Beside a checkpoint, the same with the restored weights: what its format's own tool makes of it."""
    stems = tuple(name.removesuffix("weight") for name in restored)
    rest = {name: value for name, value in weights.items() if not name.startswith(stems)}
    plain = written(path.with_name("plain"), rest | restored, None)
    (plain / "config.json").write_text((path / "config.json").read_text())


def restored_by_tool(path: Path) -> Any:
    """Transformers' model of that checkpoint, with eager experts."""
    auto = auto_class(json.loads((path / "config.json").read_text())["model_type"])
    found = auto.from_pretrained(path.with_name("plain"), dtype=torch.bfloat16, experts_implementation="eager")
    return aligned(found.eval())


def linears(weights: dict[str, torch.Tensor]) -> list[str]:
    """The names of the weights that a publisher quantises, without `.weight`."""
    matrices = [name for name, value in weights.items() if name.endswith(".weight") and value.dim() == 2]
    return [name.removesuffix(".weight") for name in matrices if not any(word in name for word in KEPT)]


def group(word: str = "", *targets: str, format: str, **weights: Any) -> dict[str, Any]:
    """A group of compressed-tensors: the layers with this word in their name, and how their weights are stored."""
    return {"word": word, "targets": list(targets) or ["Linear"], "format": format, "weights": weights}


def publish_compressed(model: Any, path: Path, groups: dict[str, dict[str, Any]]) -> Path:
    """By compressed-tensors' own compressors. `groups`: name -> targets, format and the settings of the weights; the
    first whose target is in a layer's name has it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weights, plain = saved(model, path), {}
    for name in linears(weights):
        group = next(group for group in groups.values() if group["word"] in name)
        args = QuantizationArgs(**group["weights"])
        scheme = QuantizationScheme(targets=group["targets"], weights=args, format=group["format"])
        weight = weights.pop(f"{name}.weight")
        high, wide = args.block_structure or (1, args.group_size or weight.shape[1])
        blocks = weight.unflatten(0, (-1, high)).unflatten(2, (-1, wide))  # [rows, high, columns, wide]
        parts = {"weight": weight}
        if args.strategy == "tensor_group":
            parts["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
        scale, zero = calculate_qparams(
            blocks.amin((1, 3)), blocks.amax((1, 3)), args, parts.get("weight_global_scale")
        )
        parts |= {"weight_scale": scale if args.strategy == "tensor_group" else scale.to(torch.bfloat16)}
        parts["weight_zero_point"] = zero
        compressor = BaseCompressor.get_value_from_registry(group["format"])
        packed = compressor.compress(parts, scheme)
        weights |= {f"{name}.{key}": value for key, value in packed.items()}
        plain[f"{name}.weight"] = compressor.decompress(packed, scheme)["weight"].to(torch.bfloat16)
    write_plain(path, weights, plain)
    formats = {group["format"] for group in groups.values()}
    kept = ("targets", "format", "weights")
    return written(
        path,
        weights,
        {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "ignore": ["lm_head"],
            "config_groups": {name: {key: group[key] for key in kept} for name, group in groups.items()},
        },
    )


def publish_awq(model: Any, path: Path, group: int = 16) -> Path:
    """4 bits, as AutoAWQ's GEMM layout is documented: eight columns an int32, in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    weights, plain = saved(model, path), {}
    for name in linears(weights):
        weight = weights.pop(f"{name}.weight").half().T  # [in, out]
        scales, zeros, values = _rounded(weight, group, 4)
        plain[f"{name}.weight"] = _by_loops(scales, zeros, values, [row // group for row in range(len(values))])
        for word, numbers in (("qweight", values), ("qzeros", zeros)):
            weights[f"{name}.{word}"] = _packed(numbers, 4, (0, 2, 4, 6, 1, 3, 5, 7))
        weights[f"{name}.scales"] = scales
    write_plain(path, weights, plain)
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return written(path, weights, settings)


def publish_gptq(
    model: Any,
    path: Path,
    bits: int = 4,
    layout: str = "gptq",
    shuffled: bool = False,
    group: int = 8,
    dynamic: dict[str, int] | None = None,
) -> Path:
    """As AutoGPTQ packs it, rows of `qweight` and columns of `qzeros`. `shuffled`: inputs of a group are anywhere.
    `dynamic`: bits of modules by a regular expression of their names; those of 0 bits are not quantised."""
    weights, plain, usual = saved(model, path), {}, bits
    less = 1 if layout == "gptq" else 0
    random = torch.Generator().manual_seed(0)
    for name in linears(weights):
        bits = next((own for words, own in (dynamic or {}).items() if re.match(words, name)), usual)
        if not bits:
            continue
        weight = weights.pop(f"{name}.weight").half().T  # [in, out]
        order = torch.randperm(len(weight), generator=random) if shuffled else torch.arange(len(weight))
        scales, zeros, values = _rounded(weight[order], group, bits)
        index = torch.empty(len(weight), dtype=torch.int32)
        index[order] = torch.arange(len(weight), dtype=torch.int32) // group
        values = values[order.argsort()]
        plain[f"{name}.weight"] = _by_loops(scales, zeros, values, index.tolist())
        natural = tuple(range(32 // bits))
        weights[f"{name}.qweight"] = _packed(values.T, bits, natural).T
        weights[f"{name}.qzeros"] = _packed((zeros - less) % 2**bits, bits, natural)
        weights |= {f"{name}.scales": scales, f"{name}.g_idx": index}
    write_plain(path, weights, plain)
    settings = {"quant_method": "gptq", "bits": usual, "group_size": group, "checkpoint_format": layout}
    if dynamic:
        settings["dynamic"] = {words if own else f"-:{words}": {"bits": own} for words, own in dynamic.items()}
    return written(path, weights, settings | {"desc_act": shuffled, "sym": False})


def _rounded(weight: torch.Tensor, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales (float16) and zero points of groups of rows, and values, of a weight [in, out]."""
    blocks = weight.float().unflatten(0, (-1, group))
    low, high = blocks.amin(1).clamp_max(0), blocks.amax(1).clamp_min(0)
    scales = ((high - low) / (2**bits - 1)).half().clamp_min(1e-4)
    zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1).int()
    values = (blocks / scales.float().unsqueeze(1) + zeros.unsqueeze(1)).round().clamp(0, 2**bits - 1).int()
    return scales, zeros, values.flatten(0, 1)


def _packed(numbers: torch.Tensor, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """[n, m] -> int32 [n, m * bits / 32]. The i-th value of an int32, from its lowest bits, is column order[i]."""
    words = []
    for row in numbers.tolist():
        for at in range(0, len(row), len(order)):
            word = sum(row[at + column] << bits * place for place, column in enumerate(order))
            words.append(word - 2**32 if word >= 2**31 else word)
    return torch.tensor(words, dtype=torch.int32).view(len(numbers), -1)


def _by_loops(scales: torch.Tensor, zeros: torch.Tensor, values: torch.Tensor, groups: list[int]) -> torch.Tensor:
    """The definition: (value - zero point) * scale, in float16, then bfloat16. [out, in]"""
    rows = [(values[row] - zeros[group]).half() * scales[group] for row, group in enumerate(groups)]
    return torch.stack(rows).T.to(torch.bfloat16)


def publish_bitsandbytes(model: Any, path: Path, **settings: Any) -> Path:
    """Transformers' own: save_pretrained of a model that was quantised when it was loaded. Its experts are not."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model.to(torch.bfloat16).save_pretrained(path.with_name("whole"))
    quantised = AutoModelForCausalLM.from_pretrained(
        path.with_name("whole"), dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**settings)
    )
    quantised.save_pretrained(path)
    return path


def dequantised_bitsandbytes(path: Path) -> Any:
    """By Transformers' `dequantize`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, experts_implementation="eager")
    return aligned(model.dequantize(torch.bfloat16).eval())


def publish_bitsandbytes_experts(
    model: Any, path: Path, kind: str = "nf4", nested: bool = True, dtype: str = "bfloat16"
) -> Path:
    """Experts, too, as checkpoints of earlier Transformers have them: by bitsandbytes' own functions. `kind`: `nf4`,
    `fp4` or `int8`. `dtype`: of the weights that were quantised."""
    from bitsandbytes import functional

    weights, plain = saved(model, path), {}
    for name in linears(weights):
        weight = weights.pop(f"{name}.weight").to(getattr(torch, dtype))
        if kind == "int8":
            data, scales, _ = functional.int8_vectorwise_quant(weight)
            packed = {"weight": data, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
            found = functional.int8_vectorwise_dequant(data, scales)
        else:
            data, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
            packed = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()} | {"weight": data}
            found = functional.dequantize_4bit(data, state)
        weights |= {f"{name}.{key}": value for key, value in packed.items()}
        plain[f"{name}.weight"] = found.bfloat16()
    write_plain(path, weights, plain)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": kind != "int8", "load_in_8bit": kind == "int8"}
    return written(path, weights, settings | {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested})
