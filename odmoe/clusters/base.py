"""A running cluster, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, Unpack

from main_node.answer import Step
from main_node.sampling import How
from odmoe.settings.settings import Settings
from scheduler.trace import Span

Say = Callable[[str], None]


class Answering(Protocol):
    """An answer on its way: iterate over it for its tokens."""

    def __iter__(self) -> Iterator[Step]: ...

    def __next__(self) -> Step: ...

    def cancel(self) -> None:
        """Give it up, from any thread, in the middle of a pass too. Whoever iterates gets RequestCancelledError."""

    def close(self) -> None:
        """Give it up, from the thread that iterates."""


class Cluster(Protocol):
    """What answers prompts."""

    def generate(self, prompt: list[int], max_new_tokens: int, **how: Unpack[How]) -> Answering:
        """One step a token, the last with the report. Several answers may be open at once, a thread each."""

    def trace(self) -> list[Span]:
        """What every node has done since the last time, where `settings.trace` is set."""

    def recording(self) -> bytes:
        """What the scheduler was told and decided since the nodes started, where `settings.record` is set."""

    def store(self) -> Path:
        """Of the model that is served."""

    def serves(self) -> Settings:
        """With which settings the nodes run."""

    def close(self) -> None:
        """Stop every node that this cluster started, and free what it holds."""
