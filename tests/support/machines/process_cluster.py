"""A cluster whose workers are processes that can be killed, as a service has one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from checkpoint.store import ExpertStore
from main_node.activity import Activity
from main_node.collect_figures import activity_of, figures_of
from main_node.figures import Figures
from main_node.shape import model_shape, with_context
from odmoe.api.model import Model, OpenedModel
from odmoe.settings.settings import Settings
from odmoe.text import load_tokenizer
from support.faults.cluster import GrpcCluster
from support.faults.processes import NodeProcess
from support.paths import DEMO


class ProcessCluster(GrpcCluster):
    """See `odmoe.clusters.base.Cluster`. The main node is in this process."""

    def __init__(self, settings: Settings, store: ExpertStore, workers: list[NodeProcess]) -> None:
        super().__init__(settings, store, [worker.address for worker in workers])
        self.nodes, self._opened = workers, store

    def generate(self, prompt: list[int], max_new_tokens: int, **how: Any) -> Any:  # type: ignore[override]
        return self.main.generate(prompt, max_new_tokens, **how)

    def rejoin(self, within_s: float, given_up: threading.Event) -> None:
        """The main node lives as long as this process."""

    def changes(self, since: int | None) -> tuple[int, list[str]]:
        return self.main.engine.peers.membership.since(since)

    def figures(self) -> Figures:
        return figures_of(self.main)

    def activity(self, since: int | None) -> Activity:
        return activity_of(self.main, since)

    def store(self) -> Any:
        return self._opened.path

    def serves(self) -> Settings:
        return self._settings


@contextmanager
def process_model(store: ExpertStore, **settings: Any) -> Iterator[tuple[Model, ProcessCluster]]:
    """The demo model on a cluster of worker processes without a shadow."""
    usual: dict[str, Any] = {"model": str(DEMO), "shadow": "none", "threads": 1, "workers": 3, "loader": "memory"}
    chosen = Settings(**(usual | settings))
    with ExitStack() as stack:
        workers = [NodeProcess("worker", number, chosen, store.path) for number in range(chosen.workers)]
        for worker in workers:
            stack.callback(worker.close)
        context = with_context(model_shape(store), chosen.ctx_size).context
        cluster = ProcessCluster(chosen, store, workers)
        opened = OpenedModel(chosen, store, load_tokenizer(store.dense), context)
        yield stack.enter_context(Model(opened, cluster)), cluster  # type: ignore[arg-type]
