"""Models and clusters of an experiment: opened, kept while they are asked for, and asked."""

from __future__ import annotations

import argparse
from typing import Any

PREDICTED_S = 60.0


class KeptCluster:
    """A cluster that stays up for as long as its settings are asked for. Closed with the `with` that holds it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._settings: Any = None
        self._cluster: Any = None

    def __enter__(self) -> KeptCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Of no cluster: nothing."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()

    def cluster(self, settings: Any, warm: list[int] | None = None) -> Any:
        """Started with `settings`, an odmoe.settings.settings.Settings; another one is closed first. A new one answers
        the prompt `warm` before anything is measured, if there is one."""
        from odmoe.start import start_cluster

        if self._cluster is None or settings != self._settings:
            self.close()
            self._cluster, self._settings = start_cluster(settings, self._store), settings
            if warm is not None:
                answer(self._cluster, warm, 4)
        return self._cluster


def open_model(args: argparse.Namespace, dtype: str) -> tuple[Any, Any]:
    """The model's store and tokenizer, of a process made ready for both."""
    from odmoe.clusters.process import prepare_libraries, prepare_process
    from odmoe.settings.settings import Settings
    from odmoe.stores import prepare_store
    from odmoe.text import load_tokenizer

    prepare_process()
    prepare_libraries(Settings(model=args.model).threads_a_node)
    store = prepare_store(args.model, None, dtype)
    return store, load_tokenizer(store.dense)


def answer(cluster: Any, prompt: list[int], tokens: int, **how: Any) -> Any:
    """The report of one answer; end of sequence is heeded only if `ignore_eos=False`."""
    *_, last = cluster.generate(prompt, tokens, **{"ignore_eos": True, **how})
    return last.report


def predicted(cluster: Any, prompt: list[int], tokens: int, **how: Any) -> Any:
    """As `answer`, of a cluster in this process, whose main node waits for the shadow after each token: without that a
    shadow that is slower than the main node, as on two cores, is left behind, and what it says too late is lost."""
    steps = cluster.generate(prompt, tokens, **{"ignore_eos": True, **how})
    for step in steps:
        decoding = step.token_id is not None and step.finish is None
        if decoding and not cluster.main.engine.wait_for_predictions(steps.number, PREDICTED_S):
            raise SystemExit(f"the shadow's predictions of a token did not come within {PREDICTED_S:.0f} s")
    if step.report.unpredicted:
        raise SystemExit("the shadow's predictions of the last token did not come in time; the same command goes on")
    return step.report
