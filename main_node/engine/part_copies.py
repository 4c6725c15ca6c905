"""Copies experts of a store in parts to other workers, when some have lost holders."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

from checkpoint.direct_io import open_direct, read_at
from checkpoint.manifest import RunningChecksum
from checkpoint.part_files import expert_sizes
from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from main_node.engine.peers import Peers
from scheduler import types as t
from scheduler.errors import CorruptStoreError, StoreError
from scheduler.held import experts_of
from scheduler.one_line import one_line
from scheduler.part_copies import Copy, Holdings
from scheduler.types import PAGE, ExpertId
from wire import messages as w
from wire import runtime

WAIT_S = 60.0
"""A lost worker may come back for so long, before its experts are copied. Ray starts one again in 10 to 30 s."""
LOOK_S = 5.0
"""Between two looks whether experts lack holders."""
PIECE_S, LEAST_BYTES = 0.01, 1 << 18
"""Pieces are as long as a link and a disk take for in that time, and at least that: so long rows may have to wait."""
REST = 3.0
"""After each piece, this multiple of the time that it took: link and disks are left to requests for the rest."""
ANSWER_S = 60.0
"""Longest wait until a worker has written a piece."""
REFUSED_S = 600.0
"""A worker that took no copy, and an expert that could not be read, are tried again after so long."""
CLOSE_S = 5.0
_log = logging.getLogger(__name__)


class PartCopies:
    """One expert at a time, in pieces, the next when the last is on the worker's disk. The main node has the whole
    store, so it is the source: nothing depends on who else still holds the expert."""

    def __init__(self, peers: Peers, lock: runtime.RLock, store: ExpertStore, replicas: int, start_s: float) -> None:
        """`lock`: the engine's. `start_s`: how long workers may take to start."""
        self._peers, self._lock, self._store, self._replicas = peers, lock, store, replicas
        self._sizes = expert_sizes(store)
        here = [expert for expert, _ in store.experts()]
        self._holdings = Holdings(here, replicas, WAIT_S, runtime.monotonic() + start_s)
        self._refused: dict[int, float] = {}
        """Worker -> when it took no copy."""
        self._unread: dict[ExpertId, float] = {}
        """Expert -> when it could not be read here."""
        self._asked: tuple[int, int, runtime.SimpleQueue[w.Kept | None]] | None = None
        """The worker that writes a piece, the piece's number, and where the answer goes; None where it was lost."""
        self._number = 0
        self._length = LEAST_BYTES
        """Of the next piece."""
        self._said: set[str] = set()
        self._closed = runtime.Event()
        self._thread = runtime.Thread(target=self._run, name="odmoe-copies", daemon=True)
        self._thread.start()

    # --- what happens, with the lock held -----------------------------------------------------------------------

    def on_handled(self, event: t.Event, now: float, commands: list[t.Command]) -> None:
        """See `Observer`."""
        if isinstance(event, t.WorkerJoined):
            if event.slots:
                self._on_held(event.worker, event.held)
            self._refused.pop(event.worker, None)
        elif isinstance(event, t.HoldingsChanged):
            self._on_held(event.worker, event.held)
        elif isinstance(event, t.WorkerLost):
            self._holdings.on_lost(event.worker, runtime.monotonic())
            if self._asked is not None and self._asked[0] == event.worker:
                self._asked[2].put(None)

    def _on_held(self, worker: int, held: tuple[t.HeldRange, ...] | None) -> None:
        self._holdings.on_held(worker, None if held is None else experts_of(held))

    def on_kept(self, worker: int, message: w.Kept) -> None:
        if self._asked is not None and self._asked[:2] == (worker, message.number):
            self._asked[2].put(message)

    # --- on the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                self._restore()
            except Exception:  # noqa: BLE001 - a dead thread would copy nothing any more
                _log.exception("experts cannot be copied")

    def _restore(self) -> None:
        """Copy until nothing is left that can be copied."""
        copied = nbytes = 0
        while (copy := self._next()) is not None and not self._closed.is_set():
            if not copied:
                self._say(f"{self._short()} experts have lost holders; they are copied to other workers")
            if self._copy(copy):
                copied, nbytes = copied + 1, nbytes + self._sizes[copy.expert]
        if not copied or self._closed.is_set():
            return
        self._said.clear()
        short = self._short()
        rest = f"; {short} experts still have too few, and no worker takes more" * bool(short)
        self._say(f"{copied} experts ({nbytes / 1e9:.3g} GB) were copied to workers that hold them from now on{rest}")

    def _short(self) -> int:
        with self._lock:
            seen = self._holdings.seen()
        return len(seen.shortage(runtime.monotonic()))

    def _next(self) -> Copy | None:
        now = runtime.monotonic()
        with self._lock:
            full = [worker for worker, when in self._refused.items() if now - when < REFUSED_S]
            seen = self._holdings.seen()
        unread = [expert for expert, when in self._unread.items() if now - when < REFUSED_S]
        return seen.next_copy(now, self._sizes, full, unread)

    def _copy(self, copy: Copy) -> bool:
        """Whether the worker holds it now."""
        what = f"expert {copy.expert.expert} of layer {copy.expert.layer}"
        try:
            for piece in self._pieces(copy.expert):
                began = runtime.monotonic()
                error = self._put(copy.worker, piece)
                if error:
                    self._say(f"worker {copy.worker} takes no copy of {what}: {one_line(error)}")
                    with self._lock:
                        self._refused[copy.worker] = runtime.monotonic()
                if error is not None:
                    return False
                took_s = max(runtime.monotonic() - began, 1e-6)
                self._learn(piece, took_s)
                if self._closed.wait(REST * took_s):
                    return False
        except (StoreError, OSError) as error:
            self._say(f"{what} cannot be copied to other workers: {error}")
            self._unread[copy.expert] = runtime.monotonic()
            return False
        return True

    def _learn(self, piece: w.Keep, took_s: float) -> None:
        """The next length, in whole pages, at most twice this one: one quick piece says little. The rest of an expert
        says nothing: it is short, and the worker writes all to its disk after it."""
        if piece.last or len(piece.data) < self._length:
            return
        wanted = min(len(piece.data) * PIECE_S / took_s, 2 * self._length, w.KEEP_BYTES)
        self._length = max(int(wanted), LEAST_BYTES) // PAGE * PAGE

    def _put(self, worker: int, piece: w.Keep) -> str | None:
        """Send a piece, and wait until it is written. None then; the error in words, or nothing for a lost worker."""
        answers: runtime.SimpleQueue[w.Kept | None] = runtime.SimpleQueue()
        with self._lock:
            if worker not in self._peers.workers:
                return ""
            self._asked = worker, piece.number, answers
            self._peers.tell(worker, piece)
            self._peers.flush()
        try:
            kept = answers.get(timeout=ANSWER_S)
        except runtime.Empty:
            return f"it has not answered for {ANSWER_S:g} s"
        finally:
            with self._lock:
                self._asked = None
        return "" if kept is None else kept.error or None

    def _pieces(self, expert: ExpertId) -> Iterator[w.Keep]:
        """An expert's bytes in all forms. Raises StoreError, OSError; CorruptStoreError before the last piece of a form
        that fails its checksum."""
        forms = ("", *self._store.manifest.forms)
        buffer = aligned_buffer(w.KEEP_BYTES)
        for form in forms:
            path, blob = self._store.locate(*expert, form)
            file, total = open_direct(path, os.O_RDONLY), RunningChecksum()
            try:
                offset = 0
                while offset < blob.length:
                    length = min(self._length, blob.length - offset)
                    data = bytes(read_at(file, blob.offset + offset, length, buffer).numpy().data)
                    total.add(data)
                    ends = offset + length == blob.length
                    if len(data) < length or (ends and total.hex() != blob.checksum):
                        raise CorruptStoreError(
                            f"it fails its checksum in {path} of the main node; make that store again"
                        )
                    self._number += 1
                    yield w.Keep(self._number, *expert, form, offset, data, ends and form == forms[-1])
                    offset += length
            finally:
                os.close(file)

    def _say(self, text: str) -> None:
        """Once, until something was copied."""
        if text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)
            self._peers.membership.add(text)

    def close(self) -> None:
        """Not with the lock held."""
        self._closed.set()
        with self._lock:
            if self._asked is not None:
                self._asked[2].put(None)
        self._thread.join(CLOSE_S)
