"""What the device `auto` is for the main node and the shadow: that of the workers, where a role's weights fit there."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection

import torch
from safetensors import safe_open

from checkpoint.devices.names import AUTO, accelerator, accelerator_memory
from checkpoint.encoded_dense import FILES
from checkpoint.family import parse_dtype
from checkpoint.mtp_head import find_in_store, head_bytes
from checkpoint.native.parameters import restoring_bytes
from checkpoint.store import ExpertStore
from odmoe.clusters.configuration import resources, with_precision
from odmoe.clusters.devices import device_of, shadow_devices
from odmoe.settings.declarations import CUDA
from odmoe.settings.settings import Settings
from odmoe.settings.table import flag
from odmoe.terminal import megabytes
from scheduler.errors import ConfigError

SPARE = 0.1
"""Of an accelerator's memory: left to KV caches and rows."""

_BY_ROLE = {"main": "main node", "shadow": "shadow"}
_log = logging.getLogger(__name__)


def choose_devices(
    settings: Settings, store: ExpertStore, roles: Collection[str] = ("main", "shadow"), beside_workers: bool = True
) -> Settings:
    """The settings with a device in place of `auto` for each of the `roles`, which are on this machine.

    With workers on the processor they are returned as they are: `auto` is the processor then. `beside_workers`: the
    workers' slots are on this machine, too, and have not been made yet.
    """
    if settings.loader_used != CUDA:
        return settings
    taken: dict[torch.device, int] = {}
    if beside_workers:
        taken[device_of(settings, "worker")] = _worker_bytes(settings, store)
    chosen = {}
    for role in ("main", "shadow"):
        device = device_of(settings, role)
        if role not in roles or device.type == "cpu" or (role == "shadow" and not settings.has_shadow):
            continue
        needed, held = role_bytes(store, role, settings.shadow), taken.get(device, 0)
        if role == "main" and settings.drafts_by_head:
            needed += head_bytes(store)
        needed //= settings.shadow_hosts if role == "shadow" else 1
        if settings.device_of(role) == AUTO:
            chosen[f"{role}_device"] = str(device) if _fits(role, device, needed, held) else "cpu"
        if chosen.get(f"{role}_device") != "cpu":
            taken[device] = held + needed
    return settings.replace(**chosen)


def role_bytes(store: ExpertStore, role: str, scheme: str) -> int:
    """About the bytes of a role's weights on an accelerator; for the shadow with the precision `scheme`."""
    from scheduler.planning.shadow_bytes import SHADOW_BYTES

    manifest = store.manifest
    itemsize = parse_dtype(manifest.dtype).itemsize
    dense = _dense_elements(store) + manifest.dense_weights
    if role == "main":
        return dense * itemsize - manifest.dense_saved
    experts = sum(
        len(spec.blobs) * manifest.restored_layout(layer).blob_bytes for layer, spec in manifest.layers.items()
    )
    return int(experts // itemsize * SHADOW_BYTES[scheme].expert) + 2 * dense


def _dense_elements(store: ExpertStore) -> int:
    """From the files' headers, without those that are encoded, and without a head that drafts."""
    found, unread = 0, set()
    with contextlib.suppress(ConfigError):
        unread = {name for name, _ in find_in_store(store).values()}
    for file in sorted(set(store.dense.glob("*.safetensors")) - set(store.dense.glob(FILES))):
        with safe_open(file, "pt") as opened:
            names = [name for name in opened.keys() if name not in unread]  # noqa: SIM118
            found += sum(math.prod(opened.get_slice(name).get_shape()) for name in names)
    return found


def _worker_bytes(settings: Settings, store: ExpertStore) -> int:
    """Of all workers' slots, and of restoring experts."""
    found = resources(with_precision(settings, store), store)
    slots = found.slots * max(store.manifest.form_bytes(form) for form in found.forms)
    return settings.workers * (slots + restoring_bytes(store.manifest, found.forms, CUDA, settings.threads_a_node))


def _fits(role: str, device: torch.device, needed: int, held: int) -> bool:
    """`held`: bytes that other nodes are about to take."""
    free, total = accelerator_memory(device)
    room = max(0, int(free - SPARE * total) - held)
    if needed <= room or not total:
        return True
    _log.warning(
        "the %s computes on the processor: its weights take %s, and %s has room for %s; %s %s puts it there all the "
        "same",
        *(_BY_ROLE[role], megabytes(needed), device, megabytes(room), flag(f"{role}_device"), device),
    )
    return False


def choice_text(settings: Settings, chosen: Settings) -> str:
    """What `auto` has become, for the line that is shown while nodes start. Empty where it was not asked for, or this
    machine has no accelerator."""
    found = accelerator()
    roles = ["main"] + ["shadow"] * settings.has_shadow
    if found is None or AUTO not in [settings.device_of(role) for role in roles]:
        return ""
    if settings.loader_used != CUDA:
        return f" on the processor; --device {found.type} is for the accelerator"
    on = {"main": [device_of(chosen, "main")], "shadow": shadow_devices(chosen) if settings.has_shadow else []}
    return "; " + ", ".join(f"{_BY_ROLE[role]} on {' and '.join(map(str, on[role]))}" for role in roles)
