"""The memory of this machine in which a worker can have its slots."""

from __future__ import annotations

from functools import cache

from worker_node.loaders.slab import available_memory

SHARE = 0.5
"""Of the memory that is free. The rest is for rows and outputs, and on a CPU for the other nodes of the machine."""


def slot_memory(device: str, workers: int) -> int:
    """Bytes for the slots of each of the `workers` that share this machine's `device`, as torch names it.

    Raises LaunchError where the kernel does not report the memory.
    """
    return int(_free(device) * SHARE) // workers


@cache
def _free(device: str) -> int:
    """Looked up once a process, so that the slots of its first worker do not count against the others."""
    if device == "cpu":
        return available_memory()
    import torch

    return int(torch.cuda.mem_get_info(device)[0]) if torch.cuda.is_available() else 0
