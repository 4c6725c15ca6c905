"""The memory of this machine in which a worker can have its slots."""

from __future__ import annotations

from functools import cache

from worker_node.loaders.slab import SPARE, available_memory

SHARE = 0.5
"""Of an accelerator's memory that is free. The rest is for rows and outputs."""


def slot_memory(device: str, workers: int, reserve: int = 0) -> int:
    """Bytes for the slots of each of the `workers` that share this machine's `device`, as torch names it. `reserve`:
    host memory that the machine's other nodes need.

    Raises LaunchError where the kernel does not report the memory.
    """
    return (host_room(reserve) if device == "cpu" else int(_free(device) * SHARE)) // workers


def host_room(reserve: int) -> int:
    """Bytes of this machine's free memory for experts: less `SPARE` and `reserve`, but at least half of it. Raises
    LaunchError as `slot_memory`."""
    free = _free("cpu")
    return free - min(free // 2, SPARE + reserve)


@cache
def _free(device: str) -> int:
    """Looked up once a process, so that the slots of its first worker do not count against the others."""
    if device == "cpu":
        return available_memory()
    import torch

    return int(torch.cuda.mem_get_info(device)[0]) if torch.cuda.is_available() else 0
