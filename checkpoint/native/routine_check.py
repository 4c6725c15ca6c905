"""Compiled routines are used where they give the bits of the torch way, which is compared once a process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

Routine = Callable[[torch.Tensor, Mapping[str, torch.Tensor], torch.Tensor], None]
"""As `Encoding.restore` on a CPU, without a size of pieces: target, parts, scratch."""

Found = TypeVar("Found")

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_routines: dict[str, Any] = {}
"""By name. None: torch restores."""


def checked_routine(name: str, make: Callable[[], Found], is_equal: Callable[[Found], bool]) -> Found | None:
    """The routine that `make` gives for the encoding or form `name`, if `is_equal`. None: torch restores.

    The first call for a name compiles and compares it, which takes about a second.
    """

    def compare() -> Found | None:
        routine = make()
        if is_equal(routine):
            return routine
        _log.warning(
            "the compiled routine of %s gives other bits than torch, which restores several times slower", name
        )
        return None

    if name not in _routines:
        with _lock:
            if name not in _routines:
                _routines[name] = first_use(compare, f"torch restores {name}, several times slower")
    found: Found | None = _routines[name]
    return found


def first_use(use: Callable[[], Found], instead: str) -> Found | None:
    """What `use` returns, which loads and compiles a routine and calls it for the first time.

    None where that fails, for whatever reason, with a warning that names what is done `instead`.
    """
    try:
        return use()
    except Exception as error:  # noqa: BLE001  numba, LLVM and the loader of libraries have no common error
        _log.warning("numba cannot compile for this processor (%s: %s); %s", type(error).__name__, error, instead)
        return None
