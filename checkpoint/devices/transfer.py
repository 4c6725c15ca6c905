"""Tensors between the processor and an accelerator: several in one copy, from and to page-locked memory.

These functions, and the KV rows of `checkpoint.devices.streams`, are the only places where a running model's tensors
change devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ALIGN = 64
"""Of each tensor in a packed buffer. The last bit of float32 products of one row depends on its address."""


def to_host(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors on the CPU: those of one accelerator in one copy, for which this thread waits. A tensor that is on
    the CPU is returned as it is."""
    if all(tensor.is_cpu for tensor in tensors):
        return tensors
    found = list(tensors)
    for source, numbers in _by_source(tensors, torch.device("cpu")).items():
        away = [tensors[number] for number in numbers]
        packed, places = pack(away)
        landed = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=pins(source))
        landed.copy_(packed)  # not non_blocking: the bytes are read at once
        _put(found, numbers, unpack(landed, away, places))
    return tuple(found)


def to_device(device: torch.device, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors on `device`: those of the CPU, or of another accelerator, in one copy, which is enqueued and not
    waited for."""
    found = list(tensors)
    for source, numbers in _by_source(tensors, device).items():
        away = [tensors[number] for number in numbers]
        packed, places = pack(away, pin=pins(device) and source.type == "cpu")
        landed = torch.empty(packed.shape, dtype=torch.uint8, device=device)
        landed.copy_(packed, non_blocking=pins(device))
        _put(found, numbers, unpack(landed, away, places))
    return tuple(found)


def _by_source(tensors: Sequence[torch.Tensor], device: torch.device) -> dict[torch.device, list[int]]:
    """By device, the places of the tensors that are not on `device`."""
    found: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.device != device:
            found.setdefault(tensor.device, []).append(number)
    return found


def _put(tensors: list[torch.Tensor], numbers: Sequence[int], arrived: Sequence[torch.Tensor]) -> None:
    for number, tensor in zip(numbers, arrived, strict=True):
        tensors[number] = tensor


def token_ids(tokens: Sequence[int], device: torch.device) -> torch.Tensor:
    """[1, T], int64."""
    ids = torch.tensor([tokens])
    return ids if device.type == "cpu" else to_device(device, ids)[0]


def pins(device: torch.device) -> bool:
    """Whether host memory is page-locked for copies to and from it."""
    return device.type == "cuda"


def pack(tensors: Sequence[torch.Tensor], pin: bool = False) -> tuple[torch.Tensor, list[int]]:
    """The tensors' bytes in one uint8 tensor of their device, and where each begins. All are on one device. `pin`: in
    page-locked memory, for tensors of the CPU."""
    places, end = [], 0
    for tensor in tensors:
        places.append(end)
        end += -(-tensor.nbytes // _ALIGN) * _ALIGN
    device = tensors[0].device
    packed = torch.empty(end, dtype=torch.uint8, device=device, pin_memory=pin)
    for tensor, place in zip(tensors, places, strict=True):
        _at(packed, place, tensor).copy_(tensor)
    return packed, places


def unpack(packed: torch.Tensor, tensors: Sequence[torch.Tensor], places: Sequence[int]) -> list[torch.Tensor]:
    """The tensors over their bytes in `packed`, uncopied."""
    return [_at(packed, place, tensor) for tensor, place in zip(tensors, places, strict=True)]


def _at(packed: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """A view of the packed bytes as a tensor of `like`'s dtype and shape."""
    return packed[place : place + like.nbytes].view(like.dtype).view(like.shape)
