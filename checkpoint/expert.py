"""One expert's arithmetic: the family's own experts module, cut to one expert whose parameters are views of a slot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from checkpoint import family


class ExpertArithmetic:
    """Builds one-expert modules for any layer of a model. Holds shapes only: the model is on the meta device."""

    def __init__(self, config_fields: dict[str, Any], dtype: str) -> None:
        config = family.config_from_dict(config_fields)
        model = family.meta_model(config, family.parse_dtype(dtype))
        self._modules = {layer: module for layer, (_, module) in family.experts_modules(model).items()}

    def bind(self, layer: int, views: dict[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
        """(hidden [n, H], weights [n]) -> [n, H], the family's eager result for the expert that `views` hold."""
        module: Any = copy.copy(self._modules[layer])
        count = family.expert_count(module)
        module._parameters = {
            name: torch.nn.Parameter(view.unsqueeze(0), requires_grad=False) for name, view in views.items()
        }
        for name, value in list(vars(module).items()):
            if isinstance(value, int) and not isinstance(value, bool) and value == count and "expert" in name:
                setattr(module, name, 1)
        module.config = copy.copy(module.config)
        module.config._experts_implementation = "eager"

        def compute(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            rows = hidden.shape[0]
            index = torch.zeros((rows, 1), dtype=torch.int64, device=hidden.device)
            with torch.inference_mode():
                result: torch.Tensor = module(hidden, index, weights.view(rows, 1))
            return result

        return compute
