"""A device that computes on the processor and counts what crosses to and from it.

It is torch's PrivateUse1 device, of which a machine may have several: `privateuseone:0`, `privateuseone:1`. Its
tensors lie in ordinary memory, and a kernel is the CPU's, called on the same memory: so results are the same, bit for
bit. As on a GPU, an operation with tensors of two devices fails, and only a copy moves a tensor from one to the other.
Every copy, and every operation after which the host knows a value, is recorded with the function of this project that
asked for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.library import Library
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.dlpack import from_dlpack, to_dlpack

from support.paths import ROOT

NAME = "privateuseone"
_PACKAGES = tuple(str(ROOT / name) for name in ("checkpoint", "main_node", "shadow_node", "worker_node", "odmoe"))
_CPU, _EXTENSION = 1, 12
"""DLPack's device types: kDLCPU and kDLExtDev, which torch reads as PrivateUse1."""

_WHOLE = ("linear", "matmul", "scaled_dot_product_attention", "conv1d")
"""Composite operations for which torch's CPU kernels take another way than for other devices."""

_SYNCHRONISING = frozenset({"nonzero", "_unique2", "unique_dim", "masked_select", "is_nonzero", "equal"})
"""On a GPU the host waits for these: the size of the result, or the result itself, is a value of a tensor."""


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("index", ctypes.c_int))


class _Head(ctypes.Structure):
    """The beginning of DLPack's DLTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device", _Device))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _as(kind: int, tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
    """The same memory as a tensor of the other device. `index`: which of the counted ones."""
    with torch.inference_mode(False):  # a view of a weight is no inference tensor either
        capsule = to_dlpack(tensor.detach())
        head = _Head.from_address(_pointer(capsule, b"dltensor"))
        head.device = _Device(kind, index)
        found: torch.Tensor = from_dlpack(capsule)
    return found


class Crossing(NamedTuple):
    """One copy to or from the device, or one operation that makes the host wait."""

    kind: str
    """`to device`, `to host`, `between devices` or `waits`."""
    asked_by: str
    """`file.py:function` of this project, the innermost."""
    operation: str
    nbytes: int


@dataclass
class Crossings:
    """What has crossed since the last `clear`. Thread-safe."""

    all: list[Crossing] = field(default_factory=list)
    _adding: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, operation: str, nbytes: int) -> None:
        with self._adding:
            self.all.append(Crossing(kind, _asked_by(), operation, nbytes))

    def clear(self) -> None:
        with self._adding:
            self.all.clear()

    def by_asker(self, *kinds: str) -> Counter[str]:
        with self._adding:
            return Counter(one.asked_by for one in self.all if not kinds or one.kind in kinds)


def _asked_by() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGES):
            return f"{Path(file).name}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "none of this project"


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """What torch's own `tree_map` gives for an operation's arguments and results, in a tenth of its time."""
    if isinstance(value, tuple | list):
        return type(value)([_mapped(change, one) for one in value])
    if isinstance(value, dict):
        return {key: _mapped(change, one) for key, one in value.items()}
    return change(value)


def _on_cpu(operation: Any, value: Any) -> Any:
    """An argument for the CPU's kernel. Raises RuntimeError for a tensor that is not on the device."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type == NAME:
        return _as(_CPU, value)
    if value.dim():
        raise RuntimeError(f"{operation} with tensors of two devices: one of shape {tuple(value.shape)} is on the CPU")
    return value


def _index(operation: Any, args: Any) -> int:
    """Which of the counted devices an operation runs on. Raises RuntimeError for tensors of two of them."""
    leaves: list[Any] = []
    _mapped(leaves.append, args)
    found = {one.device.index for one in leaves if isinstance(one, torch.Tensor) and one.device.type == NAME}
    if len(found) > 1:
        raise RuntimeError(f"{operation} with tensors of two devices: {sorted(found)} of {NAME}")
    given = (one.index or 0 for one in leaves if isinstance(one, torch.device) and one.type == NAME)
    return found.pop() if found else next(given, 0)


@cache
def _tensor_places(operation: Any) -> list[int]:
    return [place for place, one in enumerate(operation._schema.arguments) if str(one.type) == "Tensor"]


@cache
def _outs(operation: Any) -> list[str]:
    return [one.name for one in operation._schema.arguments if one.is_out]


