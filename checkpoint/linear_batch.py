"""The dense part's products of several requests, made together.

The forward passes of several requests run as coroutines. Each stops at each linear layer of the model, and the rows
that wait at the same layer are multiplied with its weight as one product, which reads the weight once. Attention,
caches and norms stay those of each request, so no sequence is padded and every family can do it. A product of more rows
may sum in another order: logits are then those of a lone request up to rounding only. On CPUs with AMX, products in
bfloat16 of up to 32 rows mostly do not: they are found by comparison, and shared without a change of any bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from checkpoint.coroutine import in_coroutine, suspend
from checkpoint.kernels import EXACT, SHARED_ROWS, KernelLinear, Linear

T = TypeVar("T")
_at_once: ContextVar[bool] = ContextVar("at_once", default=False)


class BatchLinear(torch.nn.Linear):
    """A linear layer that suspends the coroutine in which it is called, with a `LinearCall`, and returns what the
    coroutine is resumed with. Outside of a coroutine it computes as its class did before."""

    place: int
    """Its place among the model's layers. Of two passes, the one that waits at the lower place is behind."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not in_coroutine() or _at_once.get():
            return super().forward(input)
        output: torch.Tensor = suspend(LinearCall(self, input))
        return output

    def forward_alone(self, rows: torch.Tensor) -> torch.Tensor:
        """As outside of a coroutine."""
        return super().forward(rows)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Meanwhile the calling coroutine does not stop at linear layers: it runs the model for itself."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


@dataclass(frozen=True, slots=True, eq=False)
class LinearCall:
    """A product that a suspended pass waits for."""

    module: BatchLinear
    rows: torch.Tensor
    """[..., K]"""


@cache
def _batch_class(cls: Any) -> Any:
    return type(f"Batch{cls.__name__}", (BatchLinear, cls), {"__module__": cls.__module__})


def batch_linear(model: torch.nn.Module) -> list[BatchLinear]:
    """Make the model's linear layers stop in coroutines. Returns these layers.

    Classes with a product of their own stay as they are: of a quantised layer, a row's output can depend on the rows
    beside it. So do weights that the model multiplies without a linear layer, such as those of most gates.
    """
    plain = (torch.nn.Linear.forward, KernelLinear.forward, BatchLinear.forward)
    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and type(module).forward in plain:
            cls: Any = type(module)
            if not issubclass(cls, BatchLinear):
                module.__class__ = _batch_class(cls)
            vars(module)["place"] = len(found)
            found.append(module)
    return found


def multiply(calls: Sequence[LinearCall], exact: bool = False) -> list[torch.Tensor]:
    """The outputs [..., N] of calls of one module, in their order. A single call is computed as without coroutines.

    Where rows of calls can share a product bit for bit, only as many do as keep their bits. Elsewhere all share one;
    `exact`: then each call has its own. Raises ValueError where the calls are of several modules, and what the product
    raises.
    """
    module = calls[0].module
    if any(call.module is not module for call in calls):
        raise ValueError("calls of different linear layers cannot be multiplied together")
    if len(calls) == 1:
        return [module.forward_alone(calls[0].rows)]
    groups = _groups(calls) if _is_rowwise(module) else [[call] for call in calls] if exact else [calls]
    return [output for group in groups for output in _product(module, group)]


def keeps_bits(calls: Sequence[LinearCall]) -> bool:
    """Whether `multiply` leaves every bit of these calls' outputs as it is of each call alone."""
    return len(calls) == 1 or _is_rowwise(calls[0].module)


def _is_rowwise(module: BatchLinear) -> bool:
    return _kernel(module).is_rowwise(module.weight, module.bias)


def _product(module: BatchLinear, calls: Sequence[LinearCall]) -> list[torch.Tensor]:
    if len(calls) == 1:
        return [module.forward_alone(calls[0].rows)]
    shapes = [call.rows.shape for call in calls]
    rows = [call.rows.reshape(-1, shape[-1]) for call, shape in zip(calls, shapes, strict=True)]
    product = _kernel(module)(torch.cat(rows), module.weight, module.bias)
    outputs = product.split([len(part) for part in rows])
    return [part.view(*shape[:-1], part.shape[-1]) for part, shape in zip(outputs, shapes, strict=True)]


def _kernel(module: BatchLinear) -> Linear:
    """Of a layer without one, `EXACT`: its bits are those of `torch.nn.functional.linear`."""
    kernel: Linear = vars(module).get("kernel", EXACT)
    return kernel


def _groups(calls: Sequence[LinearCall]) -> list[list[LinearCall]]:
    """Neighbours of at most `SHARED_ROWS` rows in all. More rows than that have a product of their own."""
    groups: list[list[LinearCall]] = []
    room = 0
    for call in calls:
        rows = call.rows.numel() // call.rows.shape[-1]
        if not groups or rows > room:  # a head that nobody asks has no rows
            groups.append([])
            room = SHARED_ROWS
        groups[-1].append(call)
        room -= rows
    return groups


def meeting(calls: Iterable[LinearCall]) -> list[int]:
    """Which of these calls to multiply next, by index: all of the module that is furthest behind. The others wait, so
    that those behind can catch up with them."""
    waiting = list(calls)
    first = min(waiting, key=lambda call: call.module.place).module
    return [number for number, call in enumerate(waiting) if call.module is first]
