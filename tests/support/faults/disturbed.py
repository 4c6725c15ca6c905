"""Nodes in processes of their own, as `odmoe chaos` disturbs them: their links can be cut, their stores damaged."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from odmoe.chaos.faults import MAIN, SHADOW
from odmoe.chaos.load import Load
from odmoe.chaos.spoil import LINK, STORE, during
from odmoe.chaos.usage import Usage, usage_of
from support.faults.links import Relay
from support.faults.nodes import Nodes
from support.faults.processes import NodeProcess, Supervisor


class DisturbedNodes:
    """Three workers, each with a store of its own in `folder`, and the shadow; killed ones are started again. The main
    node is in this process."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.clients: Load | None = None
        self._nodes: dict[str, NodeProcess] = {SHADOW: nodes.shadow}
        self._links: dict[str, Relay] = {}
        self._stores: dict[str, Path] = {}
        for number in range(len(nodes.workers)):
            name = f"worker {number}"
            self._stores[name] = folder / name
            shutil.copytree(nodes.store.path, folder / name)
            self._nodes[name] = nodes.node("worker", number, folder / name, loader="disk")
            self._links[name] = Relay(self._nodes[name].address)
        self._supervisor = Supervisor(list(self._nodes.values()))
        sound, nodes.workers = nodes.workers, [self._nodes[name] for name in self._links]
        self.cluster = nodes.cluster(shadow=True, relays=list(self._links.values()))
        nodes.workers = sound
        nodes.later(self._close)

    def _close(self) -> None:
        self._supervisor.close()
        for name, link in self._links.items():
            link.close()
            self._nodes[name].close()

    def workers(self) -> list[str]:
        return list(self._links)

    def kill(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self._kill(name)]

    def _kill(self, name: str) -> bool:
        try:
            os.kill(self._nodes[name].pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def spoil(self, names: Sequence[str], what: str, seconds: float) -> list[str]:
        for name in names:
            act = self._cut if what == LINK else partial(self._spoil, what)
            threading.Thread(target=act, args=(name, seconds), daemon=True).start()
        return list(names)

    def _cut(self, name: str, seconds: float) -> None:
        self._links[name].cut()
        time.sleep(seconds)
        self._links[name].mend()

    def _spoil(self, what: str, name: str, seconds: float) -> None:
        during(what, str(self._stores[name] if what == STORE else self._nodes[name].pid), seconds)

    def leave(self) -> int:
        return self.clients.leave() if self.clients else 0

    def missing(self) -> list[str]:
        peers = self.cluster.main.engine.peers
        away = [f"worker {number}" for number in range(len(self._links)) if number not in peers.workers]
        return away if peers.shadow is not None else [*away, SHADOW]

    def mend(self) -> None:
        """The main node brings them back itself."""

    def usage(self) -> dict[str, Usage]:
        found = {name: usage_of(node.pid) for name, node in self._nodes.items()} | {MAIN: usage_of(os.getpid())}
        return {name: one for name, one in found.items() if one is not None}
