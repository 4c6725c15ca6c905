"""What a process does before it holds nodes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from odmoe.clusters.process import VECTOR_MATH, held_ray, prepare_libraries
from scheduler.errors import LaunchError

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


def test_ray_is_used_for_one_cluster_at_a_time_and_leaves_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    before = dict(os.environ)
    tokens = []
    for _ in range(2):
        with held_ray("local"):
            assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_DEDUP_LOGS"]) == ("token", "1")
            tokens.append(os.environ["RAY_AUTH_TOKEN"])
            for cluster in ("local", "auto"):
                with pytest.raises(LaunchError, match=f"cluster is {cluster}, .* uses Ray for another model"):
                    held_ray(cluster).__enter__()
        assert dict(os.environ) == before
    assert tokens[0] == tokens[1]
    with pytest.raises(RuntimeError), held_ray("auto"):
        raise RuntimeError("it does not start")
    assert dict(os.environ) == before
