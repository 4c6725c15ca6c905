"""The Protocol of a running cluster, the same for every kind of cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, Unpack

from main_node.activity import Activity
from main_node.answer import Step
from main_node.figures import Figures
from main_node.sampling import GenerateOptions
from odmoe.settings.settings import Settings
from scheduler.trace import Span

Say = Callable[[str], None]


class Answering(Protocol):
    """An answer that is being computed; iterating over it gives its tokens, then a closing step with its report.

    The end of a `with` block closes it. One that nothing refers to any more is closed a moment later.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __iter__(self) -> Iterator[Step]: ...

    def __next__(self) -> Step: ...

    def cancel(self) -> None:
        """Cancel the answer, from any thread, also during a pass. The iterating thread gets RequestCancelledError."""

    def close(self) -> None:
        """Cancel the answer, from the iterating thread."""


class Cluster(Protocol):
    """Nodes that answer prompts."""

    def generate(self, prompt: list[int], max_new_tokens: int, **how: Unpack[GenerateOptions]) -> Answering:
        """Gives one step per token, then a closing one with the report. Several answers may be open at once, in a
        thread each."""

    def rejoin(self, within_s: float, given_up: threading.Event) -> None:
        """Find the main node again after MainNodeLostError, and wait until it is ready. Raises LinkError if it is not
        there yet, LaunchError if it serves another model now, RequestCancelledError soon after `given_up` is set."""

    def changes(self, since: int | None) -> tuple[int, list[str]]:
        """A number, and a line for each node that was lost or came back after `since`, the number of an earlier call;
        None: no lines. Raises ODMoEError where the main node is not there."""

    def figures(self) -> Figures:
        """What the cluster counts, now: from any thread, also during passes, for which it does not wait. Raises
        ODMoEError where the main node is not there, or does not answer within seconds."""

    def activity(self, since: int | None) -> Activity:
        """What the nodes do now, and the experts that gates have chosen since an earlier call, whose `count` is given.
        They are collected from the first call on, and for some seconds after the last. Raises what `figures` raises."""

    def trace(self) -> list[Span]:
        """The spans of every node since the last call. Needs `settings.trace`."""

    def recording(self) -> bytes:
        """The scheduler's events and commands since the nodes started. Needs `settings.record`."""

    def store(self) -> Path:
        """The expert store of the model that is served."""

    def serves(self) -> Settings:
        """The settings of the running nodes."""

    def close(self) -> None:
        """Stop every node that this cluster started, and free its resources."""
