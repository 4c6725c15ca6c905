"""The same random weights as a bf16 GGUF, for llama.cpp; needs the `gguf` package (the optional extra `peers`).

Names, metadata and layout are those of llama.cpp's own convert_hf_to_gguf.py: all experts of a projection are one
tensor, vectors and gates are float32, and for the `llama` architecture the rows of Q and K are interleaved as its
rotary encoding reads them. The file has no tokenizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.peers.checkpoints import BASE, CONTEXT, EPSILON, HEAD, INDEX, VOCABULARY, Shape, expert_names, shards

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "mixtral": "llama"}
Read = Callable[[str], "torch.Tensor"]
Piece = tuple[str, tuple[int, ...], bool, Callable[[Read], "torch.Tensor"]]
"""Name in the GGUF, shape, whether float32, and what makes its values."""


def make_gguf(shape: Shape, checkpoint: Path) -> Path:
    """The file's path beside the checkpoint, written unless it is there already. Holds one tensor at a time."""
    path = checkpoint.with_suffix(".gguf")
    if path.is_file():
        return path
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    _write(shape, checkpoint, partial)
    os.replace(partial, path)
    return path


def pieces(shape: Shape) -> Iterator[Piece]:
    """Every tensor of the file, in its order."""
    import gguf

    architecture = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[shape.family])
    names = gguf.get_tensor_name_map(architecture, shape.layers)

    def renamed(name: str) -> str:
        found = names.get_name(name, try_suffixes=(".weight",))
        if found is None:
            raise KeyError(f"the gguf package has no name for {name} in {ARCHITECTURES[shape.family]}")
        return str(found)

    for tensors in shards(shape):
        for name, size, std in tensors:
            if ".experts." in name:
                continue
            single = std is None or name.endswith(".gate.weight")
            yield renamed(name), size, single, _dense(shape, name)
    for layer in range(shape.layers):
        for part, size in enumerate(((shape.inner, shape.hidden),) * 2 + ((shape.hidden, shape.inner),)):
            of_all = [expert_names(shape, layer, expert)[part] for expert in range(shape.experts)]
            name = renamed(of_all[0].replace(".experts.0.", ".experts."))
            yield name, (shape.experts, *size), False, _stacked(of_all)


def _dense(shape: Shape, name: str) -> Callable[[Read], torch.Tensor]:
    if shape.family == "mixtral" and name.endswith(("q_proj.weight", "k_proj.weight")):
        return lambda read: interleaved(read(name))
    return lambda read: read(name)


def _stacked(names: list[str]) -> Callable[[Read], torch.Tensor]:
    def stack(read: Read) -> torch.Tensor:
        import torch

        return torch.stack([read(name) for name in names])

    return stack


def interleaved(weight: torch.Tensor) -> torch.Tensor:
    """Rows of each head reordered from halves, as Transformers rotates them, to pairs, as llama.cpp does."""
    return weight.view(-1, 2, HEAD // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _write(shape: Shape, checkpoint: Path, path: Path) -> None:
    import gguf
    import numpy as np
    import torch
    from safetensors import safe_open

    writer: Any = gguf.GGUFWriter(path, ARCHITECTURES[shape.family])
    writer.add_name(shape.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.key_heads)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_expert_feed_forward_length(shape.inner)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    made = list(pieces(shape))
    for name, size, single, _ in made:
        kind = gguf.GGMLQuantizationType.F32 if single else gguf.GGMLQuantizationType.BF16
        width = 4 if single else 2
        writer.add_tensor_info(name, size, np.dtype(np.uint16), width * int(np.prod(size)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    files = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    opened = {file: safe_open(checkpoint / file, framework="pt") for file in sorted(set(files.values()))}

    def read(name: str) -> torch.Tensor:
        return opened[files[name]].get_tensor(name)

    for _, _, single, make in made:
        values = make(read).contiguous()
        writer.write_tensor_data(values.float().numpy() if single else values.view(torch.int16).numpy())
    writer.close()
