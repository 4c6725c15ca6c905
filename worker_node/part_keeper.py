"""Writes experts that the main node sends to a worker's part of the store, while the worker serves."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from checkpoint.direct_io import open_direct, write_at
from checkpoint.manifest import Blob, RunningChecksum
from checkpoint.part_files import name_held
from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from scheduler.errors import CorruptStoreError, DoesNotFitError, ProtocolError, StoreError
from scheduler.types import ExpertId
from wire import runtime
from wire.messages import KEEP_BYTES, Keep, Kept
from wire.serial import SerialThread
from worker_node.part_watch import PartWatch

_log = logging.getLogger(__name__)
SPARE = 256 << 20
"""Bytes of the disk that stay free."""


class PartKeeper:
    """Its thread starts with the first expert. What is written counts once it was compared with the store's checksums
    and `held.json` names it; an expert that is cut short comes again from its beginning."""

    def __init__(self, name: str, store: ExpertStore, watch: PartWatch) -> None:
        self._name, self._store, self._watch = name, store, watch
        self._lock = runtime.Lock()
        self._thread: SerialThread | None = None
        self._closed = False
        self._expert: ExpertId | None = None
        """The one that is being written."""
        self._sums: dict[str, RunningChecksum] = {}
        """Of its forms, as far as they have come."""
        self._written: dict[str, int] = {}
        """Bytes of each of these forms."""

    def take(self, message: Keep, answer: Callable[[Kept], None]) -> None:
        """Returns at once; `answer` is called later, from another thread, but for a refusal that needs no disk."""
        if not self._watch.is_on:
            error = StoreError(f"{self._name} holds a whole store, or its loader has read its part already")
            answer(Kept(message.number, f"{type(error).__name__}: {error}"))
            return
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = SerialThread(f"{self._name}-keep", _tell)
            self._thread.submit(self._keep, message, answer)

    def _keep(self, message: Keep, answer: Callable[[Kept], None]) -> None:
        error = ""
        try:
            self._write(message)
        except Exception as fault:  # noqa: BLE001 - whatever it is, the main node waits for an answer
            self._expert = None
            error = f"{type(fault).__name__}: {fault}"
        answer(Kept(message.number, error))

    def _write(self, message: Keep) -> None:
        """Raises StoreError, DoesNotFitError, ProtocolError, OSError."""
        expert, form = ExpertId(message.layer, message.expert), message.form
        if expert in (self._store.held or ()):
            return  # others have copied it here
        blob = self._begin(expert, form) if message.offset == 0 else self._blob(expert, form)
        if expert != self._expert or message.offset != self._written.get(form):
            raise ProtocolError(
                f"byte {message.offset} of expert {expert.expert} of layer {expert.layer} came without those before it"
            )
        if message.offset + len(message.data) > blob.length:
            raise ProtocolError(
                f"expert {expert.expert} of layer {expert.layer} has {blob.length} bytes here, and more were sent"
            )
        self._put(message, blob)
        self._sums[form].add(message.data)
        self._written[form] += len(message.data)
        if message.last:
            self._finish(expert)

    def _begin(self, expert: ExpertId, form: str) -> Blob:
        self._watch.check_same()
        blob = self._blob(expert, form)
        if expert != self._expert:
            self._check_room(expert)
            self._expert, self._sums, self._written = expert, {}, {}
        self._sums[form], self._written[form] = RunningChecksum(), 0
        return blob

    def _blob(self, expert: ExpertId, form: str) -> Blob:
        """Raises StoreError."""
        spec = self._store.layers(form).get(expert.layer)
        if spec is None or not 0 <= expert.expert < len(spec.blobs):
            raise StoreError(f"the store at {self._store.path} has no expert {expert.expert} of layer {expert.layer}")
        return spec.blobs[expert.expert]

    def _check_room(self, expert: ExpertId) -> None:
        needed = sum(self._blob(expert, form).length for form in self._forms)
        disk = os.statvfs(self._store.path)
        free = disk.f_bavail * disk.f_frsize
        if free < needed + SPARE:
            raise DoesNotFitError(
                f"{self._store.path} has {free / 1e9:.2f} GB free, an expert takes {needed / 1e9:.3f} and "
                f"{SPARE / 1e9:.2f} are to stay; make room there"
            )

    @property
    def _forms(self) -> tuple[str, ...]:
        return ("", *self._store.manifest.forms)

    def _put(self, message: Keep, blob: Blob) -> None:
        data = aligned_buffer(KEEP_BYTES)[: len(message.data)]
        data.numpy().data[:] = message.data
        file = open_direct(self._store.path / self._store.layers(message.form)[message.layer].file, os.O_WRONLY)
        try:
            write_at(file, blob.offset + message.offset, data)
            if message.offset + len(message.data) == blob.length:
                os.fsync(file)
        finally:
            os.close(file)

    def _finish(self, expert: ExpertId) -> None:
        for form in self._forms:
            total = self._sums.get(form)
            if total is None or total.hex() != self._blob(expert, form).checksum:
                raise CorruptStoreError(
                    f"expert {expert.expert} of layer {expert.layer}{f' in form {form}' * bool(form)} fails its "
                    "checksum as it came; check the main node's store (odmoe verify), and the link"
                )
        self._expert = None
        self._watch.check_same()
        name_held(self._store.path, (self._store.held or frozenset()) | {expert})
        self._watch.look()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._thread.close()


def _tell(error: Exception) -> None:
    _log.warning("an answer to the main node could not be given: %s", error)
