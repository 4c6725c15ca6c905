"""Looks after the list of a worker's part of the store: experts may be copied to its host while it serves."""

from __future__ import annotations

import logging
from typing import Any

from checkpoint.held import HELD, read_held
from checkpoint.part_files import manifests
from checkpoint.store import ExpertStore, removal_error
from scheduler.errors import CorruptStoreError, StoreError, StoreMismatchError
from scheduler.types import ExpertId
from wire import runtime
from wire.sessions import Sessions
from worker_node.file_stamp import FileStamp, file_stamp

_log = logging.getLogger(__name__)
LOOK_S = 2.0
"""Between two looks at the list."""
CLOSE_S = 5.0
"""How long closing waits for a look to end."""


class PartWatch:
    """Tells the main node that is served when the store has got experts. Nobody looks after a whole store, nor for a
    loader that has read its experts at the start (`loads_more` is false).

    A list counts if it has all that the store held, and lies beside the very files that were opened: others may have
    been copied to their place, and a loader that has the former ones open would find nothing there.
    """

    def __init__(self, store: ExpertStore, sessions: Sessions[Any], loads_more: bool) -> None:
        self._store = store
        self._sessions = sessions
        self._looking = runtime.Lock()
        self._closed = runtime.Event()
        self._said = ""
        self._seen: FileStamp | None = None
        """What of the list would show a change, at the last look that found it in order."""
        self._proven: list[FileStamp] = []
        """Likewise of the manifests, when they were last read and found to be those of the store."""
        self._thread: runtime.Thread | None = None
        if loads_more and store.held is not None:
            self._files = _inodes(store)
            self._thread = runtime.Thread(target=self._run, name="part-watch", daemon=True)
            self._thread.start()

    @property
    def is_on(self) -> bool:
        """Experts that come are used."""
        return self._thread is not None

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                self.look()
            except (StoreError, OSError) as error:
                if str(error) != self._said:
                    self._said = str(error)
                    _log.warning("%s; this worker goes on with the experts that it held", error)

    def look(self) -> None:
        """Once, from any thread; a list that has not changed is not read. Raises StoreError, OSError."""
        with self._looking:
            stamp = file_stamp(self._store.path / HELD)
            if stamp == self._seen:
                return
            held = self._read()
            self._seen = stamp
            if held == self._store.held:
                return
            self._store.held = held
            session = self._sessions.served
            if session is not None:
                session.send_held()

    def _read(self) -> frozenset[ExpertId]:
        """What the store holds now. Raises StoreError, OSError."""
        before, folder = self._store.held or frozenset(), self._store.path
        held = read_held(folder, self._store.manifest.layers)
        if held is None or not held >= before:
            found = "gone" if held is None else f"without {len(before - held)} experts that were there"
            raise CorruptStoreError(f"{folder / HELD} is {found}; copy the store to this host again")
        if held > before:
            self.check_same()
        return held

    def check_same(self) -> None:
        """Raises StoreError unless these are the files that were opened."""
        store = self._store
        stamps = [file_stamp(file) for file in manifests(store)]
        is_same = _inodes(store) == self._files
        if is_same and stamps != self._proven:
            is_same = ExpertStore.open(store.path).manifest == store.manifest
        if not is_same:
            raise StoreMismatchError(f"{store.path} is another store than this worker opened; start the worker again")
        self._proven = stamps

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)


def _inodes(store: ExpertStore) -> list[int]:
    """Of the files of experts. Raises StoreNotFoundError."""
    forms = ("", *store.manifest.forms)
    try:
        return [(store.path / layer.file).stat().st_ino for form in forms for layer in store.layers(form).values()]
    except FileNotFoundError as error:
        raise removal_error(store.path) from error
