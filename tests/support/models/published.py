"""Tiny checkpoints of random weights in the formats that real ones are published in."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MXFP4_SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
"""As openai/gpt-oss-20b's config.json has it."""
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks (uint8 [..., n / 32, 16]) and scales (uint8 [..., n / 32]) of a weight [..., n].

    OCP Microscaling Formats (MX) Specification 1.0, section 6.3: the block's scale is the power of two of its largest
    value, less that of E2M1's largest, and each value is rounded to the nearest of E2M1.
    """
    blocks = weight.float().unflatten(-1, (-1, 32))
    power = blocks.abs().amax(-1).clamp_min(2.0**-120).log2().floor() - 2
    scaled = blocks / power.exp2().unsqueeze(-1)
    nearest = (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (power + 127).to(torch.uint8)


def publish_mxfp4(model: Any, path: Path, plain: tuple[str, ...] = ()) -> Path:
    """A gpt-oss in bfloat16, its experts in MXFP4, as OpenAI published it. `plain`: weights that stay in bfloat16."""
    weights = _saved(model, path)
    packed = tuple(f"experts.{name}" for name in ("gate_up_proj", "down_proj") if name not in plain)
    for name in [name for name in weights if name.endswith(packed)]:
        blocks, scales = mxfp4(weights.pop(name).transpose(1, 2))
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = blocks, scales
    return _written(path, weights, {"quant_method": "mxfp4", "modules_to_not_convert": MXFP4_SKIPPED})


def publish_fp8(
    model: Any,
    path: Path,
    skipped: tuple[str, ...] = (),
    block: tuple[int, int] | None = (16, 16),
    method: str = "fp8",
    scale_fmt: str = "float",
) -> Path:
    """A model in bfloat16, its linear layers in FP8 by Transformers' own operation, but for those with a name in
    `skipped`, embeddings, norms, gates and the head."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    settings = FineGrainedFP8Config(weight_block_size=block and list(block), scale_fmt=scale_fmt, quant_method=method)
    operation = Fp8Quantize(FineGrainedFP8HfQuantizer(settings, pre_quantized=True))
    kept = ("embed", "norm", "gate.weight", "lm_head", "head.weight", "router", *skipped)
    weights = _saved(model, path)
    for name in [name for name, value in weights.items() if name.endswith(".weight") and value.dim() == 2]:
        if not any(word in name for word in kept):
            weights |= _whole_blocks(operation, name, weights.pop(name), block)
    written = settings.to_dict() | {"modules_to_not_convert": ["lm_head", *skipped]}
    return _written(path, weights, {key: value for key, value in written.items() if key != "dequantize"})


def _whole_blocks(
    operation: Any, name: str, weight: torch.Tensor, block: tuple[int, int] | None
) -> dict[str, torch.Tensor]:
    """Quantised by an operation that takes whole blocks only: zeros fill the last ones, and are cut off again."""
    rows, columns = weight.shape
    block = block or (rows, columns)
    whole = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    found: dict[str, torch.Tensor] = operation.convert({name: whole})
    return found | {name: found[name][:rows, :columns]}


def publish_deepseek_v4(model: Any, path: Path) -> Path:
    """In FP8 with scales of powers of two, the routed experts in FP4, each under the names that DeepSeek gives it."""
    publish_fp8(model, path, (".experts.", ".compressor."), scale_fmt="ue8m0")
    file = path / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if ".experts." in name]:
        blocks, scales = mxfp4(weights[name])
        weights[name] = blocks.flatten(-2).view(torch.int8)
        weights[name.removesuffix("weight") + "scale"] = scales.view(torch.float8_e8m0fnu)
    renamed = {name.replace("weight_scale_inv", "scale"): value for name, value in weights.items()}
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    settings["modules_to_not_convert"].remove(".experts.")
    return _written(path, renamed, settings | {"expert_dtype": "fp4"})


def widen(path: Path, *ends: str) -> Path:
    """The tensors whose names end so in float32, with bits that bfloat16 does not have."""
    file = path / "model.safetensors"
    weights = load_file(file)
    random = torch.Generator().manual_seed(1)
    for name in [name for name in weights if name.endswith(ends)]:
        wide = weights[name].float()
        weights[name] = wide * (1 + 1e-4 * torch.rand(wide.shape, generator=random))
    save_file(weights, file, metadata={"format": "pt"})
    return path


def with_a_layer_more(path: Path) -> Path:
    """The last layer once more, behind all layers of the configuration."""
    file = path / "model.safetensors"
    weights = load_file(file)
    count = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    last = {name: value for name, value in weights.items() if f".layers.{count - 1}." in name}
    more = {name.replace(f".{count - 1}.", f".{count}.", 1): value.clone() for name, value in last.items()}
    save_file(weights | more, file, metadata={"format": "pt"})
    return path


def _saved(model: Any, path: Path) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of its family's published checkpoints."""
    model.to(torch.bfloat16).save_pretrained(path)
    return load_file(path / "model.safetensors")


def _written(path: Path, weights: dict[str, torch.Tensor], quantisation: dict[str, Any]) -> Path:
    tensors = {name: value.contiguous() for name, value in weights.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}, indent=1))
    return path


def format_name(path: Path) -> str:
    """A published format as docs/models.md names it."""
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    name: str = settings["quant_method"].upper()
    if name in ("AWQ", "GPTQ"):
        return f"{name} of {settings['bits']} bits"
    if name == "BITSANDBYTES":
        kind = "int8" if settings.get("load_in_8bit") else settings["bnb_4bit_quant_type"]
        return f"bitsandbytes {kind}"
    if name == "COMPRESSED-TENSORS":
        return f"compressed-tensors {settings['format']}"
    return f"{name} with FP4 experts" if settings.get("expert_dtype") == "fp4" else name


def dequantised(path: Path, dtype: str = "bfloat16") -> Any:
    """Transformers' model of a published checkpoint, dequantised, with eager experts."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.quantizers.auto import AutoQuantizationConfig

    settings = AutoQuantizationConfig.from_dict(AutoConfig.from_pretrained(path).quantization_config)
    settings.dequantize = True
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, experts_implementation="eager", quantization_config=settings
    )
    return aligned(model.eval())


def dequantised_by_definition(path: Path) -> Any:
    """A checkpoint in FP8 as a plain one, each block times its scale, and Transformers' model of that.

    DeepSeek-V3 Technical Report, section 3.3, as the publisher's `weight_dequant` computes it.
    """
    from transformers import AutoModelForCausalLM

    config = json.loads((path / "config.json").read_text())
    high, wide = config.pop("quantization_config")["weight_block_size"]
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if name.endswith("_scale_inv")]:
        scales, plain = weights.pop(name), name.removesuffix("_scale_inv")
        value = weights[plain].float()
        for row, column in itertools.product(*map(range, scales.shape)):
            value[row * high :][:high, column * wide :][:, :wide] *= scales[row, column]
        weights[plain] = value.bfloat16()
    folder = path.with_name("plain")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return aligned(AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval())


def aligned(model: Any) -> Any:
    """The model itself, its weights where torch would place them: mapped ones start anywhere, and the last bit of a
    product depends on that."""
    for value in itertools.chain(model.parameters(), model.buffers()):
        value.data = value.data.clone()
    return model
