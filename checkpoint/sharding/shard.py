"""`odmoe shard`: makes an expert store from a Hugging Face checkpoint. Transformers' own conversion renames weights.

Only a few experts are in memory: while some are converted, the next are read and the previous written. The store is
written beside its place and renamed when whole (`checkpoint/sharding/partial_store.py`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoint import family
from checkpoint.encoded_dense import PLAIN
from checkpoint.formats.gguf_blocks import has_encoding
from checkpoint.formats.published import check_format, published_format
from checkpoint.manifest import DENSE, FORMAT, MANIFEST, LayerSpec, Manifest
from checkpoint.native.encodings import DEQUANTISED, NATIVE
from checkpoint.quantisation import Quantisation
from checkpoint.sharding.completeness import check_complete
from checkpoint.sharding.convert import Conversion
from checkpoint.sharding.dense_files import write_dense
from checkpoint.sharding.encoded_weights import choose_encoded
from checkpoint.sharding.gguf_conversion import GgufConversion
from checkpoint.sharding.identity import is_made_of, weights_digest
from checkpoint.sharding.layers import full_tensors, planned_layer, write_layers
from checkpoint.sharding.native_experts import plan_native
from checkpoint.sharding.partial_store import Partial, Progress, begun
from checkpoint.sharding.quantised_experts import check_quantisable, plan_quantised
from checkpoint.sharding.source import Source, verify_bytes
from checkpoint.store import ExpertStore
from scheduler.errors import CheckpointError, CorruptCheckpointError, StoreMismatchError, StoreWriteError


@dataclass(frozen=True)
class Made:
    """A store; whether this call has `written` it or found it; how many layers it `resumed` from an earlier run."""

    store: ExpertStore
    written: bool
    resumed: int


def make_store(
    source: Source,
    target: Path,
    dtype: str | None = None,
    progress: Progress | None = None,
    check: Callable[[Source], None] | None = None,
    experts: str | None = None,
    dense: str | None = None,
) -> Made:
    """Write the expert store of a checkpoint. `dtype` is the experts'; None for the checkpoint's.

    `experts`: `native` keeps quantised experts in their published numbers, where an encoding has them
    (`checkpoint/native/`); `dequantised` does not; `int4` and `int8` quantise plain ones, in groups of 64 inputs or,
    as `int4-32`, of others (`checkpoint/quantisation.py`). None: native. `dense`:
    how linear layers of the dense part are kept, `plain`, `int8`, `int4` or `published`. None: plain. A store that is
    there may have any where None is given.

    An existing store of the same weights and dtype is returned unchanged. Layers that an interrupted run finished
    are kept. `progress(what, done, total)` reports verify, wait, resume, experts and dense. `check` gets the checkpoint
    before anything is written, and raises if it is not to be used.

    Raises CheckpointError (NotMoEError, CorruptCheckpointError, ...), StoreMismatchError if another model's store is at
    `target`, or StoreWriteError. After a StoreWriteError or an interrupt finished layers stay for the next run.
    """
    name = store_dtype(source, dtype)
    try:
        target = target.resolve()  # for `.`, or a link to the store's place
        if found := _there(source, target, name, experts, dense):
            return Made(found, False, 0)
        report = progress or (lambda what, done, total: None)
        plan = checked_plan(source, name, check, experts)
        identity = {"format": FORMAT, "fingerprint": source.fingerprint, "files": source.stamp, "dtype": name}
        identity["experts"] = _as_kept(experts) or NATIVE
        identity |= {"dense": dense} if dense not in (None, PLAIN) else {}
        if not begun(target, identity):
            report("verify", 0, 1)
            _verified(source, report)
        fingerprint = weights_digest(source, lambda done, total: report("verify", done, total))
        partial = Partial.claim(target, report)
        if partial is None:
            return Made(check_same(ExpertStore.open(target), source, name, experts, dense), False, 0)
        manifest = Manifest(FORMAT, fingerprint, plan.model.config.model_type, name, source.config, {}, {})
        manifest = replace(manifest, dense_kept=dense or PLAIN)
        resumed = _fill(plan, partial, identity, manifest, report, experts)
    except OSError as error:
        raise StoreWriteError(f"cannot write the store {target}: {_reason(error)}; choose another place") from error
    return Made(check_same(ExpertStore.open(target), source, name, experts, dense), True, resumed)


def store_dtype(source: Source, dtype: str | None) -> str:
    """`dtype`, or the checkpoint's. Raises ConfigError, CheckpointError for one whose config.json already says that it
    cannot be read."""
    config = family.config_from_dict(source.config)
    check_format(source.config, source.path)
    return family.dtype_name(family.parse_dtype(dtype) if dtype else family.stored_dtype(config, source.dtype))


def checked_plan(
    source: Source, dtype: str, check: Callable[[Source], None] | None = None, experts: str | None = None
) -> Conversion:
    """How a checkpoint becomes a store. It holds what its family needs, and `experts` can be kept so; `check` has seen
    it. Reads headers only.

    Raises CheckpointError.
    """
    config = family.config_from_dict(source.config)
    plan = (GgufConversion if source.gguf else Conversion)(source, family.meta_model(config, family.parse_dtype(dtype)))
    check_complete(plan)
    family.shape_of(config, plan.layers, max(map(plan.experts, plan.layers)))
    if quantisation := Quantisation.of(experts):
        check_quantisable(plan, quantisation)
    if check is not None:
        check(source)
    return plan


def _as_kept(experts: str | None) -> str:
    """`experts` with the group that is meant; empty for None."""
    quantisation = Quantisation.of(experts)
    return quantisation.experts if quantisation else experts or ""


def _verified(source: Source, report: Progress) -> None:
    try:
        verify_bytes(source, lambda done, total: report("verify", done, total))
    except OSError as error:
        raise CorruptCheckpointError(f"{error.filename or source.path} cannot be read: {error.strerror}") from error


def check_same(
    store: ExpertStore,
    source: Source | None,
    dtype: str | None,
    experts: str | None = None,
    dense: str | None = None,
) -> ExpertStore:
    """Raises StoreMismatchError unless `store` was made from `source` (None: any) in `dtype` (None: any), with its
    `experts` and its `dense` part kept so (None: any)."""
    manifest = store.manifest
    if source and not is_made_of(manifest.fingerprint, manifest.config, source):
        raise StoreMismatchError(
            f"the store at {store.path} belongs to another checkpoint ({manifest.family}, fingerprint "
            f"{manifest.fingerprint[:8]}) than {source.path}; give another --store or remove it"
        )
    if dtype and manifest.dtype != dtype:
        raise StoreMismatchError(
            f"the store at {store.path} holds {manifest.dtype} experts, not {dtype}; "
            f"make another with: odmoe shard {source.path if source else 'MODEL'} STORE --dtype {dtype}"
        )
    if experts:
        _check_kept(store, source, experts)
    if dense and manifest.dense_kept != dense:
        raise StoreMismatchError(
            f"the store at {store.path} has a dense part kept {manifest.dense_kept}, not {dense}; make another with: "
            f"odmoe shard {source.path if source else 'MODEL'} STORE --dense {dense}"
        )
    return store


def _check_kept(store: ExpertStore, source: Source | None, experts: str) -> None:
    """Raises StoreMismatchError unless a store has kept its experts so."""
    manifest, wanted = store.manifest, Quantisation.of(experts)
    kept = _kept(manifest, store.path, source)
    if kept == _as_kept(experts) or not (kept or wanted):
        return
    held = f"experts in {manifest.described}" if manifest.quantised_to else f"{kept or manifest.dtype} experts"
    asked, flags = (wanted.described, wanted.flags) if wanted else (experts, f"--experts {experts}")
    raise StoreMismatchError(
        f"the store at {store.path} holds {held}, not {asked}; make another with: odmoe shard "
        f"{source.path if source else 'MODEL'} STORE {flags}"
    )


def _kept(manifest: Manifest, path: Path, source: Source | None) -> str:
    """How a store keeps the experts of a checkpoint that has an encoding, or to what it has quantised them; empty where
    there is no choice."""
    if manifest.quantised_to:
        return manifest.quantised_to
    if manifest.encoding:
        return NATIVE
    found = published_format(manifest.config, path)
    encodable = bool(found and found.encodings) or bool(source and source.gguf and has_encoding(source.gguf))
    return DEQUANTISED if encodable and not manifest.plain_because else ""


def _there(source: Source, target: Path, dtype: str, experts: str | None, dense: str | None) -> ExpertStore | None:
    """The store at `target`; None if the place is free. Raises StoreError, OSError."""
    if (target / MANIFEST).exists():
        return check_same(ExpertStore.open(target), source, dtype, experts, dense)
    if target.exists() and not target.is_dir():
        raise StoreWriteError(f"{target} is a file; choose another place")
    if target.exists() and any(target.iterdir()):
        raise StoreWriteError(f"{target} exists, is not a store and is not empty; choose another place")
    if os.path.ismount(target):
        raise StoreWriteError(f"{target} is where a file system is mounted; choose a place in it: {target / 'store'}")
    return None


def _fill(
    plan: Conversion,
    partial: Partial,
    identity: dict[str, Any],
    manifest: Manifest,
    report: Progress,
    experts: str | None,
) -> int:
    """Write what is missing and publish. Returns the number of resumed layers. Raises OSError, ODMoEError."""
    planned: dict[int, LayerSpec] = {}

    def beat(what: str, done: int, total: int) -> None:
        partial.beat()
        report(what, done, total)

    try:
        quantisation = Quantisation.of(experts)
        native = plan_quantised(plan, quantisation) if quantisation else plan_native(plan, experts != DEQUANTISED)
        planned.update({layer: planned_layer(plan, layer, native) for layer in plan.layers})
        partial.resume(identity, planned, beat)
        resumed = len(partial.layers)
        _check_room(plan, partial, planned)
        write_layers(plan, partial, beat, native)
        encoded = choose_encoded(plan, manifest.dense_kept, partial.beat)
        if not partial.dense:
            wide = {name: family.dtype_name(dtype) for name, dtype in plan.kept_dtypes().items()}
            dtypes = {manifest.dtype: wide} if wide else {}
            partial.add_dense(write_dense(plan.source, plan.dense, dtypes, partial.store / DENSE, beat, encoded))
        layers = {layer: partial.layers[layer] for layer in plan.layers}
        finished = replace(
            manifest,
            layers=layers,
            dense=partial.dense or {},
            dense_weights=encoded.weights,
            dense_bytes=encoded.nbytes,
            encoding=native.name,
            full=full_tensors(plan, native),
            plain_because=native.because,
            quantised_from=native.quantised_from,
            quantised_to=quantisation.experts if quantisation else "",
        )
        partial.publish(finished.to_json())
    except BaseException as error:
        kept = bool(partial.layers) and not isinstance(error, CheckpointError)
        (partial.keep if kept else partial.discard)()
        if not isinstance(error, OSError):
            raise
        raise _stopped(plan, partial, planned, kept, error) from error
    return resumed


def _stopped(
    plan: Conversion, partial: Partial, planned: dict[int, LayerSpec], kept: bool, error: OSError
) -> StoreWriteError:
    """An error with the file system's reason, the missing bytes, and whether finished layers are kept."""
    message = f"cannot write the store {partial.target}: {_reason(error)}"
    if error.errno == errno.ENOSPC:
        message += f", {_missing_bytes(plan, partial, planned):,} bytes are to be written yet, "
        message += f"{_free_bytes(partial.target):,} are free"
    if not kept:
        return StoreWriteError(f"{message}; make room, or choose another place")
    return StoreWriteError(
        f"{message}; {len(partial.layers)} of {len(plan.layers)} layers are kept: make room and run the same again, or "
        f"remove {partial.folder}"
    )


def _reason(error: OSError) -> str:
    return "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))


def _missing_bytes(plan: Conversion, partial: Partial, planned: dict[int, LayerSpec]) -> int:
    """Bytes left to write, with an estimate for small files."""
    blobs = sum(b.length for layer, spec in planned.items() if layer not in partial.layers for b in spec.blobs)
    if partial.dense:
        return blobs
    small = sum(file.stat().st_size for file in plan.source.aux_files())
    return blobs + small + sum(place.nbytes for place in plan.dense.values())


def _free_bytes(target: Path) -> int:
    status = os.statvfs(target.parent)
    return status.f_bavail * status.f_frsize


def _check_room(plan: Conversion, partial: Partial, planned: dict[int, LayerSpec]) -> None:
    needed, free = _missing_bytes(plan, partial, planned), _free_bytes(partial.target)
    if needed > free:
        raise StoreWriteError(
            f"the store {partial.target} needs {needed:,} bytes more, {free:,} are free there; make room, or choose "
            "another place"
        )
