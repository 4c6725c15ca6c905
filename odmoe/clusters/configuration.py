"""The configuration of a cluster's nodes: settings and the store's model, merged and checked once."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint.forms import planned_form
from checkpoint.hub import find_model
from checkpoint.mtp_head import find_head, find_in_store
from checkpoint.native.parameters import restoring_bytes
from checkpoint.prediction.token_predictor import FILE
from checkpoint.sharding.source import Source
from checkpoint.sharding.weights import places
from checkpoint.store import ExpertStore
from main_node.shape import model_shape
from odmoe.clusters.devices import check_devices
from odmoe.clusters.memory.budget import MemoryBudget, memory_budget, rows_at_once, rows_travel
from odmoe.clusters.memory.host import asked_for_slots, host_slots, reserve_bytes
from odmoe.clusters.memory.slots import slot_memory
from odmoe.settings.declarations import CUDA
from odmoe.settings.settings import Settings
from odmoe.settings.units import AUTO_SLOTS, parse_memory
from odmoe.terminal import count_text, megabytes
from odmoe.text import check_tokenizer
from scheduler.errors import CheckpointError, ConfigError, LaunchError
from scheduler.policies.precision import FULL
from scheduler.policies.registry import caches, forms_of, is_read, keeps_all, needs_host, residency_of
from scheduler.policies.system_config import CoreConfig
from scheduler.types import ModelShape


@dataclass(frozen=True, slots=True)
class Resources:
    """The workers, their slots, and the forms in which they load experts."""

    workers: int | None
    """None: all workers of a Ray cluster, whose number is not known yet."""
    slots: int
    """Of each worker."""
    forms: tuple[str, ...]
    """Forms in which experts are loaded."""
    full_slots: int = 0
    """Of each worker, in the same memory, if it loads no smaller form after all. 0: too few for the residency, or no
    smaller form is loaded."""
    host_slots: int | None = None
    """Of each worker: experts in host memory between disk and slots. None: there is no such tier."""
    full_host_slots: int | None = None
    """Likewise, if it loads the full form alone after all. 0: an expert has no room there."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The core's configuration and the workers' resources, of one cluster."""

    core: CoreConfig
    resources: Resources
    settings: Settings
    """With the precision in effect, for all nodes: a host with slots of its own does not decide on it again."""


def configure(settings: Settings, store: ExpertStore) -> Configuration:
    """Merge settings and store. Raises ConfigError if there are too few slots."""
    settings = with_precision(settings, store)
    core = core_config(settings, model_shape(store))
    if core.mini_batch is None and not rows_travel(settings):
        core = replace(core, mini_batch=rows_at_once(store, core.shape))
    found = Configuration(core, resources(settings, store), settings)
    if found.resources.workers is None and keeps_all(settings.system_config) and not settings.slots_given:
        raise ConfigError(
            f"--residency all needs a slot for every expert, and the number of workers of --cluster {settings.cluster} "
            "is not known here; give --workers or --slots"
        )
    _check_slots(found)
    return found


def check_checkpoint(settings: Settings, source: Source) -> None:
    """Check what a store would be made of in vain otherwise. Raises CheckpointError, ConfigError."""
    check_tokenizer(source)
    if settings.drafts_by_head:
        find_head(source.config, places(source), f"the checkpoint at {source.path}")


def check_fits(settings: Settings, store: ExpertStore) -> None:
    """Check what can be checked before any node starts. Raises ConfigError if there are too few slots, or a predictor
    has no weights."""
    experts = sum(len(layer.blobs) for layer in store.manifest.layers.values())
    if settings.slots_given and int(settings.slots) > experts:
        raise ConfigError(f"--slots is {settings.slots}; allowed: 1 to {experts}, the experts of the model")
    check_devices(settings)
    if settings.drafts_by_head:
        find_in_store(store)
    settings = with_precision(settings, store)
    _check_slots(Configuration(core_config(settings, model_shape(store)), resources(settings, store), settings))
    if not settings.uses_existing_ray:
        find_token_predictor(settings, store)


def check_joined(settings: Settings, store: ExpertStore, workers: int) -> None:
    """Check what the main node of a Ray cluster with so many workers would refuse. Raises ConfigError."""
    settings = settings.replace(cluster="auto")
    with contextlib.suppress(LaunchError):  # the memory of another machine's device
        found = configure(settings, store)
        if not settings.workers_given:
            _check_slots(replace(found, resources=replace(found.resources, workers=workers)))
    if not settings.token_predictor:  # otherwise a file of the main host
        find_token_predictor(settings.replace(model=str(store.path)), store)


