"""Lost nodes are named while answers are under way, not only in their reports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from scheduler.errors import ODMoEError

if TYPE_CHECKING:
    from odmoe.clusters.base import Cluster

LOOK_S = 1.0
"""Between two looks."""
CLOSE_S = 2.0
"""Longest wait for a look that is under way: the main node may be gone."""


class NodeWatch:
    """Within its `with` block, `notify` gets a line for each node that is lost or comes back."""

    def __init__(
        self,
        cluster: Cluster,
        notify: Callable[[str], None],
        on_look: Callable[[ODMoEError | None], None] = lambda error: None,
    ) -> None:
        """`on_look`: told after each look why the main node did not answer; None: it did."""
        self._cluster = cluster
        self._notify, self._on_look = notify, on_look
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(CLOSE_S)  # Ray writes to standard error where it is asked after its end

    def _run(self) -> None:
        number = None
        while True:
            failure: ODMoEError | None = None
            try:
                number, lines = self._cluster.changes(number)
            except ODMoEError as error:  # the answers themselves raise it
                failure, lines = error, []
            if not self._over.is_set():
                self._on_look(failure)
            for line in lines:
                if not self._over.is_set():
                    self._notify(line)
            if self._over.wait(LOOK_S):
                return
