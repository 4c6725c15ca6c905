"""Inference mode, for threads that may be new."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def inference() -> AbstractContextManager[None]:
    """`torch.inference_mode()`, with the process's number of threads.

    A thread has that number only once something has asked torch for it. A product of MKL does not: on a new thread it
    takes all cores, and its last bits depend on how many those are.
    """
    torch.get_num_threads()
    return torch.inference_mode()
