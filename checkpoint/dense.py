"""The model without its experts, as the main node and the shadow hold it."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from checkpoint import family
from checkpoint.encoded_dense import SCRATCH, EncodedFiles
from checkpoint.formats.unreadable import first_line, is_out_of_memory
from checkpoint.sharding.generation_file import check_generation_file
from checkpoint.store import removal_error
from scheduler.errors import CorruptStoreError, DoesNotFitError, LaunchError

EXPERTS_IMPLEMENTATION = "odmoe"
"""The name under which our dispatch is registered with Transformers' ExpertsInterface."""

_ALIGN = 64
"""Alignment of the weights. Mapped weights start where a file's header ends, and the last bit of float32 products of
one row depends on that address. Copies aligned as torch aligns make the answer independent of the file's layout."""

KEPT_DTYPES = "kept_dtypes"
"""In the metadata of the dense part's index: by the dtype of a store, parameters that are not cast to it when they are
loaded, and their dtypes."""

ExpertsFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H]"""


def load_dense(
    folder: Path,
    config_fields: dict[str, Any],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    alter: Callable[[Any], None] | None = None,
) -> Any:
    """The family's own model with empty experts modules, dense weights loaded by `from_pretrained`, on `device`.

    `alter`: called with the model before it has weights; those of modules that it takes out are not loaded.
    Experts modules call `module.odmoe_dispatch`, set by `dispatch_experts`. Raises CorruptStoreError, ConfigError for a
    `generation_config.json` that cannot be used, LaunchError where
    the device has no room, DoesNotFitError where this machine has none, or StoreNotFoundError if the folder is not
    there any more.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    check_generation_file(folder)
    config = family.config_from_dict(config_fields)
    cls = family.model_class(config)
    encoded = EncodedFiles(folder)

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        family.strip_experts(self)
        encoded.place_layers(self)
        if alter is not None:
            alter(self)

    kept = _kept_dtypes(folder, dtype)
    wide = {*(cls._keep_in_fp32_modules_strict or ()), *(rf"^{re.escape(name)}$" for name in kept)}
    # Same name and module: Transformers looks its weight conversions up by them.
    fields = {"__init__": __init__, "__module__": cls.__module__, "_keep_in_fp32_modules_strict": wide}
    if alter is not None:
        fields["_keys_to_ignore_on_load_unexpected"] = ["."]  # weights of modules that it has taken out are no news
    stripped: Any = type(cls.__name__, (cls,), fields)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, _dispatch)
    try:
        with family.BUILDING:
            model, info = stripped.from_pretrained(
                folder, config=config, dtype=dtype, device_map=None, local_files_only=True, output_loading_info=True
            )
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        if not folder.is_dir():  # Transformers would look for it on the Hub
            raise removal_error(folder) from error
        if is_out_of_memory(error):
            raise DoesNotFitError(
                f"there is too little memory for the dense weights in {folder} ({first_line(error)}); end other "
                "programs, or use a larger machine"
            ) from error
        reason = str(error).splitlines()[0]
        raise CorruptStoreError(f"the dense weights in {folder} do not fit config.json: {reason}") from error
    lost = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
    if lost:
        raise CorruptStoreError(
            f"{folder} lacks dense weights, the first is {lost[0]}; so did the checkpoint that the store was made of: "
            "give a whole checkpoint, and make the store again"
        )
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    for name, kind in kept.items():
        model.get_parameter(name).data = model.get_parameter(name).data.to(kind)
    encoded.fill(model, dtype)
    if torch.device(device).type != "cpu":
        model = move_model(model, device)
        _prepare_scratch(model, device)
        return model.eval()
    for value in itertools.chain(model.parameters(), model.buffers()):
        if value.data_ptr() % _ALIGN:
            value.data = value.data.clone()
    _prepare_scratch(model, "cpu")
    return model.eval()


def _prepare_scratch(model: Any, device: str | torch.device) -> None:
    """Make the memory in which encoded weights are restored, if there are any. Raises LaunchError."""
    scratch = getattr(model, SCRATCH, None)
    if scratch is None:
        return
    try:
        scratch.prepare(torch.device(device))
    except torch.OutOfMemoryError as error:
        raise LaunchError(
            f"{device} has no room to restore dense weights in ({error}); give another --main-device, such as cpu"
        ) from error


def move_model(model: Any, device: str | torch.device) -> Any:
    """The model, or a part of it, on an accelerator. Raises LaunchError."""
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise LaunchError(
            f"{device} has no room for the dense weights ({error}); give another --main-device, such as cpu"
        ) from error


def _kept_dtypes(folder: Path, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Parameters that keep the dtype of the file, as they do when Transformers dequantises a checkpoint to `dtype`."""
    try:
        metadata = json.loads((folder / "model.safetensors.index.json").read_bytes()).get("metadata", {})
        kept = metadata.get(KEPT_DTYPES, {}).get(family.dtype_name(dtype), {})
        return {name: family.parse_dtype(kind) for name, kind in kept.items()}
    except (OSError, ValueError, AttributeError):
        return {}  # from_pretrained refuses the folder


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights and buffers. Tied ones count once."""
    held = [tensor.untyped_storage() for tensor in itertools.chain(model.parameters(), model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def dispatch_experts(model: Any, function: Callable[[int], ExpertsFunction]) -> None:
    """Let layer `l` of the model compute its experts with `function(l)`."""
    for layer, (_, module) in family.experts_modules(model).items():
        vars(module)["odmoe_dispatch"] = function(layer)


@contextlib.contextmanager
def experts_replaced(model: Any, function: Callable[[int], ExpertsFunction]) -> Iterator[None]:
    """As `dispatch_experts`, for a while."""
    modules = [module for _, module in family.experts_modules(model).values()]
    before = [vars(module).get("odmoe_dispatch") for module in modules]
    dispatch_experts(model, function)
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            vars(module)["odmoe_dispatch"] = own


def _dispatch(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module.odmoe_dispatch(hidden, index, weights)
    return result
