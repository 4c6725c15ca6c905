"""How long a layer of the main node takes: as long as it does, or at least as long as a profile says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Pace(Protocol):
    """See `scheduler.emulation.clock.MainPace`, which keeps a profile's times."""

    @property
    def emulated(self) -> str | None:
        """The profile's name."""

    def now(self) -> float: ...

    def begin_pass(self, tokens: int, first: bool) -> None: ...

    def decoded(self) -> None: ...

    def gate(self, fired: Callable[[], T]) -> T: ...

    def foreseen(self, tell: Callable[[], object], attended: bool) -> None: ...

    def answered(self) -> None: ...

    def resumed(self) -> None: ...


class RealPace:
    """Things take as long as they take."""

    emulated = None

    def now(self) -> float:
        return time.monotonic()

    def begin_pass(self, tokens: int, first: bool) -> None:
        pass

    def decoded(self) -> None:
        pass

    def gate(self, fired: Callable[[], T]) -> T:
        return fired()

    def foreseen(self, tell: Callable[[], object], attended: bool) -> None:
        tell()

    def answered(self) -> None:
        pass

    def resumed(self) -> None:
        pass
