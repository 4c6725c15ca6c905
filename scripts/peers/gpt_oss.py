"""Random checkpoints of gpt-oss as OpenAI published it: experts in MXFP4, all else in bfloat16.

Its GGUF is as llama.cpp's converter writes it: the same blocks, in the order of their bytes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from scripts.peers.checkpoints import Shape, Tensor

BLOCK = 32
WINDOW = 128
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
_SCALE = 120
"""2^-7: random codes then have the standard deviation of other projections."""
_BIAS_STD, _SINK_STD = 0.02, 0.5
_SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def config(shape: Shape) -> dict[str, Any]:
    """What config.json has beside the common fields."""
    turns = ("sliding_attention", "full_attention")
    return {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": shape.experts,
        "intermediate_size": shape.inner,
        "sliding_window": WINDOW,
        "layer_types": [turns[layer % 2] for layer in range(shape.layers)],
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": _SKIPPED},
    }


def expert_tensors(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Of a layer, for all experts together: blocks and scales (bytes), and biases."""
    stem = f"model.layers.{layer}.mlp.experts"
    for name, outputs, inputs in (
        ("gate_up_proj", 2 * shape.inner, shape.hidden),
        ("down_proj", shape.hidden, shape.inner),
    ):
        yield f"{stem}.{name}_blocks", (shape.experts, outputs, inputs // BLOCK, BLOCK // 2), None
        yield f"{stem}.{name}_scales", (shape.experts, outputs, inputs // BLOCK), None
        yield f"{stem}.{name}_bias", (shape.experts, outputs), _BIAS_STD


def attention_tensors(shape: Shape, layer: int, wide: int, keys: int) -> Iterator[Tensor]:
    """Those that other families lack."""
    stem = f"model.layers.{layer}.self_attn"
    for name, outputs in (("q", wide), ("k", keys), ("v", keys), ("o", shape.hidden)):
        yield f"{stem}.{name}_proj.bias", (outputs,), _BIAS_STD
    yield f"{stem}.sinks", (shape.heads,), _SINK_STD
    yield f"model.layers.{layer}.mlp.router.bias", (shape.experts,), _BIAS_STD


def drawn_bytes(name: str, size: tuple[int, ...], draw: torch.Generator) -> torch.Tensor | None:
    """Of MXFP4. None for any other tensor."""
    import torch

    if name.endswith("_blocks"):
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=draw)
    return torch.full(size, _SCALE, dtype=torch.uint8) if name.endswith("_scales") else None


def in_gguf(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., rows, n, 16] and [..., rows, n] as rows of GGUF's blocks [..., rows, n * 17]: the scale, then the first 16
    values in the low bits and the others in the high ones."""
    import torch

    values = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    both = values[..., : BLOCK // 2] | values[..., BLOCK // 2 :] << 4
    return torch.cat((scales.unsqueeze(-1), both), -1).flatten(-2)


def add_settings(writer: Any, shape: Shape) -> None:
    """GGUF's metadata that other families lack."""
    import gguf

    writer.add_sliding_window(WINDOW)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(YARN["factor"])
    writer.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])
