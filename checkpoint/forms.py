"""Experts in fewer bits: quantised by HQQ (half-quadratic quantisation; Fate 4.5), restored before they compute.

A form is a blob with other tensors than the full one. Each weight NAME of two dimensions or more becomes three tensors:
`NAME.packed` (uint8 [rows / per byte, group]), `NAME.scale` and `NAME.zero` (float16 [rows]). Biases are unchanged. A
row is a group of `group` consecutive weights of NAME. The last group is padded with NAME's last weight, and the rows to
a multiple of those in a byte. Packing is HQQ's: for int4 the first half of the rows is in the high bits, the second in
the low ones. A weight is (packed - zero) * scale, computed in float32 and rounded to the expert's dtype, as in HQQ's
dequantisation.

Assumed: groups of 64, since Fate gives no size; with scale and zero that is 4.5 and 2.5 bits a weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from checkpoint.family import DTYPES
from checkpoint.manifest import Blob, LayerSpec, TensorSpec
from checkpoint.native.form_routines import FormRoutine, Weight, form_routine, restore_weights
from checkpoint.sharding import half_quadratic
from checkpoint.tensors import aligned_buffer, round_up
from scheduler.errors import CheckpointError

FORMS = {"int4": 4, "int2": 2}
"""Name and bits a weight, the larger first."""

GROUP = 64
PIECE = 1 << 18
"""Weights that a CPU restores at a time: as many as fit into its cache."""

DEVICE_PIECE = 1 << 24
_ALIGN = 64
_HALF_MAX = torch.finfo(torch.float16).max


def planned_form(layer: LayerSpec, form: str, group: int = GROUP) -> LayerSpec:
    """The layout of a layer's file in that form, without checksums."""
    tensors: list[TensorSpec] = []
    end = 0
    for name, dtype, shape in _parts(layer, FORMS[form], group):
        start = round_up(end, _ALIGN)
        tensors.append(TensorSpec(name, dtype, shape, start))
        end = start + math.prod(shape) * (1 if dtype == "uint8" else DTYPES[dtype].itemsize)
    length = round_up(end)
    blobs = tuple(Blob(expert * length, length, "") for expert in range(len(layer.blobs)))
    return LayerSpec(layer.module, Path(layer.file).with_suffix(f".{form}").name, tuple(tensors), blobs)


