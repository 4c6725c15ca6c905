"""Who was refused, counted by peer, and logged once in a while."""

from __future__ import annotations

import logging
from collections import Counter

from scheduler.errors import ODMoEError
from wire import runtime

QUIET_S = 10.0
"""How long a peer's failed attempts are taken together."""

LINE_S = 60.0
"""A peer's error is logged once in this time, however often it connects."""

MOST_LINES = 60
"""Of all peers, in that time."""

MAX_CALLERS = 1024
"""Peers that are remembered."""

log = logging.getLogger("wire")


class Refusals:
    """Logs refused peers with the error at WARNING, the same text of one host once in `LINE_S`, and of all hosts
    together `MOST_LINES` in that time. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._logged: dict[tuple[str, str], float] = {}
        self._unlogged = 0
        self._lock = runtime.Lock()

    def say(self, address: str, error: ODMoEError) -> None:
        """`address`: of the peer, as it is to be shown."""
        now, host = runtime.monotonic(), host_of(address)
        key = host, str(error)
        with self._lock:
            if host in self._counts or len(self._counts) < MAX_CALLERS:
                self._counts[host] += 1
            self._logged = {which: at for which, at in self._logged.items() if now - at < LINE_S}
            if key in self._logged or len(self._logged) >= MOST_LINES:
                self._unlogged += key not in self._logged
                return
            self._logged[key] = now
            count, others, self._unlogged = self._counts[host], self._unlogged, 0
        times = f" ({count} refused from there so far)" if count > 1 else ""
        times += f" ({others} of other hosts or for other reasons before were not logged)" if others else ""
        log.warning("%s: refused %s: %s%s", type(error).__name__, address, error, times)

    def counts(self) -> dict[str, int]:
        """Host -> how often it was refused."""
        with self._lock:
            return dict(self._counts)


def host_of(address: str) -> str:
    """Without the port, where it is as gRPC writes it ("ipv4:10.0.0.1:4000", "ipv6:[::1]:4000")."""
    before, found, rest = address.partition("ipv")
    return rest.partition(":")[2].rpartition(":")[0] if found else before