def _check_slots(found: Configuration) -> None:
    core, workers = found.core, found.resources.workers
    if workers is not None:
        residency_of(core.shape, core.system).check(core.shape, workers * found.resources.slots)


def core_config(settings: Settings, shape: ModelShape) -> CoreConfig:
    """Settings and shape, merged. Without a shadow the predictor `sep` becomes `none`."""
    group = settings.group_size or (min(shape.top_k, settings.workers) if settings.workers_given else shape.top_k)
    system = settings.system_config
    if system.predictor == "sep" and not settings.has_shadow:
        system = replace(system, predictor="none")
    return CoreConfig(shape, group, settings.alignment, settings.mini_batch, system)


def resources(settings: Settings, store: ExpertStore, workers_here: int | None = None) -> Resources:
    """The number of slots: as given, or as many as fit in --device-memory, which all workers share, or one for every
    expert if the residency keeps them all. If experts are loaded in a smaller form, more of them fit, less the memory
    to restore one. See `_slot_room`.

    With --slots auto a cache has as many as the memory holds. Where the residency keeps nothing, a worker has two if
    there is memory for both: it loads into one while it computes in the other. Where the host computes every expert it
    has one, unless they are given.
    `workers_here`: those that share this machine's memory. None: all; on a Ray cluster one, until a host knows.

    The settings have the precision in effect (`with_precision`). Raises ConfigError if not even one fits, LaunchError
    where this machine's memory is not known.
    """
    forms, workers = forms_of(settings.system_config), settings.workers if settings.workers_given else None
    here = workers_here or (1 if settings.uses_existing_ray else settings.workers)
    if (asked := asked_for_slots(settings)) is not None:
        slots = _slots_in_host_memory(asked, settings, store, forms, here)
    elif (memory := _expert_memory(settings, store)) is not None:
        slots = _slots_in(memory, settings, store, forms)
        if settings.slots == "auto" and not caches(settings.system_config):
            slots = min(slots, AUTO_SLOTS)
    elif settings.slots == "auto" and not keeps_all(settings.system_config):
        slots = _slots_in_free_memory(settings, store, forms, here)
    else:
        slots = _given_slots(settings, store)
    if needs_host(settings.system_config) and not settings.slots_given:
        slots = 1  # a worker has at least one, and nothing is loaded into it
    host, full_host = host_slots(settings, store, forms, here), _full_host_slots(settings, store, here)
    spares_disk = host is None and full_host is not None  # all experts fit in host memory in these forms alone
    full = 0 if spares_disk else _full_slots(settings, store, slots)
    return Resources(workers, slots, forms, full, host, full_host)


