"""Which files of the product a piece of work enters, as Python's profiler sees it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from support.paths import ROOT

PRODUCT = ("scheduler", "wire", "checkpoint", "main_node", "shadow_node", "worker_node", "odmoe")
_FOLDERS = tuple(f"{ROOT / package}/" for package in PRODUCT)


class Road:
    """The files in which a function of the product was called while `on`: by any thread that began within `profiled`,
    or by one thread alone."""

    def __init__(self) -> None:
        self.on = False
        self.files: list[str] = []
        """In the order in which they were entered first."""
        self._alone: int | None = None

    @contextlib.contextmanager
    def profiled(self) -> Iterator[Road]:
        """Make the nodes, and have them work, within this context."""
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self, alone: bool = False) -> None:
        """`alone`: of the calling thread."""
        self.files = []
        self._alone = threading.get_ident() if alone else None
        self.on = True

    def end(self) -> list[str]:
        self.on = False
        return self.files

    def _enter(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.on or event != "call" or (self._alone is not None and self._alone != threading.get_ident()):
            return
        name = frame.f_code.co_filename
        if name.startswith(_FOLDERS) and not frame.f_code.co_name.startswith("<"):
            file = name.removeprefix(f"{ROOT}/")
            if file not in self.files:
                self.files.append(file)


def fewest(roads: list[list[str]]) -> list[str]:
    """The shortest of many."""
    return min(roads, key=len)


def in_all(roads: list[list[str]]) -> list[str]:
    """The files of the same work, done several times: what other threads do beside it now and then is not in all."""
    first, *others = roads
    return [file for file in first if all(file in road for road in others)]


def between(
    road: Road, start: tuple[type, str], stop: tuple[type, str] | None, patch: Callable[[object, str, object], None]
) -> list[list[str]]:
    """Record, on one thread, each way from a call of `start` to a call of `stop`; without one, to the end of `start`.
    The roads are added to the list that is returned."""
    roads: list[list[str]] = []
    begin_of = getattr(*start)

    def begin(*args: Any, **named: Any) -> Any:
        road.begin(alone=stop is not None)
        try:
            return begin_of(*args, **named)
        finally:
            files = road.end()
            if stop is None:
                roads.append(files)

    patch(start[0], start[1], begin)
    if stop is not None:
        end_of = getattr(*stop)

        def end(*args: Any, **named: Any) -> Any:
            if road.on:
                roads.append(road.end())
            return end_of(*args, **named)

        patch(stop[0], stop[1], end)
    return roads
