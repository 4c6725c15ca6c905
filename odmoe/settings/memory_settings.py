"""The settings of memory: for experts in slots and beside them, and for KV caches of earlier prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from odmoe.settings.system_settings import SystemSettings
from odmoe.settings.table import setting
from odmoe.settings.units import (
    HOST_MEMORY,
    MEMORY,
    SIZE,
    SLOTS,
    TOTAL,
    Bytes,
    BytesOrNone,
    HostMemory,
    Memory,
    Slots,
)


class MemorySettings(SystemSettings):
    """A part of `odmoe.settings.settings.Settings`."""

    device_memory: Memory | None = setting(
        None,
        MEMORY,
        "Expert memory of all workers: 25%, 2GB",
        heading="Memory",
        common=True,
        metavar="SIZE",
        fixed="running",
        verify=True,
    )
    memory: Memory | None = setting(
        None,
        TOTAL,
        "Memory of all nodes: 60%, 2GB; slots get what is left",
        heading="Memory",
        metavar="SIZE",
        verify=True,
    )
    host_memory: HostMemory = setting(
        "auto",
        HOST_MEMORY,
        "Memory of a machine's workers for experts, between disk and device: 2GB, 50%, 0 for none (default: auto)",
        heading="Memory",
        metavar="SIZE",
        fixed="running",
        verify=True,
    )
    slots: Slots = setting(
        1,
        SLOTS,
        "Experts that a worker has room for; auto: all that fit for a cache, 2 with --residency none",
        heading="Memory",
        metavar="N",
        fixed="running",
        verify=True,
    )
    kv_memory: BytesOrNone = setting(
        0,
        f"{SIZE}, or 0",
        "Memory for KV caches of earlier prompts, for prompts that begin alike (default: 0, none; serve: 512MiB)",
        heading="Memory",
        metavar="SIZE",
        fixed="running",
        verify=True,
    )
    kv_disk: str | None = setting(
        None,
        "a directory",
        "Directory where these KV caches stay when the main node ends",
        heading="Memory",
        metavar="DIR",
        fixed="running",
    )
    kv_disk_size: Bytes = setting(
        10_000_000_000,
        SIZE,
        "Most bytes in --kv-disk; what was not used for longest gives way (default: 10GB)",
        heading="Memory",
        metavar="SIZE",
        fixed="running",
    )

    def __init__(self, named: Callable[[str], str] | None = None, **values: Any) -> None:
        super().__init__(named, **values)
