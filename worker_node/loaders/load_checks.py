"""Loads compared with the store's checksums: which of them, and what that costs.

A load that is checked takes longer by the digest of its last piece, and that of the others where no core was free for
them (`worker_node/loaders/digest.py`). `auto` counts the time of all digests: on a weak machine no core is free.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from checkpoint.store import ExpertStore
from scheduler.errors import CorruptStoreError, ODMoEError
from wire.machine import host_name
from worker_node.file_stamp import FileStamp, file_stamp
from worker_node.loaders.base import Loader
from worker_node.loaders.digest import TAIL_BYTES, Digests

COST = 0.02
"""Most time that `auto` spends on checks, over the time of all loads."""

SAVED_CHECKS = 4.0
"""Most checks whose time `auto` saves up. It bounds what a while of dear checks may cost after a while of cheap ones,
and what a single one counts that was held up by something else."""

SPREAD = 0.5
"""By how much the distance between two checks varies, so that it keeps no step with the order of the experts."""


class CheckedLoad(NamedTuple):
    """A load that has ended."""

    nbytes: int
    checked: bool
    check_s: float
    """What the check cost, see `BlobDigest.seconds`."""


class LoadChecks:
    """Decides for one worker which loads are checked, and checks them. One load at a time.

    `mode`: `all`, `none`, or `auto`: every load where that costs under `COST` of the loads' time, else as many as cost
    that much, spread evenly, by what checks and loads have taken so far. With `auto`, every load of an expert whose
    file has changed since this was made is checked besides, until it was found whole.
    """

    def __init__(self, name: str, store: ExpertStore, loader: Loader, mode: str = "auto") -> None:
        self.mode = mode
        self.checked = 0
        """Loads that were checked and found whole."""
        self._store, self._loader = store, loader
        self._digests = Digests(f"{name}-check")
        self._check_s = self._saved_s = 0.0
        """What a check takes; the time for checks that has not been spent."""
        self._random = random.Random(0)
        self._wait = 1.0
        """How many checks' time must have been saved up for the next one."""
        self._files = _stamps(store) if mode == "auto" and loader.device == "cpu" else {}
        self._latest: dict[Path, FileStamp] = {}
        """Of the files that have changed."""
        self._found_whole: dict[tuple[int, int, str], FileStamp] = {}

    def measure(self, slot: torch.Tensor) -> None:
        """Before the first load: measure what a check takes on this machine."""
        piece = torch.empty(min(slot.nbytes, TAIL_BYTES), dtype=torch.uint8).zero_().numpy()
        digests = [self._digests.new() for _ in range(3)]
        for digest in digests:
            digest.add(piece, more=False)
        self._check_s = min(digest.seconds for digest in digests) * slot.nbytes / piece.nbytes
        self._saved_s = SAVED_CHECKS * self._check_s

    def load(
        self, layer: int, expert: int, into: torch.Tensor, cancelled: Callable[[], bool], form: str
    ) -> CheckedLoad:
        """`Loader.load`, and the check where it is due. One that is given up is not checked.

        Raises CorruptStoreError for bytes that are not the store's, and what the loader raises. Files are opened again
        for the next load then: they may have been replaced meanwhile.
        """
        digest = self._digests.new() if self._due() else None
        try:
            if digest is None:
                nbytes = self._loader.load(layer, expert, into, cancelled, form)
            else:
                nbytes = self._loader.load(layer, expert, into, cancelled, form, digest)
            if cancelled():
                return CheckedLoad(nbytes, False, 0.0)
            changed = None if digest else self._change_stamp(layer, expert, form)
            if changed is not None:
                digest = self._digests.new()
                digest.add(into[:nbytes].numpy(), more=False)
            if digest is None:
                return CheckedLoad(nbytes, False, 0.0)
            compare(self._store, layer, expert, digest.hex(), form)
            if changed:
                self._found_whole[layer, expert, form] = changed
        except (OSError, ODMoEError):
            self._loader.reopen()
            raise
        return CheckedLoad(nbytes, True, digest.seconds)

    def on_loaded(self, seconds: float, load: CheckedLoad) -> None:
        """A load has ended and took so long, with its check. Not called for one that was given up at its end."""
        if load.checked:
            self.checked += 1
            spent_s = min(load.check_s, SAVED_CHECKS * self._check_s)
            self._check_s += (spent_s - self._check_s) / 8
            self._saved_s -= spent_s
            self._wait = self._random.uniform(1 - SPREAD, 1 + SPREAD)
        self._saved_s = min(self._saved_s + COST * (seconds - load.check_s), SAVED_CHECKS * self._check_s)

    def close(self) -> None:
        self._digests.close()

    def _due(self) -> bool:
        return self.mode == "all" or (self.mode == "auto" and self._saved_s >= self._wait * self._check_s)

    def _change_stamp(self, layer: int, expert: int, form: str) -> FileStamp | None:
        """None if the expert's file is as it was at the start, or the expert was found whole since it changed. Else the
        file's stamp; an empty one if the file may have changed during this load.

        To be called after the load, so that no change before or during it is missed.
        """
        if not self._files:
            return None
        path = self._store.locate(layer, expert, form)[0]
        stamp = file_stamp(path)
        if stamp == self._files[path] or stamp == self._found_whole.get((layer, expert, form)):
            return None
        before, self._latest[path] = self._latest.get(path), stamp
        return stamp if before == stamp else ()


def compare(store: ExpertStore, layer: int, expert: int, checksum: str, form: str = "") -> None:
    """Raises CorruptStoreError, with the expert, the file and this host, if `checksum` is not the expert's."""
    path, blob = store.locate(layer, expert, form)
    if checksum != blob.checksum:
        in_form = f" in form {form}" if form else ""
        raise CorruptStoreError(
            f"expert {expert} of layer {layer}{in_form} fails its checksum, as loaded from {path} on {host_name()}; "
            "check the disk and the memory of that host, and make or copy the store again there"
        )


def _stamps(store: ExpertStore) -> dict[Path, FileStamp]:
    forms = [store.manifest.layers, *(form.layers for form in store.manifest.forms.values())]
    return {path: file_stamp(path) for layers in forms for spec in layers.values() for path in [store.path / spec.file]}
