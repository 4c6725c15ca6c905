"""A request's cache whose layers are in several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any
from weakref import WeakValueDictionary

import torch

from checkpoint import kv
from checkpoint.tensors import tensor_bytes
from scheduler.errors import LinkError, ProtocolError
from shadow_node.stages.remote import RemoteStage
from wire.messages import AlignLayers, CloseRequest, MarkLayers, Message, ReturnTo, Tensor


@dataclass(frozen=True, slots=True, weakref_slot=True)
class DividedMark:
    """See `kv.mark`. It is kept everywhere as long as this is."""

    number: int
    here: kv.Mark

    @property
    def nbytes(self) -> int:
        """Of this process."""
        return self.here.nbytes


class DividedCache:
    """As `RequestCache`. `here`: the cache of this process, which has the first `stop` layers. `request`: its number at
    the stages, which have the others, in order."""

    def __init__(self, here: Any, stop: int, request: int, stages: Sequence[RemoteStage]) -> None:
        self.here = here
        self.request = request
        self._stop = stop
        self._stages = stages
        self._numbers = count(1)
        self._marks: WeakValueDictionary[int, DividedMark] = WeakValueDictionary()

    @property
    def marks(self) -> tuple[int, ...]:
        """The numbers of those that are kept."""
        return tuple(sorted(self._marks.keys()))

    def put(self, start: int, sent: list[torch.Tensor]) -> int:
        return self._align(start, sent, taken_over=False)

    def take_over(self, start: int, sent: list[torch.Tensor]) -> int:
        return self._align(start, sent, taken_over=True)

    def _align(self, start: int, sent: list[torch.Tensor], taken_over: bool) -> int:
        layouts = self._layouts
        axes = [axis for layout in layouts for axis in layout.axes]
        states = sum(layout.states for layout in layouts)
        if len(sent) not in (len(axes) + states, len(axes)):
            raise ProtocolError(
                f"alignment has {len(sent)} KV tensors; this model's cache has {len(axes) + states} in all of its parts"
            )
        rows, held = iter(sent[: len(axes)]), iter(sent[len(axes) :])
        shares = [[*islice(rows, len(layout.axes)), *islice(held, layout.states)] for layout in layouts]
        stop = start + _rows_in(sent, axes)
        put = kv.take_over if taken_over else kv.put
        own, *others = [
            (stop - _rows_in(share, layout.axes), _rows_of(share, layout) if taken_over else share)
            for share, layout in zip(shares, layouts, strict=True)
        ]
        put(self._own, *own)
        for stage, (at, tensors) in zip(self._stages, others, strict=True):
            stage.send(AlignLayers(self.request, at, tuple(Tensor(*tensor_bytes(t)) for t in tensors), taken_over))
        return stop

    def has_states(self, sent: Any) -> bool:
        layouts = self._layouts
        growing = sum(len(layout.axes) for layout in layouts)
        return any(layout.states for layout in layouts) and any(t.shape != (0,) for t in list(sent)[growing:])

    def mark(self, rows: bool = False) -> DividedMark:
        mark = DividedMark(next(self._numbers), kv.mark(self.here, rows))
        self._marks[mark.number] = mark
        self._tell(MarkLayers(self.request, mark.number, rows))
        return mark

    def go_to(self, to: DividedMark) -> None:
        kv.go_to(self.here, to.here)
        self._tell(ReturnTo(self.request, to.number))

    def close(self) -> None:
        for stage in self._stages:
            try:
                stage.send(CloseRequest(self.request))
            except LinkError:  # the stage is lost, and its caches with it
                continue

    @property
    def nbytes(self) -> int:
        return kv.cache_bytes(self._own)

    @property
    def _own(self) -> kv.Layers:
        return kv.layers_of(self.here, 0, self._stop)

    @property
    def _layouts(self) -> list[kv.Layout]:
        return [kv.layout(self._own), *(stage.layout for stage in self._stages)]

    def _tell(self, message: Message) -> None:
        for stage in self._stages:
            stage.send(message)


def _rows_in(sent: Sequence[torch.Tensor], axes: Sequence[int]) -> int:
    """The most rows of a tensor. A part whose windows begin later has fewer; all rows end at the same position."""
    return max((t.shape[axis] for t, axis in zip(sent, axes, strict=False) if t.dim() > axis), default=0)


def _rows_of(share: list[torch.Tensor], layout: kv.Layout) -> list[torch.Tensor]:
    """What a cache takes over: no states."""
    return share[: len(layout.axes)]
