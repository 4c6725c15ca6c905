"""Tensors of a GGUF file as a model's parameters, by the functions with which Transformers loads such a file.

Transformers has two ways, by architecture. The older one dequantises with the package gguf and calls a processor for
each tensor (`transformers.modeling_gguf_pytorch_utils`). The newer one has operations, as other checkpoints have
(`transformers.integrations.gguf`).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch

from checkpoint.formats.gguf_file import GgufFile

_EXPERTS = "_exps.weight"


class GgufWeights(ABC):
    """`targets`: of each tensor that the model has, the model's parameter that it is, or is a part of."""

    targets: dict[str, str]

    def __init__(self, file: GgufFile, model: Any) -> None:
        """`model`: on the meta device; its dtype is that of the parameters."""
        self.file = file
        self.model = model

    @abstractmethod
    def plain(self, name: str) -> bool:
        """Whether a tensor is a parameter as it is, so that rows of it are the same rows of the parameter."""

    @abstractmethod
    def parameter(self, target: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """A parameter, or some experts' rows or some rows of it, in the model's dtype.

        `tensors`: its tensors by name, as bytes (uint8 [..., bytes of a row]). Raises ValueError, LookupError or
        TypeError for shapes that do not fit.
        """


def gguf_weights(file: GgufFile, model: Any) -> GgufWeights:
    """By the way in which Transformers loads this architecture."""
    from transformers.integrations.gguf import is_gguf_arch_supported

    return (_ByOperations if is_gguf_arch_supported(file.architecture) else _ByProcessor)(file, model)


class _ByProcessor(GgufWeights):
    def __init__(self, file: GgufFile, model: Any) -> None:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        super().__init__(file, model)
        self._processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=file.config)
        self._names: dict[str, str] = get_gguf_hf_weights_map(model, self._processor)
        found = {name: self._names.get(self._key(name)) for name in file.tensors}
        self.targets = {name: target for name, target in found.items() if target is not None}

    def _key(self, name: str) -> str:
        return name.removesuffix(".weight") if name.endswith(_EXPERTS) else name

    def plain(self, name: str) -> bool:
        shape = tuple(self.model.get_parameter_or_buffer(self.targets[name]).shape)
        return self.file.tensors[name].shape == shape and not name.endswith(_EXPERTS)

    def parameter(self, target: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        import gguf

        made: dict[str, torch.Tensor] = {}
        for name, data in tensors.items():
            values = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType(self.file.tensors[name].kind))
            result = self._processor.process(
                weights=values, name=name, tensor_key_mapping=self._names, parsed_parameters={"tensors": made}
            )
            if result.name is not None:
                made[target] = torch.from_numpy(result.weights)
        return made[target].to(self.model.dtype, copy=True)


class _ByOperations(GgufWeights):
    def __init__(self, file: GgufFile, model: Any) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        from transformers.integrations.gguf import GgufHeader, get_gguf_conversion_mapping, get_gguf_plan
        from transformers.integrations.gguf.utils import add_gguf_load_ops

        super().__init__(file, model)
        header = GgufHeader.from_file(str(file.path))
        mapping = get_gguf_conversion_mapping(file.architecture, model.config)
        quantised, _, _ = get_gguf_plan(header, mapping)
        mapping = add_gguf_load_ops(mapping, quantised, header, model.dtype)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        state = model.state_dict()
        self.targets = {}
        self._converters: dict[str, tuple[str, Any]] = {}
        for name in file.tensors:
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
            if target in state:
                self.targets[name] = target
                self._converters[name] = pattern, by_pattern[pattern]

    def plain(self, name: str) -> bool:
        from transformers.integrations.gguf.gguf_conversion_mapping import Cast, Dequantize

        _, converter = self._converters[name]
        return all(isinstance(one, (Cast, Dequantize)) for one in converter.operations)

    def parameter(self, target: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        converter = copy.deepcopy(self._converters[next(iter(tensors))][1])
        for name, data in tensors.items():
            converter.add_tensor(target, name, self._converters[name][0], self._typed(name, data))
        found = converter.convert(target, model=self.model, config=self.model.config)
        value = found[target]
        result: torch.Tensor = value[0] if isinstance(value, list) else value
        return result

    def _typed(self, name: str, data: torch.Tensor) -> torch.Tensor:
        """Floats as such, and blocks as bytes."""
        from transformers.integrations.gguf.reader import _TORCH_DTYPE

        dtype = _TORCH_DTYPE.get(self.file.tensors[name].kind)
        return data if dtype is None else data.contiguous().clone().view(dtype)
