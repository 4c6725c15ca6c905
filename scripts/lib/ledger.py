"""Finished cells of an experiment, kept in a file, and digests of what a cell depends on."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.lib.paths import ROOT

PACKAGES = ("scheduler", "wire", "checkpoint", "main_node", "shadow_node", "worker_node", "odmoe")
"""What a real answer is made by."""


def digest(value: Any) -> str:
    """Of anything that JSON can say; dataclasses as their fields."""
    text = json.dumps(value, sort_keys=True, default=lambda one: dataclasses.asdict(one))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sources(*packages: str) -> str:
    """A digest of these packages' Python and YAML files, as they were when the experiment began: what is changed later
    is not what runs. In the key of cells that are cheap and depend on every line of them."""
    return digest([package_digest(package) for package in packages]) if len(packages) > 1 else package_digest(*packages)


@functools.cache
def package_digest(package: str) -> str:
    sums = hashlib.sha256()
    for path in sorted(p for p in (ROOT / package).rglob("*") if p.suffix in (".py", ".yaml")):
        sums.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return sums.hexdigest()[:16]


class Ledger:
    """Finished cells in a file, a line each. Held by one process at a time.

    A last line without its end is what a killed process left of a cell, and is cut off. Any other line that cannot be
    read is named and its cell computed again.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise SystemExit(f"{path} is being written by another run; wait for it, or give another --out") from None
        if fresh:
            os.ftruncate(self._file, 0)
        text = path.read_bytes()
        ended = text.rfind(b"\n") + 1
        if ended < len(text):
            os.ftruncate(self._file, ended)
        found = list(self._read(text[:ended]))
        self._found = {key: result for key, result, _ in found}
        self._code = {key: code for key, _, code in found}

    def _read(self, text: bytes) -> Iterator[tuple[str, dict[str, Any], str | None]]:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                fields = json.loads(line)
                yield str(fields["key"]), dict(fields["result"]), fields.get("code")
            except (ValueError, KeyError, TypeError):
                print(f"{self.path}, line {number}: no finished cell; it is computed again", file=sys.stderr)

    def get(self, key: str) -> dict[str, Any] | None:
        return self._found.get(key)

    def code(self, key: str) -> str | None:
        """Of which code a finished cell is, as far as it says."""
        return self._code.get(key)

    def put(self, key: str, params: dict[str, Any], result: dict[str, Any], code: str) -> None:
        """On the disk when this returns."""
        line = json.dumps({"key": key, "params": params, "code": code, "result": result}).encode() + b"\n"
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)
        self._found[key], self._code[key] = result, code

    def keys(self) -> set[str]:
        return set(self._found)

    def close(self) -> None:
        os.close(self._file)
