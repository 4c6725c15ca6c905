"""Talks to a cluster's head over ssh: states of the nodes, start and stop."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import scheduler.errors
from odmoe.machines.cluster_file import ClusterFile
from odmoe.machines.ssh import Ssh
from odmoe.settings.derived import HERE_ONLY
from odmoe.settings.settings import Settings
from scheduler.errors import ClusterError, HostError, LaunchError, LinkError, ODMoEError

AT_HEAD = ". ~/odmoe/code/env.sh && exec python -m odmoe.at_head"
STOP, HERE = "stop\n", "here\n"
"""Lines for a service on the head: a signal came to the launching machine; it is still there."""
KEYS = "keys "
"""Begins a line with API keys that were read again, as JSON."""
HERE_S, SILENT_S = 10.0, 60.0
"""Between two of the latter, and the longest silence: the service then ends, since nobody can reach it."""
IDLE_S = 60.0
"""Longest silence of a head that starts its nodes; it sends a line every second."""

HostStates = dict[str, Any]
NODE_UNKNOWN: dict[str, Any] = {
    "store": "",
    "slots": None,
    "device": None,
    "loader": None,
    "load_bytes_per_s": None,
    "round_trip_s": None,
    "memory_bytes": None,
    "heartbeat_s": None,
}
"""What the row of a host has for a node that has not answered yet."""


class Head:
    def __init__(self, ssh: Ssh, cluster: ClusterFile) -> None:
        self._ssh, self._host = ssh, cluster.main

    def status(self, deadline_s: float) -> HostStates:
        """The states of all hosts. Raises HostError, or ClusterError if it does not answer or no Ray runs there."""
        found: HostStates = {}
        for found in self._ask({"do": "status"}, time.monotonic() + deadline_s, deadline_s):  # noqa: B007 - the last
            pass
        if not found:
            raise LaunchError(f"{self._host.name} ({self._host.address}): it sent no state of its nodes; see its logs")
        return found

    def stop(self, deadline_s: float) -> None:
        """End the nodes; Ray keeps running. Raises HostError, ClusterError."""
        for _ in self._ask({"do": "stop"}, time.monotonic() + deadline_s, deadline_s):
            pass

    def start(self, settings: Settings, store: str, until: float) -> Iterator[HostStates]:
        """Start the nodes. Yields states meanwhile, the last when all are ready. `until` is on the monotonic clock.

        Raises the error that stopped the head, or LinkError if it is silent or the nodes are not ready by `until`.
        """
        given = settings.model_dump(mode="json", exclude_unset=True)
        sent = {name: value for name, value in given.items() if name not in HERE_ONLY}
        yield from self._ask({"do": "start", "settings": sent, "store": store}, until, IDLE_S)

    def _ask(self, request: dict[str, Any], until: float, idle_s: float) -> Iterator[HostStates]:
        remote = self._ssh.start(self._host, AT_HEAD)
        failure: ODMoEError | None = None
        try:
            remote.send(json.dumps(request) + "\n")
            with _after(lambda: failure):
                for line in remote.lines(idle_s, until):
                    found = _snapshot(line)
                    if found is None:
                        continue
                    yield found
                    if error := found.get("error"):
                        failure = error_of(error)
            if failure:
                raise failure
        finally:
            remote.close()


@contextlib.contextmanager
def _after(failure: Any) -> Iterator[None]:
    """Raise the head's own error in place of that of its exit code."""
    try:
        yield
    except (HostError, LinkError):
        if failure():
            raise failure() from None
        raise


def _snapshot(line: str) -> HostStates | None:
    """The states in a line of output; None for a line that a library has printed."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and isinstance(found.get("hosts"), list):
            return found
    return None


def error_of(facts: dict[str, Any]) -> ODMoEError:
    """The head's error as an exception of the same class."""
    kind = getattr(scheduler.errors, str(facts.get("type")), None)
    if isinstance(kind, type) and issubclass(kind, ODMoEError):
        return kind(str(facts.get("message")))
    return ClusterError(str(facts.get("message")))