def _called(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """A number that torch had wrapped in a tensor comes as a number: then another overload takes it."""
    numbers = any(isinstance(args[place], int | float) for place in _tensor_places(operation) if place < len(args))
    return (operation.overloadpacket if numbers else operation)(*args, **kwargs)


class _Kernels:
    def __init__(self, crossings: Crossings) -> None:
        self._crossings = crossings

    def run(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        """Any operation with a tensor of the device, or that makes one."""
        name = operation._schema.name.removeprefix("aten::")
        if name in ("_copy_from", "_copy_from_and_resize"):
            return self._copy(name, *args, **kwargs)
        if name == "_local_scalar_dense":
            self._crossings.add("waits", "item", args[0].nbytes)
        elif name in _SYNCHRONISING or self._by_mask(name, args):
            self._crossings.add("waits", name, 0)
        index = _index(operation, (args, kwargs))
        outs = [one for one in _outs(operation) if one in kwargs]
        if name == "resize_" or outs:
            return self._resized(name, operation, outs, index, args, kwargs)
        own: dict[int, torch.Tensor] = {}

        def to_cpu(value: Any) -> Any:
            alias = _on_cpu(operation, value)
            if alias is not value and isinstance(value, torch.Tensor):
                own[id(alias)] = value
            return alias

        def from_cpu(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return own[id(value)] if id(value) in own else _as(_EXTENSION, value, index)

        aliases = _mapped(to_cpu, (args, kwargs))
        return _mapped(from_cpu, _called(operation, *aliases[0], **aliases[1]))

    def _resized(
        self, name: str, operation: Any, outs: list[str], index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Results that the operation sizes itself are made anew: memory under a DLPack tensor has a fixed size."""
        if name == "resize_":
            made = torch.empty(args[1], dtype=args[0].dtype)
            kept = min(made.numel(), args[0].numel())
            made.flatten()[:kept] = _as(_CPU, args[0]).flatten()[:kept]
            args[0].data = _as(_EXTENSION, made, index)
            return args[0]
        given = {one: kwargs[one] for one in outs}
        for one in given.values():
            _on_cpu(operation, one)
        host = {one: torch.empty(0, dtype=tensor.dtype) for one, tensor in given.items()}
        others = _mapped(
            partial(_on_cpu, operation), (args, {key: value for key, value in kwargs.items() if key not in outs})
        )
        _called(operation, *others[0], **others[1], **host)
        for one, tensor in given.items():
            if tensor.shape == host[one].shape:
                _as(_CPU, tensor).copy_(host[one])
            else:
                tensor.data = _as(_EXTENSION, host[one], index)
        return next(iter(given.values())) if len(given) == 1 else tuple(given.values())

    @staticmethod
    def _by_mask(name: str, args: tuple[Any, ...]) -> bool:
        if name not in ("index.Tensor", "index", "index_put_", "_index_put_impl_"):
            return False
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])

    def _copy(self, name: str, source: torch.Tensor, into: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        if source.device != into.device and source.nbytes:
            kinds = {source.device.type: "to host", into.device.type: "to device"}
            kind = kinds[NAME] if len(kinds) == 2 else "between devices"
            self._crossings.add(kind, "copy", source.nbytes)
        host = [_as(_CPU, one) if one.device.type == NAME else one for one in (source, into)]
        if name == "_copy_from_and_resize" and host[1].shape != host[0].shape:
            host[1].resize_(host[0].shape)
        host[1].copy_(host[0])
        return into


@contextlib.contextmanager
def counted_device() -> Iterator[tuple[torch.device, Crossings]]:
    """The device, while the context lasts."""
    if not hasattr(torch, NAME):
        _setup_privateuseone_for_python_backend()
    crossings = Crossings()
    kernels = _Kernels(crossings)
    every, whole = Library("_", "IMPL"), Library("aten", "IMPL")
    every.fallback(kernels.run, "PrivateUse1")
    for name in _WHOLE:
        operation = getattr(torch.ops.aten, name).default

        def run(*args: Any, _operation: Any = operation, **kwargs: Any) -> Any:
            return kernels.run(_operation, *args, **kwargs)

        whole.impl(name, run, "PrivateUse1")
    try:
        yield torch.device(NAME, 0), crossings
    finally:
        whole._destroy()
        every._destroy()
