"""A main node whose workers and shadow are at given addresses, and what a client sees of an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from checkpoint.store import ExpertStore
from main_node.answer import Step
from main_node.engine.reconnector import Reconnector
from odmoe.clusters.configuration import configure
from odmoe.clusters.credentials import credentials
from odmoe.clusters.nodes import make_engine, make_main
from odmoe.settings.settings import Settings
from scheduler.errors import LinkError, ODMoEError, OtherMainNodeError
from wire.base import Role
from wire.rpc.client import connect

CONNECT_S, JOIN_S = 2.0, 5.0
"""Longest waits of one attempt to join a node: for its stream, and for its answer."""
GONE_S, TRIES = 10.0, 3
"""Longest time for the nodes of the cluster before to notice its end; attempts to reach a node."""


class GrpcCluster:
    """The main node in this process. Lost nodes are connected again."""

    def __init__(
        self, settings: Settings, store: ExpertStore, workers: Sequence[str], shadow: str | None = None
    ) -> None:
        """`workers`, `shadow`: their addresses."""
        configuration = configure(settings, store)
        self._settings = settings
        self._addresses: dict[Role, Sequence[str]] = {"worker": workers, "shadow": [shadow] if shadow else []}
        engine = make_engine(settings, store, configuration)
        self.reconnector = Reconnector(self._join, hurried=engine.waiting, wasted_s=engine.peers.wasted_s)
        try:
            self.main = make_main(settings, store, engine, None)
            engine.peers.on_lost = self.reconnector.on_lost
            for number in range(len(workers)):
                self._join_first("worker", number)
            if shadow:
                self._join_first("shadow", 0)
        except BaseException:
            self.reconnector.close()
            engine.close()
            raise

    def _join_first(self, kind: Role, number: int) -> None:
        """On a busy machine a node may be lost while others join, and the stream of the cluster before may last."""
        end, tries = time.monotonic() + GONE_S, TRIES
        while True:
            try:
                return self._join(kind, number)
            except OtherMainNodeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
            except LinkError:
                tries -= 1
                if not tries:
                    raise

    def _join(self, kind: Role, number: int) -> None:
        peers = self.main.engine.peers
        secret, identity = credentials(self._settings)
        address = self._addresses[kind][number]
        to = partial(connect, address, kind, secret=secret, deadline_s=CONNECT_S, identity=identity)
        if kind == "worker":
            peers.add_worker(number, to, JOIN_S)
        else:
            peers.add_shadow(to, JOIN_S)

    def generate(self, prompt: list[int], count: int, ignore_eos: bool = True) -> Iterable[Step]:
        return self.main.generate(prompt, count, ignore_eos=ignore_eos)

    @property
    def lost(self) -> list[str]:
        """Nodes that were lost, in order."""
        return list(self.main.engine.peers.lost)

    def close(self) -> None:
        self.reconnector.close(CONNECT_S + JOIN_S)  # a later attempt would take a worker from the next main node
        self.main.close()


@dataclass
class Seen:
    """What a client sees of one answer."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each token came, and at last when the answer ended: seconds of the monotonic clock."""
    report: Any = None
    error: ODMoEError | None = None

    @property
    def longest_gap_s(self) -> float:
        """Between two tokens, or the last one and an error."""
        times = self.times if self.error else self.times[:-1]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    @property
    def held_back_s(self) -> float:
        """From the last token but one to the last."""
        return self.times[-2] - self.times[-3]

    @property
    def calls_itself_exact(self) -> bool:
        return bool(self.report and self.report.exact)


def ask(cluster: Any, prompt: list[int], count: int, acts: Mapping[int, Callable[[], object]] | None = None) -> Seen:
    """One answer. `acts`: what is done, by the number of tokens that have come."""
    seen = Seen()
    try:
        for step in cluster.generate(prompt, count, ignore_eos=True):
            if step.token_id is not None:
                seen.tokens.append(step.token_id)
                seen.times.append(time.monotonic())
                if acts and len(seen.tokens) in acts:
                    acts[len(seen.tokens)]()
            seen.report = step.report or seen.report
    except ODMoEError as error:
        seen.error = error
    seen.times.append(time.monotonic())
    return seen
