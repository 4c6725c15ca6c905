"""The nodes on which faults are tried: three workers and a shadow, each in a process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from odmoe.settings.settings import Settings
from odmoe.stores import prepare_store
from support.faults.cluster import GrpcCluster
from support.faults.links import Relay
from support.faults.processes import NodeProcess

WORKERS = 3
FAULTS = {"worker": ("clock", "lie", "load", "compute", "slowness"), "shadow": ("clock", "predictions")}
"""What `NodeProcess.set` takes, by role."""


class Nodes:
    """Three workers and a shadow, each in a process."""

    def __init__(self, model: Path, store: Path | None = None) -> None:
        """`store`: where it is, or is made; None: in the cache."""
        self.store = prepare_store(str(model), str(store) if store else None, "float32")
        self.settings = Settings(model=str(model), workers=WORKERS, threads=1, shadow="fp16", loader="memory")
        self.workers = [self.node("worker", number) for number in range(WORKERS)]
        self.shadow = self.node("shadow", 0)
        self._stack = ExitStack()

    def node(self, role: Any, number: int, store: Path | None = None, **settings: Any) -> NodeProcess:
        return NodeProcess(role, number, self.settings.replace(**settings), store or self.store.path)

    @property
    def all(self) -> list[NodeProcess]:
        return [*self.workers, self.shadow]

    def cluster(self, shadow: bool = False, relays: list[Relay] | None = None, **settings: Any) -> GrpcCluster:
        """A main node; `mend` closes it. `relays`: links to the workers."""
        made = GrpcCluster(
            self.settings.replace(**settings),
            self.store,
            [end.address for end in relays or self.workers],
            self.shadow.address if shadow else None,
        )
        self._stack.callback(made.close)
        return made

    def relays(self) -> list[Relay]:
        """A link to each worker; `mend` closes them."""
        made = [Relay(worker.address) for worker in self.workers]
        for relay in made:
            self._stack.callback(relay.close)
        return made

    def later(self, call: Callable[[], object]) -> None:
        """Done by `mend`."""
        self._stack.callback(call)

    def mend(self) -> None:
        """Close what was made, and make every process sound."""
        self._stack.close()
        dead = []
        for node in self.all:
            node.thaw()
            if not node.process.is_alive():
                node.restart(wait=False)
                dead.append(node)
        for node in self.all:
            if node in dead:
                node.wait()
                continue
            for what in FAULTS["shadow" if node is self.shadow else "worker"]:
                node.set(what, None)

    def close(self) -> None:
        for node in self.all:
            node.close()
