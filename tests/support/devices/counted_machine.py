"""A machine whose accelerator is the counted device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from support.devices.counted_device import Crossings, counted_device
from support.devices.device_loader import DeviceLoader


@contextlib.contextmanager
def counted_machine(patch: pytest.MonkeyPatch, count: int = 1) -> Iterator[tuple[torch.device, Crossings]]:
    """The first of `count` such devices, and what crosses. Devices are found by name, as on a machine with GPUs."""
    with counted_device() as (device, crossings):
        for user in ("checkpoint.devices.names", "odmoe.clusters.devices", "odmoe.clusters.device_choice"):
            patch.setattr(f"{user}.accelerator", lambda: device)
        patch.setattr("checkpoint.devices.names.count", lambda: count)
        yield device, crossings


def workers_there(patch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Workers compute on the counted device, too."""
    patch.setattr("odmoe.clusters.nodes.device_of", lambda settings, role: device)
    patch.setattr(
        "odmoe.clusters.nodes.make_loader",
        lambda name, store, emulation, moved, forms, on, host_slots: DeviceLoader(store, on),
    )