def _parts(layer: LayerSpec, bits: int, group: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for spec in layer.tensors:
        if not is_weight(spec):
            yield spec.name, spec.dtype, spec.shape
            continue
        rows = _rows(math.prod(spec.shape), bits, group)
        yield f"{spec.name}.packed", "uint8", (rows * bits // 8, group)
        yield f"{spec.name}.scale", "float16", (rows,)
        yield f"{spec.name}.zero", "float16", (rows,)


def is_weight(spec: TensorSpec) -> bool:
    """Whether this parameter is quantised."""
    return len(spec.shape) > 1 and math.prod(spec.shape) > 0


def _rows(count: int, bits: int, group: int) -> int:
    return round_up(-(-count // group), 8 // bits)


def quantise(parameters: dict[str, torch.Tensor], layer: LayerSpec, form: str, group: int = GROUP) -> torch.Tensor:
    """The blob (uint8, page-aligned) of one expert, whose `parameters` are those of `layer`.

    The same on every machine: HQQ runs on the processor. Raises CheckpointError for weights too large to be scaled.
    """
    planned = planned_form(layer, form, group)
    blob = aligned_buffer(planned.blob_bytes)  # zeroed, so that gaps are
    views = planned.views(blob)
    for spec in layer.tensors:
        value = parameters[spec.name]
        if not is_weight(spec):
            views[spec.name].copy_(value)
            continue
        try:
            found = quantise_weight(value, FORMS[form], group)
        except OverflowError as error:
            raise CheckpointError(f"{layer.module}.{spec.name} cannot be quantised to {form}: {error}") from error
        for part, tensor in found.items():
            views[f"{spec.name}.{part}"].copy_(tensor)
    return blob


def quantise_weight(weight: torch.Tensor, bits: int, group: int = GROUP) -> dict[str, torch.Tensor]:
    """`packed`, `scale` and `zero` of one weight alone. Raises OverflowError."""
    rows = _rows(weight.numel(), bits, group)
    return dict(zip(("packed", "scale", "zero"), _quantise(weight, bits, rows, group), strict=True))


def _quantise(weight: torch.Tensor, bits: int, rows: int, group: int) -> tuple[torch.Tensor, ...]:
    """Packed [rows * bits / 8, group], scale [rows], zero [rows], by HQQ. Raises OverflowError."""
    flat = weight.detach().reshape(-1)
    missing = rows * group - flat.numel()
    groups = (torch.cat((flat, flat[-1:].expand(missing))) if missing else flat).view(rows, group)
    numbers, scale, zero = half_quadratic.quantised(groups, bits)
    # A group far from zero that hardly varies: its zero exceeds float16, so its mean stands for all its weights.
    flat_rows = (zero.abs() > _HALF_MAX).view(-1)
    if bool(flat_rows.any()):
        numbers[flat_rows] = 0
        scale[flat_rows] = 1.0
        zero[flat_rows] = -groups[flat_rows].float().mean(dim=1, keepdim=True)
    for value in (scale, zero):
        if bool((value.abs() > _HALF_MAX).any()):
            raise OverflowError(f"a scale of {float(value.abs().max()):g} is beyond float16's {_HALF_MAX:g}")
    return _pack_bits(numbers, bits), scale.half().view(-1), zero.half().view(-1)


def _pack_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """`numbers` [rows, group] in [rows * bits / 8, group], the first rows in the highest bits."""
    first, *others = numbers.chunk(8 // bits)
    packed = first.clone()
    for part in others:
        packed.bitwise_left_shift_(bits).bitwise_or_(part)
    return packed


@dataclass(frozen=True)
class Scratch:
    """Working memory for restoring with torch: packed numbers and weights, for one piece at a time.

    On a CPU it is there for the case that no compiled routine restores.
    """

    WEIGHT_BYTES: ClassVar[int] = 5
    numbers: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def for_layers(layers: list[LayerSpec], group: int, device: str = "cpu") -> Scratch:
        """Enough for these full layers' largest weight, in pieces."""
        return Scratch.for_weights(Scratch.weights_for(layers, group, device), device)

    @staticmethod
    def for_weights(count: int, device: str) -> Scratch:
        """For so many weights at a time."""
        return Scratch(
            torch.empty(count, dtype=torch.uint8, device=device), torch.empty(count, dtype=torch.float32, device=device)
        )

    @staticmethod
    def weights_for(layers: list[LayerSpec], group: int, device: str = "cpu") -> int:
        """How many weights at a time; each takes `WEIGHT_BYTES`."""
        largest = max((math.prod(s.shape) for layer in layers for s in layer.tensors if is_weight(s)), default=0)
        count = min(PIECE if device == "cpu" else DEVICE_PIECE, round_up(largest, group))
        return max(count // group, 1) * group

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.weights.nbytes


def restore(
    blob: torch.Tensor, layer: LayerSpec, form: str, group: int = GROUP, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """A form's blob (uint8) as the parameters of the full `layer`, each in its own dtype, in memory of their own."""
    full = {spec.name: torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device) for spec in layer.tensors}
    views = planned_form(layer, form, group).views(blob)
    restore_into(full, views, FORMS[form], Scratch.for_layers([layer], group, device))
    return full


def restore_into(
    full: dict[str, torch.Tensor], form: dict[str, torch.Tensor], bits: int, scratch: Scratch, threads: int = 1
) -> None:
    """Fill the parameters `full` from the tensors of a form's blob. Allocates nothing that stays.

    `threads`: on how many at most, on a CPU.
    """
    compiled: dict[FormRoutine, list[Weight]] = {}
    for name, target in full.items():
        if name in form:
            target.copy_(form[name])
            continue
        packed, scale, zero = (form[f"{name}.{part}"] for part in ("packed", "scale", "zero"))
        weight = (target.view(-1), packed, scale, zero)
        routine = compiled_routine(bits, target.dtype) if target.device.type == "cpu" else None
        if routine is None:
            _restore_weight(weight, bits, scratch)
        else:
            compiled.setdefault(routine, []).append(weight)
    for routine, weights in compiled.items():
        restore_weights(weights, routine, threads)


def compiled_routine(bits: int, dtype: torch.dtype) -> FormRoutine | None:
    """What restores weights of this dtype on a CPU in one pass. None: torch does, piece by piece.

    The first call compiles and compares it, which takes about a second.
    """
    return form_routine(bits, dtype, lambda weight: _restore_weight(weight, bits, Scratch.for_weights(PIECE, "cpu")))


def _restore_weight(weight: Weight, bits: int, scratch: Scratch) -> None:
    """Fill a weight's values with torch alone: on a GPU, and where no compiled routine restores."""
    target, packed, scale, zero = weight
    per, mask = 8 // bits, (1 << bits) - 1
    rows, group = packed.shape
    step = scratch.weights.numel() // group
    for part in range(per):
        for first in range(0, rows, step):
            last = min(first + step, rows)
            begin = (part * rows + first) * group
            wanted = min((last - first) * group, target.numel() - begin)
            if wanted <= 0:
                return
            numbers = scratch.numbers[: (last - first) * group].view(last - first, group)
            weights = scratch.weights[: (last - first) * group].view(last - first, group)
            torch.bitwise_right_shift(packed[first:last], 8 - bits * (part + 1), out=numbers)
            numbers.bitwise_and_(mask)
            weights.copy_(numbers)
            here = slice(part * rows + first, part * rows + last)
            weights.sub_(zero[here, None]).mul_(scale[here, None])
            target[begin : begin + wanted].copy_(weights.view(-1)[:wanted])
