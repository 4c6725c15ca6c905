"""What the cluster does, a few times a second, for those who watch the page."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from odmoe.serve.api_error import SERVER, ApiError
from odmoe.serve.page.updates import encode_activity, encode_figures
from odmoe.serve.sse import event
from scheduler.errors import ODMoEError

if TYPE_CHECKING:
    from starlette.requests import Request

    from main_node.activity import Activity
    from odmoe.clusters.base import Cluster
    from odmoe.serve.service import Service

UPDATE_S = 0.5
"""Between two updates."""
FIGURES_EVERY = 2
"""Updates, of which one has the figures of the nodes: for these, every node is asked."""
VIEWERS = 16
"""At once."""
PENDING = 4
"""Updates that wait for a viewer who reads slowly. The oldest one is left out then."""
LINES = 12
"""About nodes that were lost or came back, the latest ones."""
LOOK_S = 1.0
"""Longest time until a viewer's leaving, or the end of the service, is noticed."""
_log = logging.getLogger(__name__)


class Viewer:
    """One reader of the feed."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.updates: asyncio.Queue[bytes] = asyncio.Queue(PENDING)

    def give(self, update: bytes) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # its event loop has ended
            self.loop.call_soon_threadsafe(self.offer, update)

    def offer(self, update: bytes) -> None:
        """On the event loop."""
        if self.updates.full():
            self.updates.get_nowait()
        self.updates.put_nowait(update)


class ActivityFeed:
    """Asks the cluster in a thread of its own, which lives while there are viewers: nothing is collected before the
    first comes, or some seconds after the last has gone."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._viewers: set[Viewer] = set()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        """Wakes the thread when the last viewer has gone."""

    @contextlib.contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Raises ApiError if there are too many."""
        viewer = Viewer()
        with self._lock:
            if len(self._viewers) >= VIEWERS:
                text = f"{VIEWERS} viewers watch the cluster already; close one of them"
                raise ApiError(503, text, SERVER, code="too_many_viewers")
            self._viewers.add(viewer)
            if self._thread is None:
                self._over.clear()
                self._thread = threading.Thread(target=self._run, name="odmoe-page", daemon=True)
                self._thread.start()
        try:
            yield viewer
        finally:
            with self._lock:
                self._viewers.discard(viewer)
                if not self._viewers:
                    self._over.set()

    def _run(self) -> None:
        updates = _Updates(self._cluster)
        while True:
            began = time.monotonic()
            update = updates.next()  # waits for the cluster, whose calls have deadlines
            with self._lock:
                if not self._viewers:
                    self._thread = None
                    return
                viewers = list(self._viewers)
            if update is not None:
                for viewer in viewers:
                    viewer.give(update)
            self._over.wait(max(0.0, began + UPDATE_S - time.monotonic()))
            if self._over.is_set():
                with self._lock:
                    if self._viewers:  # another one came meanwhile
                        self._over.clear()


class _Updates:
    """One after the other, encoded."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._turn = 0
        self._count: int | None = None
        self._before: Activity | None = None
        self._changes = 0
        self._lines: deque[str] = deque(maxlen=LINES)
        self._began = time.monotonic()

    def next(self) -> bytes | None:
        """None: nothing has changed, and no figures are due."""
        try:
            found = self._read()
            if found is None:
                return None
        except ODMoEError:
            found = {"lost": "the main node is lost or does not answer"}  # its places and names are for the log
        except Exception:  # noqa: BLE001 - a defect, which must not end the feed
            _log.exception("the page gets no update")
            found = {"lost": "the cluster cannot be read; the server's log has the cause"}
        return event(found | {"t": round(time.monotonic() - self._began, 3)})

    def _read(self) -> dict[str, Any] | None:
        activity = self._cluster.activity(self._count)
        before, self._before = self._before, replace(activity, at_s=0.0, accesses=())
        self._count = activity.count
        are_due = self._turn % FIGURES_EVERY == 0
        if self._before == before and not are_due:
            self._turn += 1
            return None
        found = encode_activity(activity)
        if are_due:
            found |= encode_figures(self._cluster.figures())
            self._changes, lines = self._cluster.changes(self._changes)
            self._lines.extend(lines)
            found["lines"] = list(self._lines)
        self._turn += 1
        return found


async def feed_events(feed: ActivityFeed, service: Service, request: Request) -> AsyncGenerator[bytes, None]:
    """Until the viewer leaves or the service stops, which does not wait for it. Raises ApiError."""
    with feed.viewer() as viewer:
        while not service.stopping and not await request.is_disconnected():
            try:
                update = await asyncio.wait_for(viewer.updates.get(), LOOK_S)
            except TimeoutError:
                continue
            yield update
    yield event({"end": "the service is stopping"})
