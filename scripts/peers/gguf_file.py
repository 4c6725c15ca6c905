"""The same random weights as a GGUF, for llama.cpp; needs the `gguf` package (the optional extra `peers`).

In bf16, or in few bits: by the package's own quantisation, and for MXFP4 with the codes that our stores have.

Names, metadata and layout are those of llama.cpp's own convert_hf_to_gguf.py: all experts of a projection are one
tensor, vectors and gates are float32, and for the `llama` architecture the rows of Q and K are interleaved as its
rotary encoding reads them. The file has no tokenizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.peers import gpt_oss
from scripts.peers.checkpoints import CONTEXT, INDEX, Shape, expert_names, shards

if TYPE_CHECKING:
    import numpy as np
    import torch

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "mixtral": "llama", "gpt_oss": "gpt-oss"}
_FILE_TYPES = {"BF16": "MOSTLY_BF16", "Q4_0": "MOSTLY_Q4_0", "MXFP4": "MOSTLY_MXFP4_MOE"}
DENSE_KINDS = {"BF16": "BF16", "Q4_0": "Q4_0", "MXFP4": "Q8_0"}
"""Type of the experts -> that of the other matrices."""
Read = Callable[[str], "torch.Tensor"]
Piece = tuple[str, tuple[int, ...], str, Callable[[Read], "Iterator[torch.Tensor]"]]
"""Name in the GGUF, shape, type (empty for the experts' own), and what makes its values, some rows at a time; bytes,
where they are in that type."""


def make_gguf(shape: Shape, checkpoint: Path, kind: str = "BF16") -> Path:
    """The file's path beside the checkpoint, written unless it is there already. Holds an expert, or a dense tensor, at
    a time. `kind`: of `DENSE_KINDS`."""
    path = checkpoint.with_suffix(".gguf" if kind == "BF16" else f".{kind}.gguf")
    if path.is_file():
        return path
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    _write(shape, checkpoint, partial, kind)
    os.replace(partial, path)
    return path


def pieces(shape: Shape, dense: str = "BF16") -> Iterator[Piece]:
    """Every tensor of the file, in its order."""
    import gguf

    architecture = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[shape.family])
    names = gguf.get_tensor_name_map(architecture, shape.layers)

    def renamed(name: str) -> str:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise KeyError(f"the gguf package has no name for {name} in {ARCHITECTURES[shape.family]}")
        return f"{found}.weight" if name.endswith("sinks") else str(found)

    for tensors in shards(shape):
        for name, size, std in tensors:
            if ".experts." in name:
                continue
            single = std is None or len(size) == 1 or name.endswith((".gate.weight", ".router.weight"))
            yield renamed(name), size, "F32" if single else dense, _dense(shape, name)
    for layer in range(shape.layers):
        yield from (_published if shape.family == "gpt_oss" else _experts)(shape, layer, renamed)


def _experts(shape: Shape, layer: int, renamed: Callable[[str], str]) -> Iterator[Piece]:
    for part, size in enumerate(((shape.inner, shape.hidden),) * 2 + ((shape.hidden, shape.inner),)):
        of_all = [expert_names(shape, layer, expert)[part] for expert in range(shape.experts)]
        name = renamed(of_all[0].replace(".experts.0.", ".experts."))
        yield name, (shape.experts, *size), "", partial(_each, of_all)


def _each(names: list[str], read: Read) -> Iterator[torch.Tensor]:
    return map(read, names)


def _published(shape: Shape, layer: int, renamed: Callable[[str], str]) -> Iterator[Piece]:
    """Of gpt-oss, whose gates and ups are in turns."""
    stem = f"model.layers.{layer}.mlp.experts"
    whole, even, odd = slice(None), slice(0, None, 2), slice(1, None, 2)
    for part, held, rows, outputs, inputs in (
        ("gate", "gate_up", even, shape.inner, shape.hidden),
        ("up", "gate_up", odd, shape.inner, shape.hidden),
        ("down", "down", whole, shape.hidden, shape.inner),
    ):
        name, target = f"{stem}.{held}_proj", renamed(f"{stem}.{part}_proj.weight")

        def blocks(read: Read, name: str = name, rows: slice = rows) -> Iterator[torch.Tensor]:
            for some in zip(read(f"{name}_blocks"), read(f"{name}_scales"), strict=True):
                yield gpt_oss.in_gguf(*(one[rows] for one in some))

        def biases(read: Read, name: str = name, rows: slice = rows) -> Iterator[torch.Tensor]:
            yield read(f"{name}_bias")[:, rows]

        yield target, (shape.experts, outputs, inputs), "", blocks
        yield target.replace(".weight", ".bias"), (shape.experts, outputs), "F32", biases


def _dense(shape: Shape, name: str) -> Callable[[Read], Iterator[torch.Tensor]]:
    def values(read: Read) -> Iterator[torch.Tensor]:
        turned = shape.family == "mixtral" and name.endswith(("q_proj.weight", "k_proj.weight"))
        yield interleaved(read(name), shape.head) if turned else read(name)

    return values


def encoded(values: torch.Tensor, kind: str) -> np.ndarray[Any, Any]:
    """Rows as bytes, or numbers, of a type. Bytes are there already."""
    import gguf
    import torch

    from checkpoint.sharding.microscaling import in_mxfp4

    if values.dtype is torch.uint8:
        return values.numpy()
    if kind == "F32":
        return values.float().numpy()
    if kind == "BF16":
        return values.view(torch.int16).numpy()
    if kind == "MXFP4":
        parts = in_mxfp4(values)
        return gpt_oss.in_gguf(parts["codes"], parts["scales"]).numpy()
    return gguf.quants.quantize(values.float().numpy(), gguf.GGMLQuantizationType[kind])


def interleaved(weight: torch.Tensor, head: int) -> torch.Tensor:
    """Rows of each head reordered from halves, as Transformers rotates them, to pairs, as llama.cpp does."""
    return weight.view(-1, 2, head // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _write(shape: Shape, checkpoint: Path, path: Path, kind: str) -> None:
    import gguf
    import numpy as np
    from safetensors import safe_open

    writer: Any = gguf.GGUFWriter(path, ARCHITECTURES[shape.family])
    writer.add_name(shape.name)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.key_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    config = shape.config()
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_expert_feed_forward_length(shape.inner)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    if shape.family == "gpt_oss":
        gpt_oss.add_settings(writer, shape)
    made = [(name, size, of or kind, make) for name, size, of, make in pieces(shape, DENSE_KINDS[kind])]
    for name, size, of, _ in made:
        chosen = gguf.GGMLQuantizationType[of]
        values, width = gguf.GGML_QUANT_SIZES[chosen]
        nbytes = int(np.prod(size)) // values * width
        writer.add_tensor_info(name, size, np.dtype(np.uint16), nbytes, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    files = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    opened = {file: safe_open(checkpoint / file, framework="pt") for file in sorted(set(files.values()))}

    def read(name: str) -> torch.Tensor:
        return opened[files[name]].get_tensor(name)

    for _, _, of, make in made:
        parts = [encoded(one.contiguous(), of) for one in make(read)]
        writer.write_tensor_data(parts[0] if len(parts) == 1 else np.stack(parts))
    writer.close()
