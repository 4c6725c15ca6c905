"""A main node in a process of its own, which can be frozen and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from checkpoint.store import ExpertStore
from main_node.answer import Step
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.settings.settings import Settings
from scheduler.errors import ODMoEError
from support.faults.cluster import GrpcCluster
from support.faults.processes import ForkedProcess


class MainProcess(ForkedProcess):
    """Answers one request at a time, as `GrpcCluster` does."""

    def __init__(self, settings: Settings, store: Path, workers: list[str], shadow: str | None = None) -> None:
        self._clock, theirs = Pipe()
        super().__init__(_serve, settings, store, workers, shadow, theirs)
        self.hear()

    def generate(self, prompt: list[int], count: int, ignore_eos: bool = True) -> Iterator[Step]:
        self.pipe.send((prompt, count, ignore_eos))
        while isinstance(told := self.hear(), Step):
            yield told
        if told is not None:
            raise told

    def jump(self, seconds: float) -> None:
        """Its wall clock, by so much from the right time. Takes effect within an answer."""
        self._clock.send(seconds)


def _serve(
    pipe: Connection, settings: Settings, path: Path, workers: list[str], shadow: str | None, clock: Connection
) -> None:
    prepare_process()
    prepare_libraries(settings.threads_a_node)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cluster = GrpcCluster(settings, ExpertStore.open(path), workers, shadow)
    threading.Thread(target=_set_clock, args=(clock,), daemon=True).start()
    pipe.send(None)
    with contextlib.suppress(EOFError, OSError):
        while True:
            _answer(pipe, cluster, *pipe.recv())
    os._exit(0)


def _set_clock(clock: Connection) -> None:
    real = time.time
    with contextlib.suppress(EOFError, OSError):
        while True:
            off_s = clock.recv()
            time.time = lambda off_s=off_s: real() + off_s  # type: ignore[misc]


def _answer(pipe: Connection, cluster: Any, *asked: Any) -> None:
    try:
        for step in cluster.generate(*asked):
            pipe.send(step)
    except ODMoEError as error:
        pipe.send(error)
        return
    pipe.send(None)
