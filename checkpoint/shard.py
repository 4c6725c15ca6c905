"""`odmoe shard`: a Hugging Face checkpoint becomes an expert store. Transformers' own conversion does the renaming.

One layer is in memory at a time. The store is written beside its place and renamed into it when it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from checkpoint import family
from checkpoint.source import Source, verify_bytes
from checkpoint.store import (
    DENSE,
    FORMAT,
    MANIFEST,
    Blob,
    ExpertStore,
    LayerSpec,
    Manifest,
    TensorSpec,
    checksum,
    file_checksum,
)
from checkpoint.tensors import round_up, tensor_bytes
from scheduler.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MissingShardError,
    StoreMismatchError,
    StoreWriteError,
)

Progress = Callable[[str, int, int], None]
_DENSE_PART_BYTES = 1 << 29
_TENSOR_ALIGN = 64


def shard(source: Source, target: Path, dtype: str | None = None, progress: Progress | None = None) -> ExpertStore:
    """Write the expert store of a checkpoint. `dtype`: the experts', as stored when None.

    An existing store of the same checkpoint and dtype is returned as it is. Raises CheckpointError (NotMoEError,
    CorruptCheckpointError, ...), StoreMismatchError when another model's store is at `target`, StoreWriteError.
    """
    config = family.config_from_dict(source.config)
    if quantised := source.config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise CheckpointError(f"{source.path} is quantised ({method}); give one in {', '.join(family.DTYPES)}")
    torch_dtype = family.parse_dtype(dtype) if dtype else family.stored_dtype(config)
    name = family.dtype_name(torch_dtype)
    if (target / MANIFEST).exists():
        return check_same(ExpertStore.open(target), source, name)
    if target.exists() and not target.is_dir():
        raise StoreWriteError(f"{target} is a file; choose another place")
    if target.exists() and any(target.iterdir()):
        raise StoreWriteError(f"{target} exists, is not a store and is not empty; choose another place")
    report = progress or (lambda what, done, total: None)
    model = family.meta_model(config, torch_dtype)
    plan = _plan(source, model)
    family.shape_of(config, tuple(plan), max(family.expert_count(m) for _, m in family.experts_modules(model).values()))
    report("verify", 0, 1)
    verify_bytes(source)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    with _writing(target, partial):
        partial.mkdir(parents=True)
        layers = {}
        for done, (layer, keys) in enumerate(plan.items()):
            report("experts", done, len(plan))
            layers[layer] = _write_layer(source, model, layer, keys, partial)
        report("dense", len(plan), len(plan))
        _write_dense(source, set().union(*plan.values()), partial / DENSE)
        manifest = Manifest(FORMAT, source.fingerprint, config.model_type, name, source.config, layers)
        (partial / MANIFEST).write_text(manifest.to_json())
        _publish(partial, target)
    return check_same(ExpertStore.open(target), source, name)


def check_same(store: ExpertStore, source: Source, dtype: str | None) -> ExpertStore:
    """Raises StoreMismatchError unless `store` was made from `source` in `dtype` (None: any)."""
    manifest = store.manifest
    if manifest.fingerprint != source.fingerprint:
        raise StoreMismatchError(
            f"the store at {store.path} belongs to another checkpoint (fingerprint {manifest.fingerprint[:8]}, "
            f"{source.path} has {source.fingerprint[:8]}); give another --store or remove it"
        )
    if dtype and manifest.dtype != dtype:
        raise StoreMismatchError(
            f"the store at {store.path} holds {manifest.dtype} experts, {dtype} was asked for; "
            f"make one with: odmoe shard {source.path} STORE --dtype {dtype}"
        )
    return store


@contextlib.contextmanager
def _writing(target: Path, partial: Path) -> Iterator[None]:
    """Nothing half-written stays behind, and what the file system said is said again by name."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise StoreWriteError(f"cannot write the store {target}: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)  # takes the place of an empty directory
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        ExpertStore.open(target)  # another process was faster; its store must be whole


def _plan(source: Source, model: Any) -> dict[int, list[str]]:
    """MoE layer -> the checkpoint's tensor names that make up its experts. Raises MissingShardError."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    state = model.state_dict()
    owner = {
        f"{name}.{key}": layer
        for layer, (name, module) in family.experts_modules(model).items()
        for key in family.expert_parameters(name, module)
    }
    plan: dict[int, list[str]] = {layer: [] for layer in owner.values()}
    shapes = _shapes(source)
    for key in source.files:
        target, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if target in owner:
            plan[owner[target]].append(key)
        elif target in state and converted is None and shapes[key] != tuple(state[target].shape):
            raise CorruptCheckpointError(
                f"{source.files[key]}: {key} is {list(shapes[key])}, config.json wants {list(state[target].shape)}"
            )
    for layer, keys in plan.items():
        if not keys:
            raise MissingShardError(f"{source.path} holds no expert weights for layer {layer}, its configuration does")
    return plan


def _shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, from the headers."""
    found: dict[str, tuple[int, ...]] = {}
    for file in source.weight_files():
        with _open_weights(file) as handle:
            found.update({key: tuple(handle.get_slice(key).get_shape()) for key in handle.keys()})  # noqa: SIM118
    return found


