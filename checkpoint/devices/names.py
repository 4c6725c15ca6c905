"""Devices by name: which one a role computes on, and what this machine has."""

from __future__ import annotations

import contextlib

import torch

from scheduler.errors import ConfigError

AUTO, CPU = "auto", "cpu"


def accelerator() -> torch.device | None:
    """This machine's accelerator, as torch has it; None where there is none that can be used."""
    return torch.accelerator.current_accelerator(check_available=True)


def count() -> int:
    """How many of them there are."""
    return torch.accelerator.device_count()


def find_device(name: str, setting: str = "--device") -> torch.device:
    """The device of that name: `auto` (the accelerator if there is one, else the processor), `cpu`, or an accelerator's
    type with or without a number (`cuda:1`). An accelerator always has its number.

    Raises ConfigError where this machine has no such device. `setting`: its name in the message.
    """
    found = accelerator()
    if name == CPU or (name == AUTO and found is None):
        return torch.device(CPU)
    kind, _, number = name.partition(":")
    here = [] if found is None else [f"{found.type}:{index}" for index in range(count())]
    if found is not None and kind in (AUTO, found.type):
        index = int(number or 0)
        if index < len(here):
            return torch.device(found.type, index)
    has = f"has {', '.join(here)}" if here else "sees no accelerator"
    allowed = ", ".join([AUTO, CPU, *here])
    raise ConfigError(
        f"{setting} is {name!r}, which this machine does not have: torch {torch.__version__} {has} here; "
        f"allowed: {allowed}"
    )


def accelerator_name(device: str | torch.device) -> str:
    """The model of an accelerator; its type where torch does not know more."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "xpu":
        return torch.xpu.get_device_name(device)
    return device.type


def return_memory() -> None:
    """Give back accelerators' memory that torch's allocator keeps and nothing uses."""
    with contextlib.suppress(RuntimeError):  # an accelerator whose allocator keeps none
        if accelerator() is not None:
            torch.accelerator.empty_cache()


def accelerator_memory(device: str | torch.device) -> tuple[int, int]:
    """Free and all bytes of an accelerator's memory. Zeros where torch does not know them."""
    try:
        free, total = torch.accelerator.get_memory_info(torch.device(device))
        return int(free), int(total)
    except (RuntimeError, ValueError, NotImplementedError):
        return 0, 0
