"""How long a layer of the main node takes: as long as it does, or at least as long as a profile says."""

from __future__ import annotations

import time
from typing import Protocol


class Pace(Protocol):
    """See `scheduler.emulation.MainPace`, which keeps a profile's times."""

    @property
    def emulated(self) -> str | None:
        """The profile's name."""

    def now(self) -> float: ...

    def begin_pass(self) -> None: ...

    def gate(self) -> None: ...

    def answered(self) -> None: ...

    def resumed(self) -> None: ...


class RealPace:
    """Things take as long as they take."""

    emulated = None

    def now(self) -> float:
        return time.monotonic()

    def begin_pass(self) -> None:
        pass

    def gate(self) -> None:
        pass

    def answered(self) -> None:
        pass

    def resumed(self) -> None:
        pass
