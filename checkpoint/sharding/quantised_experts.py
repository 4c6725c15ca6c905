"""Experts quantised while a checkpoint is sharded: which checkpoints can be, and what goes into a blob.

MXFP4 is as its specification converts (`microscaling`), in every layout of experts.

int4 is HQQ's, bit for bit (`half_quadratic`); a weight is number * scale + minimum, where HQQ has (number - zero) *
scale. int8 is rounded to nearest: a weight is (number - 128) * scale, and a group's largest has the number 1 or 255.
Both are stored as `checkpoint.native.integers` describes. Only one part's experts are in memory at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint.native.encoding import CODES, SCALES, Encoding
from checkpoint.native.encodings import ENCODINGS, GGML_INTEGERS, MXFP4, MXFP4_OUTPUTS_FIRST
from checkpoint.native.integers import MINIMUMS, packed_rows
from checkpoint.quantisation import BITS, GROUPS, Quantisation
from checkpoint.sharding import half_quadratic
from checkpoint.sharding.convert import Conversion, Part
from checkpoint.sharding.microscaling import in_mxfp4
from checkpoint.sharding.native_experts import NativeExperts, first_expert
from checkpoint.sharding.weights import buffer_bytes, read
from checkpoint.tensors import aligned_buffer
from scheduler.errors import CheckpointError, UnsupportedFormatError

Tensors = dict[str, torch.Tensor]

THREADS = 16
"""The most weights quantised at a time, as where forms are added."""

_FP8 = ("fp8", "mxfp8")
_FP4_CODES = "I8"
_MIDDLE = 128
"""The number of a weight that is zero, of 8 bits."""


@dataclass(frozen=True)
class QuantisedExperts(NativeExperts):
    """What a store keeps in integers, or MXFP4, made here."""

    quantisation: Quantisation | None = None

    def tensors(self, plan: Conversion, part: Part, tensors: Tensors) -> Tensors | None:
        """None: experts are converted first."""
        return None

    def stored(self, plan: Conversion, part: Part, parameters: Tensors) -> Tensors:
        """What goes into the blobs of experts with these finite parameters, each [n, ...].

        Raises CheckpointError for weights too large for scales in float16.
        """
        quantisation = self.quantisation
        if quantisation is None:
            return parameters
        example, count = self.examples[part.layer], part.last - part.first
        found = {name: torch.empty((count, *of.shape[1:]), dtype=of.dtype) for name, of in example.items()}

        def fill(name: str, row: int) -> None:
            weight = parameters[name][row]
            if name in found:
                found[name][row].copy_(weight)
                return
            try:
                parts = quantised(weight, quantisation, self.encoding)
            except OverflowError as error:
                raise CheckpointError(
                    f"{plan.modules[part.layer][0]}.{name} of expert {part.first + row} cannot be quantised to "
                    f"{quantisation.name}: {error}; leave out --experts {quantisation.name}"
                ) from error
            for key, value in parts.items():
                found[f"{name}.{key}"][row].copy_(value)

        jobs = [(name, row) for row in range(count) for name in parameters]
        threads = min(len(jobs), len(os.sched_getaffinity(0)), THREADS)
        with ThreadPoolExecutor(threads, "odmoe-quantise") as pool:
            for _ in pool.map(lambda job: fill(*job), jobs):
                pass
        return found


def quantised(weight: torch.Tensor, quantisation: Quantisation, encoding: Encoding | None = None) -> Tensors:
    """The parts of a finite weight [out, in], or [in, out] if the `encoding` has its `inputs_first`. Without one: those
    of integers (`checkpoint.native.integers`). Raises OverflowError."""
    if quantisation.is_mxfp4 and encoding is not None:
        parts = in_mxfp4(weight.t() if encoding.inputs_first else weight)
        found = encoding.encode({name: part.unsqueeze(0) for name, part in parts.items()})
        return {name: part[0] for name, part in found.items()}
    groups = weight.reshape(-1, quantisation.group_of(weight.shape[1]))
    numbers, levels = (_by_hqq if quantisation.has_minimums else _to_nearest)(groups)
    codes = packed_rows(numbers.view(weight.shape), quantisation.bits)
    return {CODES: codes, **{name: level.view(len(weight), -1) for name, level in levels.items()}}


def _by_hqq(groups: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    """Numbers of 4 bits [n, group], scales and minimums in float16 [n, 1]. Minimums do not overflow where zeros would:
    a group far from zero that hardly varies has a large zero, and a minimum of the weights' own size."""
    numbers, scale, zero = half_quadratic.quantised(groups, BITS["int4"])
    levels = {SCALES: scale.half(), MINIMUMS: (-zero * scale).half()}
    for name, level in levels.items():
        if not bool(level.isfinite().all()):
            raise OverflowError(f"its {name} exceed {torch.finfo(torch.float16).max:g}, the most of float16")
    return numbers, levels


