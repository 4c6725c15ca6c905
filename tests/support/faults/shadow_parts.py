"""A shadow whose layers are in several processes, each of which can be killed and frozen."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from checkpoint.store import ExpertStore
from odmoe.clusters.credentials import credentials
from odmoe.clusters.nodes import make_shadow_part
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.settings import Settings
from support.faults.processes import ForkedProcess
from wire.rpc.client import connect
from wire.rpc.server import GrpcServer


class PartProcess(ForkedProcess):
    """A part of a shadow. Started again, it keeps its address. `others`: those of the later parts, for the first."""

    def __init__(self, number: int, parts: int, settings: Settings, store: Path, others: list[str]) -> None:
        super().__init__(_serve, number, parts, settings, store, others)
        self.address = str(self.hear())
        self._args = (*self._args, int(self.address.rpartition(":")[2]))

    def restart(self) -> None:
        self.close()
        self.start()
        self.hear()


class DividedShadow:
    def __init__(self, parts: int, settings: Settings, store: Path) -> None:
        later = [PartProcess(number, parts, settings, store, []) for number in range(1, parts)]
        self.parts = [PartProcess(0, parts, settings, store, [part.address for part in later]), *later]

    @property
    def address(self) -> str:
        return self.parts[0].address

    def close(self) -> None:
        for part in self.parts:
            part.close()


def _serve(
    pipe: Connection, number: int, parts: int, settings: Settings, path: Path, others: list[str], port: int = 0
) -> None:
    prepare_process()
    prepare_libraries(settings.threads_a_node)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    secret, identity = credentials(settings)
    node: Any = make_shadow_part(settings, ExpertStore.open(path), number, (1,) * parts)
    if not number:
        node.model.connects = [
            partial(connect, address, "stage", secret=secret, identity=identity, deadline_s=1.0) for address in others
        ]
    server = GrpcServer(node, "stage" if number else "shadow", port=port, secret=secret, identity=identity)
    pipe.send(server.address)
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(0)
