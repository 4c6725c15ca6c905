"""The head of a cluster file, asked over ssh: what its nodes are doing, and to start or stop them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import scheduler.errors
from odmoe.machines.cluster_file import ClusterFile
from odmoe.machines.ssh import Ssh
from odmoe.settings.settings import Settings
from scheduler.errors import ClusterError, HostError, LaunchError, LinkError, ODMoEError

AT_HEAD = ". ~/odmoe/code/env.sh && exec python -m odmoe.cli.at_head"
HERE_ONLY = frozenset({"cluster", "model", "store", "tls", "secret", "host", "node_port"})
"""Settings whose values mean something on the machine where they were said."""
IDLE_S = 60.0
"""Longest silence of a head that was told to start its nodes: it says something every second once it is there."""

HostStates = dict[str, Any]


class Head:
    def __init__(self, ssh: Ssh, cluster: ClusterFile) -> None:
        self._ssh, self._host = ssh, cluster.main

    def status(self, deadline_s: float) -> HostStates:
        """Raises HostError, ClusterError: it does not answer, or no Ray runs there."""
        found: HostStates = {}
        for found in self._asked({"do": "status"}, time.monotonic() + deadline_s, deadline_s):  # noqa: B007 - the last
            pass
        if not found:
            raise LaunchError(f"{self._host.name} ({self._host.address}): it said nothing of its nodes; see there")
        return found

    def stop(self, deadline_s: float) -> None:
        """The nodes; Ray goes on. Raises HostError, ClusterError."""
        for _ in self._asked({"do": "stop"}, time.monotonic() + deadline_s, deadline_s):
            pass

    def start(self, settings: Settings, store: str, until: float) -> Iterator[HostStates]:
        """What it says while the nodes start, the last when they are ready. `until`: on the monotonic clock.

        Raises the error of our tree that stopped it, LinkError: nothing was heard, or not ready by `until`.
        """
        given = settings.model_dump(mode="json", exclude_unset=True)
        sent = {name: value for name, value in given.items() if name not in HERE_ONLY}
        yield from self._asked({"do": "start", "settings": sent, "store": store}, until, IDLE_S)

    def _asked(self, request: dict[str, Any], until: float, idle_s: float) -> Iterator[HostStates]:
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
    """An exit code says less than the error that came before it."""
    try:
        yield
    except (HostError, LinkError):
        if failure():
            raise failure() from None
        raise


def _snapshot(line: str) -> HostStates | None:
    """None: something else, that a library has printed."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and isinstance(found.get("hosts"), list):
            return found
    return None


def error_of(facts: dict[str, Any]) -> ODMoEError:
    """The error that the head has met, as one of ours."""
    kind = getattr(scheduler.errors, str(facts.get("type")), None)
    if isinstance(kind, type) and issubclass(kind, ODMoEError):
        return kind(str(facts.get("message")))
    return ClusterError(str(facts.get("message")))
