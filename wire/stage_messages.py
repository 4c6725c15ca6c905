"""The messages between a shadow and the stages that have some of its layers."""

from __future__ import annotations

from dataclasses import dataclass

from wire.message_tensors import LocalTensor, Tensor

# --- shadow -> stage -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunLayers:
    """Run the stage's layers on rows that the layers before them have computed. Answered by a `Prediction` for each
    gate, with `run` as its request, then by `RanLayers`, or by `Failed` with `run` as its `call_id`."""

    run: int
    """Ascending."""
    request: int
    """A cache of the stage, made with its first run."""
    tokens: tuple[int, ...]
    """Of all rows [T]; empty in all messages of a run but its first."""
    hidden: Tensor | LocalTensor
    """[1, t, ...]: the next rows, in the shape that goes from layer to layer."""
    more: bool
    """Whether more rows follow in another message, once these were answered by `TakenRows`."""
    marks: tuple[int, ...]
    """The marks of this request that may still be returned to."""


@dataclass(frozen=True, slots=True)
class CancelRun:
    """Nothing of this run is wanted any more. Not answered; messages about it may still arrive."""

    run: int


@dataclass(frozen=True, slots=True)
class AlignLayers:
    """The main model's KV rows of the stage's layers, as in `Align`. Not answered: if they do not fit, the request's
    next run fails."""

    request: int
    kv_start: int
    kv: tuple[Tensor | LocalTensor, ...]
    taken_over: bool
    """By a cache that may be ahead of them; a run need not have ended."""


@dataclass(frozen=True, slots=True)
class MarkLayers:
    """Mark the present end of a request's cache. Not answered."""

    request: int
    mark: int
    rows: bool
    """Whether to keep the rows, too, to go forward to this end again."""


@dataclass(frozen=True, slots=True)
class ReturnTo:
    """Bring a request's cache to a mark. Not answered."""

    request: int
    mark: int


# --- both ways between shadow and stage ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakenRows:
    """The rows of a message of this run with `more` were taken: the next may come."""

    run: int


# --- stage -> shadow -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageReady:
    """Answer to `Hello`: the stage has the layers [first, stop) of the model. The rest is as for a shadow."""

    version: int
    node: str
    scheme: str
    first: int
    stop: int
    device_bytes: int
    host: str
    pid: int
    device_name: str
    device: str


@dataclass(frozen=True, slots=True)
class RanLayers:
    """A run has ended."""

    run: int
    hidden: Tensor | LocalTensor
    """[1, t, ...]: the next rows, after the stage's layers. [0] from the last stage."""
    more: bool
    """Whether more rows follow in another message, once these were answered by `TakenRows`."""
    token: int | None
    """From the last stage: the greedy next token."""
    axes: tuple[int, ...]
    """Of the cache's tensors with a row a token, in the order of `checkpoint.kv`, the axis of their rows."""
    states: int
    """The number of the cache's other tensors."""
    cache_bytes: int
    """Of all caches of the stage, and of their marks."""
