"""What a published format is: the quantiser of Transformers that reads it, and which tensors belong together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from checkpoint.formats.unreadable import DAMAGED, unreadable
from checkpoint.native.encoding import Parts, Unencodable
from scheduler.errors import CorruptCheckpointError, UnsupportedFormatError

if TYPE_CHECKING:
    from checkpoint.place import Place


class PublishedFormat(ABC):
    """How a checkpoint's publisher stores its weights. Made by `checkpoint.formats.published.published_format`.

    A quantised weight is several tensors of the checkpoint, its *parts*: one of numbers and others of scales or zero
    points. `words` names the parts as the quantiser does (`weight`, `weight_scale_inv`).
    """

    operations: ClassVar[frozenset[str]] = frozenset()
    """Class names of the format's dequantising operations that keep dimension 0 as it is, so that rows of the parts
    give the same rows of the weight."""

    encodings: ClassVar[tuple[str, ...]] = ()
    """Names of those that keep experts of this format in their published numbers (`checkpoint/native/`)."""

    def __init__(self, name: str, settings: dict[str, Any], path: Path) -> None:
        """`name`: the `quant_method`. `settings`: config.json's `quantization_config`. `path`: the checkpoint."""
        self.name = name
        self.settings = settings
        self.path = path

    def quantizer(self, config: Any) -> Any:
        """Transformers' quantiser (HfQuantizer) for a model of this configuration, which dequantises what it loads.

        Raises UnsupportedFormatError for settings that it cannot read.
        """
        try:
            return self.make_quantizer(config)
        except DAMAGED as error:
            what = f"{self.path}: the quantization_config of config.json cannot be read"
            raise unreadable(what, error, UnsupportedFormatError) from error

    @abstractmethod
    def make_quantizer(self, config: Any) -> Any:
        """The same. May raise what Python raises for settings of other types."""

    def loading_settings(self) -> dict[str, Any]:
        """The `quantization_config` of a configuration with which `from_pretrained` dequantises this checkpoint."""
        return self.settings | {"dequantize": True}

    def weights(self, places: dict[str, Place]) -> dict[str, dict[str, str]]:
        """The quantised weights among a checkpoint's tensors: plain name -> {word: tensor's name}.

        Raises CorruptCheckpointError with the name of a part that is missing or has another shape than its weight's.
        """
        found = self.grouped(places)
        for plain, names in found.items():
            parts = {word: places[name] for word, name in names.items()}
            try:
                self.check_parts(plain, names, parts)
                shape = self.shape(parts)
            except DAMAGED as error:
                what = f"{self.path}: {_described(names, parts)} cannot be the parts of a weight"
                raise unreadable(what, error) from error
            if not shape or any(type(size) is not int or size < 1 for size in shape):
                raise CorruptCheckpointError(
                    f"{self.path}: {_described(names, parts)} make a weight of the shape {list(shape)}; fetch it again"
                )
        return found

    @abstractmethod
    def grouped(self, places: dict[str, Place]) -> dict[str, dict[str, str]]:
        """The parts of each quantised weight, by its plain name, before they are checked."""

    @abstractmethod
    def check_parts(self, plain: str, names: dict[str, str], parts: dict[str, Place]) -> None:
        """Raises CorruptCheckpointError for parts that are missing or do not fit. `names` and `parts`: by word.

        May raise what Python raises for shapes with other dimensions.
        """

    @abstractmethod
    def shape(self, parts: dict[str, Place]) -> tuple[int, ...]:
        """The shape of a dequantised weight."""

    def dequantise(self, quantizer: Any, parts: dict[str, torch.Tensor], target: str, model: Any) -> torch.Tensor:
        """A weight, or rows of it, by the quantiser's own operation, in the dtype of the model's parameter `target`."""
        operation = quantizer.get_load_operations()["dequantize"](quantizer)
        named = {word: [tensor] for word, tensor in parts.items()}
        found = operation.convert(named, full_layer_name=target, model=model, config=model.config)
        value = next(iter(found.values()))
        result: torch.Tensor = value[0] if isinstance(value, list) else value
        return result.detach()

    def encoding(self, quantizer: Any) -> str:
        """The encoding of this checkpoint's experts, by its settings; empty where there is none."""
        return self.encodings[0] if self.encodings else ""

    def published(self, quantizer: Any, parts: dict[str, torch.Tensor], target: str) -> Parts:
        """What a store keeps of a weight [out, in]: the parts of `encoding`, not dequantised, each with two dimensions.

        `parts`: by word. `target`: the model's parameter that the weight is a part of. Raises Unencodable.
        """
        raise Unencodable(f"{self.name} has no encoding")

    def check(self, word: str, name: str, tensor: torch.Tensor) -> None:  # noqa: B027  (nothing to check by default)
        """Check the values of a part, before it is used. Raises CorruptCheckpointError with its name."""

    def lost(self, part: str, names: dict[str, str], parts: dict[str, Place]) -> CorruptCheckpointError:
        """The error for a weight that has `names`, but not the part of this name."""
        held = next(iter(names))
        return CorruptCheckpointError(
            f"{parts[held].file} holds {names[held]}, but {self.path} has no {part}, which belongs to it; "
            "fetch it again, if it was downloaded"
        )

    def check_finite(self, name: str, scales: torch.Tensor) -> None:
        """Raises CorruptCheckpointError for scales of NaN or infinity."""
        if not bool(torch.isfinite(scales.float()).all()):
            raise CorruptCheckpointError(
                f"{self.path}: {name} holds a scale of NaN or infinity; fetch it again, if it was downloaded"
            )

    def rows(self, parts: dict[str, Place]) -> int | None:
        """The least number of rows of a weight that can be dequantised alone; None if it is dequantised whole."""
        return None

    def row_parts(self, parts: dict[str, Place], first: int, last: int) -> dict[str, Place]:
        """The parts of rows first..last - 1 of a weight. `first` is a multiple of `rows(parts)`."""
        raise NotImplementedError


def _described(names: dict[str, str], parts: dict[str, Place]) -> str:
    return ", ".join(f"{names[word]} ({place.dtype} {list(place.shape)})" for word, place in parts.items())


def by_suffix(names: Iterable[str], words: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    """Tensors whose names end in a quantiser's words (`serialized_names`), by the name of the weight they make up."""
    ends = sorted(((word, plain) for plain, some in words.items() for word in some), key=lambda item: -len(item[0]))
    found: dict[str, dict[str, str]] = {}
    for name in names:
        for word, plain in ends:
            if name == word or name.endswith(f".{word}"):
                found.setdefault(name.removesuffix(word) + plain, {})[word] = name
                break
    return found