def _convert(source: Source, model: Any, keys: list[str]) -> None:
    """Load the tensors `keys` into the model, converted by Transformers."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    with contextlib.ExitStack() as stack:
        handles: dict[Path, Any] = {}
        for file in sorted({source.files[key] for key in keys}):
            handles[file] = stack.enter_context(_open_weights(file))
        slices = {key: handles[source.files[key]].get_slice(key) for key in keys}
        settings = LoadStateDictConfig(
            weight_mapping=get_model_conversion_mapping(model),
            device_map={"": "cpu"},
            dtype=model.dtype,
            dtype_plan=model._get_dtype_plan(model.dtype),
        )
        info, _ = convert_and_load_state_dict_in_model(model, slices, settings)
    wrong = sorted(map(str, [*info.mismatched_keys, *info.conversion_errors, *info.error_msgs]))
    if wrong:
        raise CorruptCheckpointError(
            f"{source.path}: the experts' weights do not have their family's shape: {wrong[0]}"
        )


def _open_weights(file: Path) -> Any:
    """A safetensors file, open. Raises CorruptCheckpointError."""
    try:
        return safetensors.safe_open(file, framework="pt")
    except safetensors.SafetensorError as error:
        raise CorruptCheckpointError(f"{file} is damaged ({error}); fetch it again") from error


def _write_layer(source: Source, model: Any, layer: int, keys: list[str], folder: Path) -> LayerSpec:
    """Convert one layer's experts, write their blobs, and put the layer back on the meta device."""
    name, module = family.experts_modules(model)[layer]
    _convert(source, model, keys)
    parameters = family.expert_parameters(name, module)
    for key, value in parameters.items():
        if value.is_meta:
            raise MissingShardError(f"{source.path} holds no weights for {name}.{key}")
        if not bool(torch.isfinite(value).all()):
            raise CorruptCheckpointError(
                f"{source.path}: {name}.{key} holds NaN or infinity; fetch the checkpoint again"
            )
    specs, length = _layout(parameters)
    file = f"layer-{layer:05d}.experts"
    blobs = []
    with (folder / file).open("wb") as stream:
        for expert in range(family.expert_count(module)):
            blob = bytearray(length)
            for spec in specs:
                data = tensor_bytes(parameters[spec.name][expert])[2]
                blob[spec.offset : spec.offset + len(data)] = data
            blobs.append(Blob(stream.tell(), length, checksum(memoryview(blob))))
            stream.write(blob)
        stream.flush()
        os.fsync(stream.fileno())
    for key, value in parameters.items():
        setattr(module, key, torch.nn.Parameter(value.to("meta"), requires_grad=False))
    return LayerSpec(name, file, tuple(specs), tuple(blobs))


def _layout(parameters: dict[str, torch.nn.Parameter]) -> tuple[list[TensorSpec], int]:
    """Where each parameter stands in a blob, and the blob's length."""
    specs, end = [], 0
    for key, value in parameters.items():
        start = round_up(end, _TENSOR_ALIGN)
        specs.append(TensorSpec(key, family.dtype_name(value.dtype), tuple(value.shape[1:]), start))
        end = start + value[0].numel() * value.element_size()
    return specs, round_up(end)


def _write_dense(source: Source, experts: set[str], folder: Path) -> None:
    """Everything but the experts, under the checkpoint's own names, in parts, with the files that go with it."""
    folder.mkdir()
    for file in source.aux_files():
        shutil.copyfile(file, folder / file.name)
    weight_map: dict[str, str] = {}
    total = 0
    for file in source.weight_files():
        with _open_weights(file) as handle:
            part: dict[str, torch.Tensor] = {}
            for key in sorted(k for k, f in source.files.items() if f == file and k not in experts):
                part[key] = handle.get_tensor(key)
                total += part[key].nbytes
                if sum(t.nbytes for t in part.values()) >= _DENSE_PART_BYTES:
                    _write_part(part, folder, weight_map)
                    part = {}
            if part:
                _write_part(part, folder, weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    sums = {p.name: file_checksum(p) for p in sorted(folder.iterdir())}
    (folder / "checksums.json").write_text(json.dumps(sums, indent=1))


def _write_part(part: dict[str, torch.Tensor], folder: Path, weight_map: dict[str, str]) -> None:
    for key, value in part.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise CorruptCheckpointError(f"tensor {key} holds NaN or infinity; fetch the checkpoint again")
    name = f"dense-{len(set(weight_map.values())):05d}.safetensors"
    try:
        save_file(part, folder / name, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # how the library tells of a full disk
        said = re.search(r"os error (\d+)", str(error))
        code = int(said.group(1)) if said else errno.EIO
        raise OSError(code, os.strerror(code)) from error
    (folder / name).chmod(0o644)  # the library writes it for its owner only
    weight_map.update(dict.fromkeys(part, name))
