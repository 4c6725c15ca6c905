"""What a process does before it holds nodes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from odmoe.clusters.process import VECTOR_MATH, prepare_libraries

HEADER = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"


class Calls(TorchDispatchMode):
    """Records which functions are called, and with which dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {(func.overloadpacket.__name__, one.dtype) for one in args if isinstance(one, torch.Tensor)}
        return func(*args, **kwargs or {})


def test_every_function_of_mkl_is_called_before_nodes_start() -> None:
    """Torch's own header says which those are."""
    listed = set(re.findall(r"^IMPLEMENT_VML_MKL\((\w+), \w+\)", HEADER.read_text(), re.MULTILINE))
    assert listed == set(VECTOR_MATH)
    with Calls() as calls:
        prepare_libraries(torch.get_num_threads())
    assert {(name, dtype) for name in listed for dtype in (torch.float32, torch.float64)} <= calls.seen
