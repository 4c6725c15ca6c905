"""Dense model and one-expert arithmetic, put together by hand, against Transformers' eager forward: bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.dense import dispatch_experts, load_dense
from checkpoint.expert import ExpertArithmetic
from checkpoint.family import parse_dtype
from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from scheduler.errors import CorruptStoreError

FAMILIES = (
    *(("mixtral", "bfloat16"), ("mixtral", "float32"), ("qwen2_moe", "float32"), ("qwen3_moe", "bfloat16")),
    *(("olmoe", "bfloat16"), ("gpt_oss", "bfloat16"), ("deepseek_v2", "float32"), ("deepseek_v3", "bfloat16")),
    *(("ernie4_5_moe", "bfloat16"), ("glm4_moe", "float32"), ("granitemoe", "bfloat16")),
    *(("hunyuan_v1_moe", "float32"), ("phimoe", "bfloat16")),
)
"""In float32 clusters of every family answer as Transformers, too: `tests/families/test_blocks.py`."""
PROMPT = torch.tensor([[5, 17, 3, 88, 41, 9, 9, 60, 2, 71, 33, 12]])


def reference(model: Path, dtype: str, moved: bool = False) -> Any:
    """Transformers' own. `moved`: each weight copied to memory that torch allocates.

    Without that, weights that need no conversion are views of the mapped file, where half of all safetensors headers
    end 8 bytes off a multiple of 16. There the float32 product of a single row differs in its last bit, so that eager
    differs from a deep copy of itself: float32 checkpoints are compared in aligned memory.
    """
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(
        model, dtype=parse_dtype(dtype), experts_implementation="eager", local_files_only=True
    ).eval()
    if moved:
        for value in (*found.parameters(), *found.buffers()):
            value.data = value.data.clone()
    return found


def rebuilt(store: ExpertStore) -> Any:
    """Every expert goes through one and the same buffer, as through a worker with one slot."""
    manifest = store.manifest
    arithmetic = ExpertArithmetic(manifest.config, manifest.dtype)
    buffer = aligned_buffer(manifest.blob_bytes)
    bound = {layer: arithmetic.bind(layer, store.views(buffer, layer)) for layer in manifest.moe_layers}

    def experts(layer: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        def run(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            result = torch.zeros_like(hidden)
            for expert in sorted(set(index.flatten().tolist())):
                place, token = torch.where(index.T == expert)
                file, blob = store.locate(layer, expert)
                buffer.fill_(0xFF)
                with file.open("rb") as stream:
                    stream.seek(blob.offset)
                    stream.readinto(buffer.numpy()[: blob.length])
                result.index_add_(0, token, bound[layer](hidden[token], weights[token, place]).to(result.dtype))
            return result

        return run

    model = load_dense(store.dense, manifest.config, parse_dtype(manifest.dtype))
    dispatch_experts(model, experts)
    return model


@torch.inference_mode()
def logits(model: Any, steps: int = 3) -> list[torch.Tensor]:
    """Of a prefill and of `steps` greedy decode passes with a KV cache."""
    out = model(PROMPT, use_cache=True)
    found = [out.logits]
    for _ in range(steps):
        token = out.logits[:, -1:].argmax(-1)
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits)
    return found


def assert_same(store: ExpertStore, model: Path, moved: bool = False) -> None:
    ours, theirs = logits(rebuilt(store)), logits(reference(model, store.manifest.dtype, moved))
    assert float(theirs[0].std()) > 0.01, "the model says nothing: a comparison would prove nothing"
    for step, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.dtype == yours.dtype
        assert torch.equal(mine, yours), f"pass {step}: off by {float((mine - yours).abs().max())}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_demo_gives_the_logits_of_eager(demo: Path, store_of: Callable[..., ExpertStore], dtype: str) -> None:
    assert_same(store_of(demo, dtype), demo)


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_every_family_gives_the_logits_of_eager(
    tiny: Callable[..., Path], store_of: Callable[..., ExpertStore], family: str, dtype: str
) -> None:
    model = tiny(family, dtype)
    assert_same(store_of(model), model, moved=dtype == "float32")


def test_float32_out_of_bfloat16_is_the_conversion_of_transformers(
    tiny: Callable[..., Path], store_of: Callable[..., ExpertStore]
) -> None:
    model = tiny("deepseek_v3", "bfloat16")
    assert_same(store_of(model, "float32"), model)


def test_dense_model_holds_no_expert(demo: Path, store_of: Callable[..., ExpertStore]) -> None:
    store = store_of(demo)
    dense = load_dense(store.dense, store.manifest.config, torch.bfloat16)
    held = sum(p.nbytes for p in dense.parameters())
    assert held == sum(p.nbytes for p in reference(demo, "bfloat16").parameters()) - sum(
        torch.Size(spec.shape).numel() * 2 * len(layer.blobs)
        for layer in store.manifest.layers.values()
        for spec in layer.tensors
    )


def test_dense_weight_that_is_missing_is_named(
    tiny_store: ExpertStore, rewrite: Callable[[Path, Callable[[dict[str, torch.Tensor]], object]], None]
) -> None:
    (part,) = tiny_store.dense.glob("*.safetensors")
    rewrite(part, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(CorruptStoreError, match=r"model\.norm\.weight"):
        load_dense(tiny_store.dense, tiny_store.manifest.config, torch.bfloat16)


def test_one_expert_on_any_rows(demo: Path, store_of: Callable[..., ExpertStore]) -> None:
    """Also where the rows lie at an odd address, as in a message off the network."""
    store = store_of(demo, "float32")
    arithmetic = ExpertArithmetic(store.manifest.config, "float32")
    layer = store.manifest.moe_layers[-1]
    file, blob = store.locate(layer, 5)
    buffer = aligned_buffer(blob.length)
    buffer.copy_(torch.frombuffer(bytearray(file.read_bytes()[blob.offset :][: blob.length]), dtype=torch.uint8))
    compute = arithmetic.bind(layer, store.views(buffer, layer))
    module = reference(demo, "float32").model.layers[layer].mlp.experts
    for rows in (1, 2, 7):
        hidden = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows))
        weights = torch.rand(rows)
        with torch.inference_mode():
            expected = module(hidden, torch.full((rows, 1), 5), weights.view(rows, 1))
        assert torch.equal(compute(hidden, weights), expected)
        for shift in (1, 4, 36):
            raw = bytearray(shift) + bytearray(hidden.numpy().tobytes())
            moved = torch.frombuffer(raw, dtype=torch.float32, offset=shift).view(rows, 192)
            assert torch.equal(compute(moved, weights), expected), f"rows at an address off by {shift}"
