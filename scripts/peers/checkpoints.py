"""Random checkpoints of realistic sizes, written a layer at a time.

An expert of the project's own small models loads faster than a message travels. These have the widths of published
models and few layers, so that a load, a product and a message cost what they cost there. They have no tokenizer: all
tokens are given as numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scripts.peers import gpt_oss

VOCABULARY = 16384
HEAD = 128
"""Width of an attention head, of all but gpt-oss."""
CONTEXT = 4096
BASE = 1e6
"""Of the rotary position encoding."""
EPSILON = 1e-6
EMBEDDING_STD, PROJECTION_STD, GATE_STD = 0.5, 0.02, 0.05
"""Embeddings are large beside what a layer adds, as in trained models. With Transformers' own 0.02 everywhere, all
tokens of a text would soon have the same hidden state, and so the same experts."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a checkpoint is made from."""

    name: str
    family: str
    """Transformers' model type, `qwen3_moe`, `mixtral` or `gpt_oss`."""
    layers: int
    experts: int
    top_k: int
    inner: int
    """Inner width of an expert."""
    hidden: int = 2048
    heads: int = 16
    key_heads: int = 4
    seed: int = 0
    head: int = HEAD
    vocabulary: int = VOCABULARY

    @property
    def expert_bytes(self) -> int:
        """Of all experts, in bfloat16."""
        return self.layers * self.experts * 3 * self.hidden * self.inner * 2

    def config(self) -> dict[str, Any]:
        """As config.json."""
        common = {
            "architectures": ["Qwen3MoeForCausalLM" if self.family == "qwen3_moe" else "MixtralForCausalLM"],
            "model_type": self.family,
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "num_experts_per_tok": self.top_k,
            "max_position_embeddings": CONTEXT,
            "rope_theta": BASE,
            "rms_norm_eps": EPSILON,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if self.family == "gpt_oss":
            return common | gpt_oss.config(self)
        if self.family == "mixtral":
            return common | {"num_local_experts": self.experts, "intermediate_size": self.inner}
        return common | {
            "num_experts": self.experts,
            "moe_intermediate_size": self.inner,
            "intermediate_size": 3 * self.hidden,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def digest(self) -> str:
        """Of all that decides the weights."""
        text = json.dumps([asdict(self), EMBEDDING_STD, PROJECTION_STD, GATE_STD, self.config()])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


SHAPES = {
    "A": Shape("A", "qwen3_moe", layers=6, experts=64, top_k=8, inner=768),
    "B": Shape("B", "mixtral", layers=8, experts=8, top_k=2, inner=3584),
}
"""Experts as those of Qwen3-30B-A3B, and as those of Mixtral at half its width and a quarter of its inner width."""
FEW_BITS = {
    "gpt-oss-20b": Shape(
        "gpt-oss-20b", "gpt_oss", 6, 32, 4, 2880, hidden=2880, heads=64, key_heads=8, head=64, vocabulary=50272
    ),
    "qwen3-30b-a3b": Shape("qwen3-30b-a3b", "qwen3_moe", 6, 128, 8, 768, heads=32, vocabulary=18992),
}
"""Six layers of the published models, with as many tokens in their vocabularies as six layers have of it."""
QUICK = {name: replace(shape, name=f"{name}-quick", layers=2) for name, shape in SHAPES.items()}


def expert_names(shape: Shape, layer: int, expert: int) -> tuple[str, str, str]:
    """The checkpoint's names of an expert's gate, up and down projection."""
    if shape.family == "mixtral":
        stem = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
        return f"{stem}.w1.weight", f"{stem}.w3.weight", f"{stem}.w2.weight"
    stem = f"model.layers.{layer}.mlp.experts.{expert}"
    return f"{stem}.gate_proj.weight", f"{stem}.up_proj.weight", f"{stem}.down_proj.weight"


def gate_name(shape: Shape, layer: int) -> str:
    block = {"mixtral": "block_sparse_moe.gate", "gpt_oss": "mlp.router"}.get(shape.family, "mlp.gate")
    return f"model.layers.{layer}.{block}.weight"


Tensor = tuple[str, tuple[int, ...], float | None]
"""Name, shape, standard deviation; None: all ones."""


def shards(shape: Shape) -> Iterator[list[Tensor]]:
    """Every tensor of the checkpoint, a list a file: each layer, then the rest."""
    wide, keys = shape.heads * shape.head, shape.key_heads * shape.head
    for layer in range(shape.layers):
        stem = f"model.layers.{layer}"
        found: list[Tensor] = [
            (f"{stem}.input_layernorm.weight", (shape.hidden,), None),
            (f"{stem}.post_attention_layernorm.weight", (shape.hidden,), None),
            (f"{stem}.self_attn.q_proj.weight", (wide, shape.hidden), PROJECTION_STD),
            (f"{stem}.self_attn.k_proj.weight", (keys, shape.hidden), PROJECTION_STD),
            (f"{stem}.self_attn.v_proj.weight", (keys, shape.hidden), PROJECTION_STD),
            (f"{stem}.self_attn.o_proj.weight", (shape.hidden, wide), PROJECTION_STD),
            (gate_name(shape, layer), (shape.experts, shape.hidden), GATE_STD),
        ]
        if shape.family == "qwen3_moe":
            found += [(f"{stem}.self_attn.{name}.weight", (HEAD,), None) for name in ("q_norm", "k_norm")]
        if shape.family == "gpt_oss":
            found += gpt_oss.attention_tensors(shape, layer, wide, keys)
            found += gpt_oss.expert_tensors(shape, layer)
            yield found
            continue
        for expert in range(shape.experts):
            gate, up, down = expert_names(shape, layer, expert)
            found += [(name, (shape.inner, shape.hidden), PROJECTION_STD) for name in (gate, up)]
            found.append((down, (shape.hidden, shape.inner), PROJECTION_STD))
        yield found
    yield [
        ("model.embed_tokens.weight", (shape.vocabulary, shape.hidden), EMBEDDING_STD),
        ("model.norm.weight", (shape.hidden,), None),
        ("lm_head.weight", (shape.vocabulary, shape.hidden), PROJECTION_STD),
    ]


def make_checkpoint(shape: Shape, folder: Path) -> Path:
    """The checkpoint's path beneath `folder`, written unless it is there already. Whole or not at all."""
    return made_once(folder / f"{shape.name}-{shape.digest()}", lambda partial: _write(shape, partial))


def made_once(path: Path, write: Callable[[Path], None]) -> Path:
    """The folder `path`, filled by `write` unless it is there already. Whole or not at all."""
    if path.is_dir():
        return path
    partial = path.parent / f".{path.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    os.replace(partial, path)
    return path


def _write(shape: Shape, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(shape.seed)
    files = {}
    for number, tensors in enumerate(shards(shape), 1):
        file = f"model-{number:05}-of-{shape.layers + 1:05}.safetensors"
        weights = {}
        for name, size, std in tensors:
            values = gpt_oss.drawn_bytes(name, size, draw)
            if values is None:
                values = torch.ones(size) if std is None else torch.randn(size, generator=draw).mul_(std)
                values = values.to(torch.bfloat16)
            weights[name] = values
            files[name] = file
        save_file(weights, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