def _to_nearest(groups: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    """Numbers of 8 bits [n, group], and scales in bfloat16 [n, 1]: rounded up, so that the largest weight has a
    number. bfloat16 has float32's range: weights may be tiny."""
    weights = groups.float()
    exact = weights.abs().amax(dim=1, keepdim=True) / (_MIDDLE - 1)
    scale = exact.bfloat16()
    scale = torch.where(scale.float() < exact, (scale.view(torch.int16) + 1).view(torch.bfloat16), scale)
    steps = (weights / torch.where(scale > 0, scale.float(), 1.0)).round_()
    return steps.clamp_(1 - _MIDDLE, _MIDDLE - 1).add_(_MIDDLE).to(torch.uint8), {SCALES: scale}


def plan_quantised(plan: Conversion, quantisation: Quantisation) -> QuantisedExperts:
    """The layout of each layer's experts, found with the first of them.

    Raises CheckpointError. `check_quantisable` has passed.
    """
    full = {layer: _parameters(plan, layer) for layer in plan.layers}
    encoding = ENCODINGS[_encoding(plan, quantisation)]
    examples = {layer: dict(_examples(parameters, quantisation, encoding)) for layer, parameters in full.items()}
    made_from = _format(plan) or str(plan.model.dtype).removeprefix("torch.")
    return QuantisedExperts(encoding, examples, full, "", made_from, quantisation)


def _encoding(plan: Conversion, quantisation: Quantisation) -> str:
    if not quantisation.is_mxfp4:
        return GGML_INTEGERS
    return MXFP4 if is_transposed(plan.modules[plan.layers[0]][1]) else MXFP4_OUTPUTS_FIRST


def is_transposed(module: Any) -> bool:
    """Whether an experts module keeps its weights as [inputs, outputs]."""
    return bool(getattr(module, "is_transposed", False))


def _parameters(plan: Conversion, layer: int) -> Tensors:
    """Of an expert, [1, ...] on the meta device, in the dtypes that a family wants them in."""
    part = first_expert(plan, layer)
    if part is None:
        return {key: value[:1] for key, value in plan.parameters[layer].items()}
    found = plan.convert(part, read(part.places, aligned_buffer(buffer_bytes(part.places))))
    return {key: value.to("meta") for key, value in found.items()}


def _examples(
    parameters: Tensors, quantisation: Quantisation, encoding: Encoding
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in parameters.items():
        if value.dim() != 3:
            yield name, value
            continue
        parts = quantised(torch.zeros(value.shape[1:], dtype=value.dtype), quantisation, encoding)
        yield from ((f"{name}.{key}", part.unsqueeze(0).to("meta")) for key, part in parts.items())


def check_quantisable(plan: Conversion, quantisation: Quantisation) -> None:
    """Raises UnsupportedFormatError for a checkpoint that is quantised already, other than to FP8, and for experts
    whose layout has no groups of inputs."""
    if format := _format(plan):
        kinds = {place.dtype for group in _groups(plan) for key, place in group.places.items() if key in plan.words}
        if format not in _FP8 or _FP4_CODES in kinds:
            raise quantised_already(plan.source.path, format, quantisation)
    for layer in plan.layers:
        check_layout(plan.modules[layer][1], plan.parameters[layer], plan.model.config.model_type, quantisation)


def quantised_already(path: Path, format: str, quantisation: Quantisation) -> UnsupportedFormatError:
    """The error for a checkpoint in this format."""
    return UnsupportedFormatError(
        f"{path} is quantised already ({format}), and --experts {quantisation.name} is for checkpoints in bfloat16, "
        f"float16, float32 or block FP8; leave it out, which keeps experts as published, or give the model that "
        "was quantised"
    )


def check_layout(module: Any, parameters: Mapping[str, torch.Tensor], family: str, quantisation: Quantisation) -> None:
    """Raises UnsupportedFormatError for an experts module whose `parameters`, [E, ...] each, cannot be quantised."""
    if is_transposed(module) and not quantisation.is_mxfp4:
        fits = all(value.shape[1] % GROUPS[0] == 0 for value in parameters.values() if value.dim() == 3)
        raise UnsupportedFormatError(
            f"--experts {quantisation.name} quantises groups of a weight's inputs, and {family} keeps its experts' "
            f"weights transposed, as [inputs, outputs]; leave it out{', give --experts mxfp4' if fits else ''}, or add "
            "a form with --forms int4"
        )
    for name, value in parameters.items():
        if value.dim() != 3:
            continue
        inputs = value.shape[1 if is_transposed(module) else 2]
        if not quantisation.group_of(inputs):
            raise UnsupportedFormatError(
                f"--experts {quantisation.name} needs rows of a multiple of {GROUPS[0]} inputs, and {name} of {family} "
                f"has {inputs}; leave it out, or add a form with --forms int4"
            )


def _format(plan: Conversion) -> str:
    """Of quantised experts; empty where they are not."""
    if not any(key in plan.words for group in _groups(plan) for key in group.places):
        return ""
    return plan.format.name if plan.format else "GGUF"


def _groups(plan: Conversion) -> Iterator[Any]:
    for groups in plan.groups.values():
        yield from groups.values()
