"""The dense part's weights that stay encoded: which layers can have them, and their file in a store.

They lie in files `encoded-NNNNN.safetensors` beside the other dense weights. The parts of a weight have the name of the
model's parameter: `lm_head.weight.codes`, `lm_head.weight.scales`. The file's metadata say the encoding of each weight.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from checkpoint import family
from checkpoint.manifest import PLAIN_DENSE, stored_name
from checkpoint.native.encoded_linear import EncodedLinear, LinearScratch
from checkpoint.native.encoding import Parts
from checkpoint.native.encodings import ENCODINGS
from checkpoint.quantisation import BITS
from scheduler.errors import CheckpointError, CorruptStoreError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PLAIN, PUBLISHED = PLAIN_DENSE, "published"

FILES = "encoded-*.safetensors"
ENCODING_OF = "encodings"
"""In a file's metadata: JSON, encoding by parameter."""
SCRATCH = "odmoe_scratch"
"""The name of a model's `LinearScratch`."""

GROUP = 64
"""Inputs that have a scale together; fewer where these do not divide a row."""
LEAST_GROUP = 16
LEAST_ROWS = 16
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_PASSES = (2, 1)
"""Tokens of the passes in which it is seen who reads a weight: of a prompt, and of a token after it."""


def group_of(columns: int) -> int:
    """How many neighbouring inputs have a scale together; 0 where a row cannot be divided so."""
    return next((group for group in (GROUP, GROUP // 2, LEAST_GROUP) if columns % group == 0), 0)


def encoded_bytes(kept: str, shape: tuple[int, int]) -> int:
    """Of a weight [out, in] in int8 or int4: codes, a scale for each group, and with int4 a minimum. 2 bytes each."""
    rows, columns = shape
    levels = 1 if kept == "int8" else 2
    return rows * columns * BITS[kept] // 8 + levels * 2 * rows * (columns // group_of(columns))


def encodable_layers(config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    """The linear layers of a model whose weights can be encoded, with their weights' shapes [out, in].

    Not among them are routers, tied weights, layers that the family keeps in float32, classes that do more than
    `torch.nn.Linear`, layers whose weight something else reads than the layer itself, and the smallest.
    """
    model: Any = family.meta_model(config, dtype)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    shared = {id(embedding.weight) for embedding in [model.get_input_embeddings()] if embedding is not None}
    if getattr(config, "tie_word_embeddings", False):
        shared |= {id(head.weight) for head in [model.get_output_embeddings()] if head is not None}
    found = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear
        and _ROUTERS.isdisjoint(name.split("."))
        and layer.weight.dtype == dtype
        and layer.out_features >= LEAST_ROWS
        and group_of(layer.in_features)
        and f"{name}.weight" not in tied
        and id(layer.weight) not in shared
    }
    read = _read_by_others(model, config, found.values())
    return {name: (layer.out_features, layer.in_features) for name, layer in found.items() if layer not in read}


class _Watched(nn.Linear):
    """A layer that notes when its weight is read by others than itself."""

    is_read: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self._parameters["weight"], self._parameters["bias"])  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            vars(self)["is_read"] = True
        return super().__getattr__(name)


def _read_by_others(model: Any, config: PreTrainedConfig, layers: Iterable[nn.Module]) -> set[nn.Module]:
    """Layers whose weight is read beside them in passes without arithmetic, as far as the family can do these.

    `EncodedLinear.weight` serves those that a family's passes do not show.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    watched: list[Any] = list(layers)
    for layer in watched:
        layer.__class__ = _Watched
        vars(layer)["is_read"] = False
    ALL_EXPERTS_FUNCTIONS.register(_SHAPES, _no_arithmetic)
    model.set_experts_implementation(_SHAPES)
    with contextlib.suppress(Exception), torch.inference_mode():
        cache = family.new_cache(config)
        for tokens in _PASSES:
            ids = torch.zeros((1, tokens), dtype=torch.int64, device="meta")
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    return {layer for layer in watched if layer.is_read}


_SHAPES = "odmoe_watched"


def _no_arithmetic(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(hidden)


class EncodedFiles:
    """The encoded weights of a store's dense part. Reads headers only, until `fill`."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the dense part. Raises CorruptStoreError."""
        self._files: dict[str, Path] = {}
        self.encodings: dict[str, str] = {}
        """By parameter."""
        for file in sorted(folder.glob(FILES)):
            with _opened(file) as opened:
                found = _metadata(file, opened)
            self.encodings.update(found)
            self._files.update(dict.fromkeys(found, file))

    def place_layers(self, model: nn.Module) -> None:
        """Put a layer without a weight in the place of each linear layer whose weight is encoded. Raises
        CorruptStoreError."""
        for parameter in self.encodings:
            name = parameter.removesuffix(".weight")
            try:
                layer = model.get_submodule(name)
            except AttributeError:
                layer = nn.Identity()
            if not isinstance(layer, nn.Linear):
                raise CorruptStoreError(
                    f"{self._files[parameter]} holds {parameter}, which is no linear layer of the model in "
                    "config.json; make the store again"
                )
            parent, _, child = name.rpartition(".")
            placed = EncodedLinear(layer.in_features, layer.out_features, layer.bias)
            setattr(model.get_submodule(parent), child, placed)

    def fill(self, model: Any, dtype: torch.dtype) -> None:
        """Load the weights of the layers that `place_layers` has placed and that are still there. Raises
        CorruptStoreError."""
        layers: list[EncodedLinear] = []
        placed = dict(model.named_modules())
        for parameter, parts in self.weights():
            layer = placed.get(parameter.removesuffix(".weight"))
            if layer is None:
                continue
            if not _fits(self.encodings[parameter], layer.shape, parts):
                raise CorruptStoreError(
                    f"{self._files[parameter]} holds {parameter} in other shapes than config.json says; make the store "
                    "again"
                )
            layer.fill(ENCODINGS[self.encodings[parameter]], parts, dtype)
            layers.append(layer)
        if layers:
            model.add_module(SCRATCH, LinearScratch(layers))

    def restore_into(self, model: Any) -> None:
        """Give a model of Transformers, with weights of its own, those that are restored from here. Raises
        CorruptStoreError."""
        for parameter, parts in self.weights():
            target = model.get_parameter(parameter).data
            encoding = ENCODINGS[self.encodings[parameter]]
            scratch = torch.empty(
                encoding.scratch_for([tuple(target.shape)], target.device.type, torch.get_num_threads()),
                dtype=torch.uint8,
                device=target.device,
            )
            native = {f"weight.{name}": part.to(target.device) for name, part in parts.items()}
            encoding.restore_into({"weight": target}, native, scratch)

    def weights(self) -> Iterator[tuple[str, Parts]]:
        """The parts of each weight, in memory of their own. Raises CorruptStoreError."""
        for file in sorted(set(self._files.values())):
            with _opened(file) as opened:
                names = set(opened.keys())
                for parameter in (name for name, of in self._files.items() if of == file):
                    encoding = ENCODINGS[self.encodings[parameter]]
                    parts = [one for one in (*encoding.parts, *encoding.more_parts) if f"{parameter}.{one}" in names]
                    yield parameter, {one: opened.get_tensor(f"{parameter}.{one}").clone() for one in parts}


def _fits(encoding: str, shape: tuple[int, int], parts: Parts) -> bool:
    shapes = {name: (stored_name(part.dtype), tuple(part.shape)) for name, part in parts.items()}
    try:
        whole = all(name in shapes for name in ENCODINGS[encoding].parts)
        return whole and ENCODINGS[encoding].fits_weight(shape, shapes)
    except CheckpointError:
        return False


def _metadata(file: Path, opened: Any) -> dict[str, str]:
    try:
        found = json.loads(opened.metadata()[ENCODING_OF])
        if all(encoding in ENCODINGS for encoding in found.values()):
            return dict(found)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        pass
    raise CorruptStoreError(f"{file} does not say how its weights are encoded; make the store again")


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CorruptStoreError(f"{file} is damaged ({error}); make the store again") from error
