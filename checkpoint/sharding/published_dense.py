"""Dense weights in their published numbers, as `checkpoint/sharding/native_experts.py` has experts."""

from __future__ import annotations

import torch

from checkpoint.formats.gguf_blocks import encoding_of, published_blocks
from checkpoint.manifest import stored_name
from checkpoint.native.encoding import CODES, SCALES, Unencodable
from checkpoint.native.encodings import ENCODINGS
from checkpoint.sharding.convert import Conversion
from checkpoint.sharding.gguf_conversion import GgufWeight
from checkpoint.sharding.published_numbers import AS_THEY_ARE, published_weight
from checkpoint.sharding.quantised_weight import QuantisedWeight
from checkpoint.sharding.weights import DTYPES, Dense, buffer_bytes, read
from checkpoint.tensors import aligned_buffer
from scheduler.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


def published_dense(plan: Conversion, dense: Dense, target: str) -> tuple[str, Tensors]:
    """The encoding of a dense weight, and its parts.

    They are compared with all of the dequantised weight, bit for bit. Raises Unencodable where it is not quantised,
    where no encoding has its numbers, or where a bit differs; CheckpointError.
    """
    if isinstance(dense, QuantisedWeight):
        name, found = _of_checkpoint(plan, dense, target)
    elif isinstance(dense, GgufWeight):
        name, found = _of_gguf(dense)
    else:
        raise Unencodable(f"{target} is not quantised")
    encoding = ENCODINGS[name]
    parts = {part: of[0].contiguous() for part, of in encoding.encode(found).items()}
    try:
        shapes = {part: (stored_name(of.dtype), tuple(of.shape)) for part, of in parts.items()}
    except CheckpointError as error:
        raise Unencodable(str(error)) from error
    shape = (dense.shape[0], dense.shape[1])
    if not encoding.fits_weight(shape, shapes):
        raise Unencodable(f"{target} has parts of other shapes than those that {name} has")
    restored = torch.empty(shape, dtype=DTYPES[dense.dtype])
    scratch = torch.empty(encoding.scratch_for([shape], "cpu", torch.get_num_threads()), dtype=torch.uint8)
    encoding.restore_into({"weight": restored}, {f"weight.{part}": of for part, of in parts.items()}, scratch)
    rest = restored.view(-1).view(torch.uint8)
    for piece in dense.pieces():
        if not torch.equal(rest[: len(piece)], piece):
            raise Unencodable(f"{target} is restored with other bits than Transformers dequantises it to")
        rest = rest[len(piece) :]
    return name, parts


def _of_checkpoint(plan: Conversion, dense: QuantisedWeight, target: str) -> tuple[str, Tensors]:
    """Numbers and scales, each [1, ...]."""
    tensors = read(dense.parts, aligned_buffer(buffer_bytes(dense.parts)))
    for word, tensor in tensors.items():
        dense.format.check(word, dense.words[word], tensor)
    name = plan.encoding()
    if not name:
        raise Unencodable(f"{dense.format.name} has no encoding")
    if dense.format.name in AS_THEY_ARE:
        codes, scales = AS_THEY_ARE[dense.format.name]
        if {f"weight{codes}", f"weight{scales}"} - tensors.keys():
            raise Unencodable(f"{target} has no numbers and scales of {dense.format.name}")
        found = {CODES: tensors[f"weight{codes}"], SCALES: tensors[f"weight{scales}"]}
    else:
        found = dict(published_weight(plan, target, tensors))
    return name, {part: of.unsqueeze(0) for part, of in found.items()}


def _of_gguf(dense: GgufWeight) -> tuple[str, Tensors]:
    from gguf import GGMLQuantizationType

    (name, *others) = dense.parts
    if others or not dense.weights.plain(name):
        raise Unencodable(f"{dense.target} is not one tensor of the file as it is")
    tensors = read(dense.parts, aligned_buffer(buffer_bytes(dense.parts)))
    kind = dense.weights.file.tensors[name].kind
    return encoding_of([GGMLQuantizationType(kind).name]), dict(published_blocks(kind, tensors[name].unsqueeze(0)))
