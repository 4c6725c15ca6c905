"""Looks after the list of a worker's part of the store: experts may be copied to its host while it serves."""

from __future__ import annotations

import logging
from typing import Any

from checkpoint.held import read_held
from checkpoint.store import ExpertStore
from scheduler.errors import CorruptStoreError
from wire import runtime
from wire.sessions import Sessions

_log = logging.getLogger(__name__)
LOOK_S = 2.0
"""Between two looks at the list."""


class PartWatch:
    """Tells the main node that is served when the store holds other experts than before. Nobody looks after a whole
    store, nor for a loader that has read its experts at the start (`loads_more` is false)."""

    def __init__(self, store: ExpertStore, sessions: Sessions[Any], loads_more: bool) -> None:
        self._store = store
        self._sessions = sessions
        self._closed = runtime.Event()
        if loads_more and store.held is not None:
            runtime.Thread(target=self._run, name="part-watch", daemon=True).start()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                held = read_held(self._store.path, self._store.manifest.layers)
            except CorruptStoreError as error:
                _log.warning("%s; this worker goes on with the experts that it held", error)
                return
            if held != self._store.held:
                self._store.held = held
                session = self._sessions.served
                if session is not None:
                    session.send_held()

    def close(self) -> None:
        self._closed.set()