def _slots_in_host_memory(
    asked: str, settings: Settings, store: ExpertStore, forms: tuple[str, ...], workers_here: int
) -> int:
    """Slots of each of the workers on this machine, where they are its host memory. Raises ConfigError."""
    each, beside = max(map(store.manifest.form_bytes, forms)), _restoring_bytes(settings, store, forms)
    slots = (parse_memory(asked, _whole(store)) // workers_here - beside) // each
    if slots < 1:
        raise ConfigError(
            f"--host-memory {asked} has no room for one expert of each of {count_text(workers_here, 'worker')}, "
            f"{megabytes((each + beside) * workers_here)}; give more"
        )
    return min(slots, _share(settings, store))


def _slots_in_free_memory(settings: Settings, store: ExpertStore, forms: tuple[str, ...], workers_here: int) -> int:
    """Slots of each of the workers on this machine, with --slots auto: at least one."""
    most = _share(settings, store) if caches(settings.system_config) else AUTO_SLOTS
    room = _free_room(settings, store, forms, workers_here)
    return max(1, min(most, room // max(map(store.manifest.form_bytes, forms))))


def _free_room(settings: Settings, store: ExpertStore, forms: tuple[str, ...], workers_here: int) -> int:
    """Bytes for the slots of each of the workers on this machine, of its free memory."""
    device = _device(settings)
    reserve = reserve_bytes(settings, store) if device == "cpu" else 0
    return slot_memory(device, workers_here, reserve) - _restoring_bytes(settings, store, forms)


def with_precision(settings: Settings, store: ExpertStore) -> Settings:
    """The settings with the precision in effect: full where every expert stays in the slots' memory in the full form.

    A smaller form saves nothing there, whatever the system: Fate quantises "when memory resources are insufficient"
    (4.5). `--smaller-forms always` keeps the precision as it is.
    """
    system, forms = settings.system_config, forms_of(settings.system_config)
    if not any(forms) or settings.smaller_forms == "always" or not caches(system) or not settings.workers_given:
        return settings
    manifest = store.manifest
    if (memory := _expert_memory(settings, store)) is not None:
        room = _slot_room(memory, settings, store, (FULL,))
    elif settings.slots == "auto" and not keeps_all(system):
        room = _free_room(settings, store, (FULL,), settings.workers)
    else:
        room = _given_slots(settings, store) * max(_form_bytes(store, form) for form in forms)
        room -= _restoring_bytes(settings, store, (FULL,))
    return settings.replace(precision="full") if room // manifest.blob_bytes >= _share(settings, store) else settings


def forms_needed(settings: Settings, store: ExpertStore) -> tuple[str, ...]:
    """The forms that a store must have for these settings; the full one has the empty name."""
    return forms_of(with_precision(settings, store).system_config)


def budget_of(settings: Settings, store: ExpertStore) -> MemoryBudget | None:
    """That of --memory; None without it. Raises ConfigError, CheckpointError."""
    if settings.memory is None:
        return None
    weights = find_token_predictor(settings, store)
    return memory_budget(settings.memory, settings, store, weights.stat().st_size if weights else 0)


def _expert_memory(settings: Settings, store: ExpertStore) -> str | None:
    """--device-memory, or what --memory leaves for the same. Raises ConfigError where it leaves nothing."""
    budget = budget_of(settings, store)
    if budget is None:
        return settings.device_memory
    if budget.bytes_left < 1:
        slot = max(_form_bytes(store, form) for form in forms_of(settings.system_config))
        raise ConfigError(_nothing_left(budget, settings, slot * settings.workers))
    return str(budget.bytes_left)


def _nothing_left(budget: MemoryBudget, settings: Settings, needed: int) -> str:
    """`needed`: bytes of a slot for each worker, and of restoring experts where the store has the forms."""
    experts = {f"one expert for each of {count_text(settings.workers, 'worker')}": needed}
    least = sum(budget.shares.values()) + needed
    return (
        f"--memory {settings.memory} is {megabytes(budget.total)}, and the nodes need {megabytes(least)}: "
        f"{budget.text(experts)}; give more, or make a share smaller: kv and activations with --ctx-size, kv with "
        "--parallel, the shadow with --shadow"
    )


def _share(settings: Settings, store: ExpertStore) -> int:
    """Experts of each worker if all stay; all experts if the number of workers is not known."""
    workers = settings.workers if settings.workers_given else 1
    return -(-sum(len(layer.blobs) for layer in store.manifest.layers.values()) // workers)


def _given_slots(settings: Settings, store: ExpertStore) -> int:
    """Without --device-memory: --slots, or one for every expert if the residency keeps them all. One for `auto`."""
    if keeps_all(settings.system_config) and not settings.slots_given and settings.workers_given:
        return _share(settings, store)
    return 1 if settings.slots == "auto" else settings.slots


def _form_bytes(store: ExpertStore, form: str) -> int:
    """The size of a slot for a form that the store may not have yet."""
    if form in ("", *store.manifest.forms):
        return store.manifest.form_bytes(form)
    return max(planned_form(store.manifest.restored_layout(layer), form).blob_bytes for layer in store.manifest.layers)


def _full_slots(settings: Settings, store: ExpertStore, slots: int) -> int:
    """Slots of a worker for the full form, in the memory of `slots` for the precision's forms and of restoring them."""
    forms, manifest = forms_of(settings.system_config), store.manifest
    if not any(forms):
        return 0
    if (memory := _expert_memory(settings, store)) is not None:
        room = _slot_room(memory, settings, store, (FULL,))
    else:
        room = slots * max(map(manifest.form_bytes, forms)) + _restoring_bytes(settings, store, forms)
        room -= _restoring_bytes(settings, store, (FULL,))
    found, shape = max(room // manifest.blob_bytes, 0), model_shape(store)
    if not settings.workers_given:
        return 0 if keeps_all(settings.system_config) else found
    found = min(found, _share(settings, store))
    try:
        residency_of(shape, settings.system_config).check(shape, settings.workers * found)
    except ConfigError:
        return 0
    return found


def _full_host_slots(settings: Settings, store: ExpertStore, workers_here: int) -> int | None:
    """Host slots of each of the workers on this machine for the full form; see `host_slots`."""
    try:
        return host_slots(settings, store, (FULL,), workers_here)
    except ConfigError:
        return 0


def _device(settings: Settings) -> str:
    """The workers' device by name. This machine need not have it: on a Ray cluster workers are on others."""
    if settings.loader_used != CUDA:
        return "cpu"
    name = settings.device_of("worker")
    return CUDA if name == "auto" else name


def with_slots(settings: Settings, store: ExpertStore, workers: int) -> Settings:
    """The settings for a Ray cluster with this number of workers: where all experts stay and nothing else decides on
    the slots, with slots for all of them."""
    if not keeps_all(settings.system_config) or settings.slots_given or settings.workers_given:
        return settings
    sized = with_precision(settings.replace(workers=workers), store)
    return settings.replace(slots=resources(sized, store).slots)


def _restoring_bytes(settings: Settings, store: ExpertStore, forms: tuple[str, ...]) -> int:
    """Device memory in which each worker restores experts."""
    return restoring_bytes(store.manifest, forms, _device(settings), settings.threads_a_node)


def _slot_room(memory: str, settings: Settings, store: ExpertStore, forms: tuple[str, ...]) -> int:
    """Bytes for the slots of each worker, of --device-memory.

    A number of bytes also has the memory to restore experts. A share is one of all experts in the full form: the memory
    to restore native ones comes on top of it. 100% is rounded up to whole slots of each worker, so that it holds them
    all. A smaller share is not: with few experts a worker, the workers together would have much more than it.
    """
    whole = _whole(store)
    size = parse_memory(memory, whole)
    if _is_share(memory) and size == whole:
        room = _share(settings, store) * store.manifest.blob_bytes
    else:
        room = size // settings.workers
    return room - _beside_slots(memory, settings, store, forms)


def _whole(store: ExpertStore) -> int:
    """Bytes of a slot for each expert. Where layers differ, that is more than the experts have."""
    return store.manifest.blob_bytes * sum(len(layer.blobs) for layer in store.manifest.layers.values())


def _beside_slots(memory: str, settings: Settings, store: ExpertStore, forms: tuple[str, ...]) -> int:
    """The part of each worker's --device-memory that is not for slots."""
    beside = _restoring_bytes(settings, store, forms)
    if _is_share(memory) and FULL in forms:
        beside -= _restoring_bytes(settings, store, (FULL,))
    return beside


def _is_share(memory: str) -> bool:
    return memory.strip().endswith("%")


def _slots_in(memory: str, settings: Settings, store: ExpertStore, forms: tuple[str, ...]) -> int:
    manifest = store.manifest
    each = max(manifest.form_bytes(form) for form in forms)
    slots = min(_slot_room(memory, settings, store, forms) // each, _share(settings, store))
    if slots < 1:
        budget = budget_of(settings, store)
        if budget is not None:
            needed = (each + _beside_slots(memory, settings, store, forms)) * settings.workers
            raise ConfigError(_nothing_left(budget, settings, needed))
        size, beside = parse_memory(memory, _whole(store)), _beside_slots(memory, settings, store, forms)
        bare = memory.replace(".", "").isdigit()
        hint = f", or did you mean {memory}%?" if bare and float(memory) <= 100 else ""
        least = (each + beside) * settings.workers
        percent = -(-100 * least // _whole(store))
        share = _is_share(memory) and percent <= 100
        raise ConfigError(
            f"--device-memory {memory} is {size} bytes for {count_text(settings.workers, 'worker')}, but a worker with "
            f"one expert needs {each + beside}{f', {beside} of them to restore it' if beside else ''}; "
            f"give at least {f'{percent}% ({megabytes(least)})' if share else f'{least} bytes'}{hint}"
        )
    return slots


def find_token_predictor(settings: Settings, store: ExpertStore) -> Path | None:
    """The weights of the token-wise predictor: the given file, or the one beside the model, or the copy in the store.

    Raises ConfigError if they are needed and missing.
    """
    predictor = settings.system_config.predictor
    if not is_read("token_predictor", settings.system_config):
        return None
    beside = [store.dense / FILE]
    with contextlib.suppress(CheckpointError):  # a node's host need not have the model, and does not fetch it
        beside.insert(0, find_model(settings.model, download=False) / FILE)
    file = (
        Path(settings.token_predictor) if settings.token_predictor else next((p for p in beside if p.is_file()), None)
    )
    if file is None or not file.is_file():
        raise ConfigError(
            f"--predictor {predictor} needs trained weights, and {file or beside[0]} does not exist; "
            f"make them with odmoe train-predictor {settings.model}"
        )
    return file
