"""Formats whose weights are several tensors without common rows, each dequantised whole."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from checkpoint.formats.base import PublishedFormat, by_suffix
from scheduler.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from checkpoint.place import Place


class PackedFormat(PublishedFormat):
    """A weight whose tensors are named `X.` and a word each."""

    words: ClassVar[tuple[str, ...]]
    """All words that the tensors of a weight may have."""
    needed: ClassVar[tuple[str, ...]]
    """Words that each quantised weight has."""
    scales: ClassVar[tuple[str, ...]] = ("scales",)
    """Words of the tensors that must be finite."""

    def check_settings(self) -> None:
        """Raises UnsupportedFormatError for settings that cannot be read."""

    @abstractmethod
    def restore(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """A weight [out, in] of its parts, by word."""

    def make_quantizer(self, config: Any) -> Any:
        from checkpoint.formats.unpack import UnpackingConfig, UnpackingQuantizer

        self.check_settings()
        return UnpackingQuantizer(UnpackingConfig(self.words, self.restore), pre_quantized=True)

    def loading_settings(self) -> dict[str, Any]:
        from checkpoint.formats.unpack import METHOD

        return {"quant_method": METHOD, "words": self.words, "restore": self.restore}

    def grouped(self, places: dict[str, Place]) -> dict[str, dict[str, str]]:
        found = by_suffix(places, self.quantizer(None).serialized_names)
        return {
            plain: names
            for plain, names in found.items()
            if names.keys() != {"weight"} or not self.is_plain(places[names["weight"]])
        }

    def check_parts(self, plain: str, names: dict[str, str], parts: dict[str, Place]) -> None:
        for word in self.needed:
            if word not in parts:
                raise self.lost(plain.removesuffix("weight") + word, names, parts)
        self.check_shapes(names, parts)

    def is_plain(self, weight: Place) -> bool:
        """Whether a tensor that has no scales is a plain weight."""
        return True

    def check_shapes(self, names: dict[str, str], places: dict[str, Place]) -> None:
        """Raises CorruptCheckpointError for tensors of a weight whose shapes do not fit."""

    def expect(self, name: str, place: Place, dtype: str, shape: tuple[int, ...]) -> None:
        """Raises CorruptCheckpointError if a tensor has another dtype or shape."""
        if place.dtype != dtype or place.shape != shape:
            raise CorruptCheckpointError(
                f"{place.file}: {name} is {place.dtype} {list(place.shape)}, its weight wants {dtype} {list(shape)}; "
                "fetch it again, if it was downloaded"
            )

    def check(self, word: str, name: str, tensor: torch.Tensor) -> None:
        if word in self.scales:
            self.check_finite(name, tensor)

    def setting(self, name: str, default: Any) -> Any:
        """Of the quantization_config in config.json."""
        value = self.settings.get(name)
        return default if value is None else value
