"""Gives host memory back while the machine runs short of it, rather than being killed for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from wire import runtime
from worker_node.loaders.base import Tier

EVERY_S = 1.0
"""How often it looks."""
CLOSE_S = 5.0
"""How long closing waits for a look to end."""

_log = logging.getLogger(__name__)


class MemoryWatch:
    """Looks at the machine's free memory on a thread of its own. `loading`: held while the tier changes. `on_shrunk`:
    called with the host slots that are left, on that thread."""

    def __init__(self, name: str, tier: Tier, loading: runtime.Lock, on_shrunk: Callable[[int], None]) -> None:
        self._name = name
        self._tier = tier
        self._loading = loading
        self._on_shrunk = on_shrunk
        self._told = tier.slots
        self._closed = runtime.Event()
        self._thread = runtime.Thread(target=self._run, name=f"{name}-memory", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Once."""
        with self._loading:
            self._tier.relieve()
            slots = self._tier.slots
        if slots < self._told:
            _log.warning(
                "%s: little memory is left on this machine; host memory shrinks from %d experts to %d",
                self._name,
                self._told,
                slots,
            )
            self._told = slots
            self._on_shrunk(slots)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            self.look()
