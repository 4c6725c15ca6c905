"""How long a layer of the shadow takes: as long as it does, or at least as long as a profile says."""

from __future__ import annotations

import time
from typing import Protocol


class Pace(Protocol):
    """See `scheduler.emulation.clock.ShadowPace`, which keeps a profile's times."""

    def now(self) -> float: ...

    def arrived(self) -> None: ...

    def begin_pass(self) -> None: ...

    def layer(self) -> None: ...


class RealPace:
    """Things take as long as they take."""

    def now(self) -> float:
        return time.monotonic()

    def arrived(self) -> None:
        pass

    def begin_pass(self) -> None:
        pass

    def layer(self) -> None:
        pass
