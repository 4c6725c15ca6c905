"""The model without its experts, as the main node and the shadow hold it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpoint import family
from checkpoint.store import removed
from scheduler.errors import CorruptStoreError

EXPERTS_IMPLEMENTATION = "odmoe"
"""The name under which our dispatch is registered with Transformers' ExpertsInterface."""

_ALIGN = 64
"""Alignment of the weights. Mapped weights start where a file's header ends, and the last bit of float32 products of
one row depends on that address. Copies aligned as torch aligns make the answer independent of the file's layout."""

ExpertsFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H]"""


def load_dense(folder: Path, config_fields: dict[str, Any], dtype: torch.dtype, device: str = "cpu") -> Any:
    """The family's own model with empty experts modules, dense weights loaded by `from_pretrained`.

    Experts modules call `module.odmoe_dispatch`, set by `dispatch_experts`. Raises CorruptStoreError, or
    StoreNotFoundError if the folder is not there any more.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    config = family.config_from_dict(config_fields)
    cls = family.model_class(config)

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        family.strip_experts(self)

    # Same name and module: Transformers looks its weight conversions up by them.
    stripped: Any = type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, _dispatch)
    try:
        with family.BUILDING:
            model, info = stripped.from_pretrained(
                folder, config=config, dtype=dtype, device_map=None, local_files_only=True, output_loading_info=True
            )
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        if not folder.is_dir():  # Transformers would look for it on the Hub
            raise removed(folder) from error
        reason = str(error).splitlines()[0]
        raise CorruptStoreError(f"the dense weights in {folder} do not fit config.json: {reason}") from error
    lost = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
    if lost:
        raise CorruptStoreError(f"{folder} lacks dense weights, the first is {lost[0]}; make the store again")
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    for value in itertools.chain(model.parameters(), model.buffers()):
        if value.data_ptr() % _ALIGN:
            value.data = value.data.clone()
    return model.to(device).eval()


def dispatch_experts(model: Any, function: Callable[[int], ExpertsFunction]) -> None:
    """Let layer `l` of the model compute its experts with `function(l)`."""
    for layer, (_, module) in family.experts_modules(model).items():
        vars(module)["odmoe_dispatch"] = function(layer)


def _dispatch(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module.odmoe_dispatch(hidden, index, weights)
    return result
