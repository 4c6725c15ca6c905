"""Whole clusters in which a worker lies, or none does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkpoint.store import ExpertStore
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from scheduler.errors import AnswerWithdrawnError
from support.cases import slow_except
from support.nodes.engine_world import WAIT_S, becomes_idle

pytestmark = pytest.mark.timeout(120)
TOKENS = 8


@pytest.fixture
def cluster_with(demo_store: Callable[[str], ExpertStore]) -> Iterator[Callable[..., EmbeddedCluster]]:
    made: list[EmbeddedCluster] = []

    def build(dtype: str = "float32", **given: Any) -> EmbeddedCluster:
        settings = Settings(**({"model": "demo", "shadow": "none", "workers": 4, "threads": 1} | given))
        made.append(EmbeddedCluster(settings, demo_store(dtype)))
        return made[-1]

    yield build
    for cluster in made:
        cluster.close()


LIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "scaled by 1.01": lambda output: output * 1.01,
    "rows from elsewhere": lambda output: output.roll(1, -1),
}


@pytest.mark.parametrize(
    ("lie", "dtype"),
    [
        *slow_except((), [("zeros", "float32"), ("scaled by 1.01", "float32"), ("rows from elsewhere", "bfloat16")]),
        ("scaled by 1.01", "bfloat16"),
    ],
)
def test_a_lying_worker_of_a_cluster_is_named(lie: str, dtype: str, cluster_with: Any, monkeypatch: Any) -> None:
    cluster = cluster_with(dtype, audit=0.05)
    liar = cluster._nodes[2]
    run = liar.run
    monkeypatch.setattr(liar, "run", lambda *of: LIES[lie](run(*of)))
    found = 0
    with pytest.raises(AnswerWithdrawnError, match=r"worker 2 \(process \d+ on .*\) gives wrong outputs: that of"):
        for found, _ in enumerate(cluster.generate([1, 2, 3], 200, ignore_eos=True)):  # noqa: B007
            pass
    assert found < 200
    assert sorted(cluster.main.engine.peers.workers) == [0, 1, 3]
    report = list(cluster.generate([1, 2, 3], 4))[-1].report
    assert report is not None
    assert report.exact
    assert [name.partition(":")[0] for name in report.cluster.suspects] == ["worker 2"]


@pytest.mark.parametrize(
    "given",
    [
        {},
        *slow_except(
            (),
            [
                {"residency": "lru", "slots": 4, "audit": 0.2},
                {"dtype": "bfloat16", "audit": 0.5},
                {"workers": 1, "audit": 1},
                {"workers": 1},
                {"profile": "rtx3090-1gbe", "audit": 0.2},
            ],
        ),
    ],
    ids=str,
)
def test_an_honest_cluster_marks_nobody_and_stays_exact(given: dict[str, Any], cluster_with: Any) -> None:
    cluster = cluster_with(given.get("dtype", "float32"), **{k: v for k, v in given.items() if k != "dtype"})
    for _ in range(2):
        report = list(cluster.generate([1, 2, 3], TOKENS, ignore_eos=True))[-1].report
        assert report is not None
        assert (report.cluster.suspects, report.doubted, report.cluster.lost) == ([], False, [])
    assert report.cluster.computations >= 2 * 8 * TOKENS
    if "audit" in given:
        assert report.cluster.audits > 0
    end = time.monotonic() + WAIT_S
    while not cluster.main.engine.idle() and time.monotonic() < end:  # an audit may outlast its answer
        time.sleep(0.001)
    assert becomes_idle(cluster.main.engine)


def test_no_token_follows_from_an_output_that_is_not_finite_twice(cluster_with: Any, monkeypatch: Any) -> None:
    """A norm turns enormous rows into zeros, and so the logits are finite: the answer waits for the main node's own."""
    cluster = cluster_with(workers=1)
    liar, arbiter = cluster._nodes[0], cluster.main.engine.checks._arbiter
    run, compute, lies = liar.run, arbiter.compute, []

    def later(*case: Any) -> torch.Tensor:
        time.sleep(0.3)
        return compute(*case)

    monkeypatch.setattr(liar, "run", lambda *of: torch.full_like(run(*of), 1e25) if lies else run(*of))
    monkeypatch.setattr(arbiter, "compute", later)
    expected = [step.token_id for step in cluster.generate([1, 2, 3], TOKENS, ignore_eos=True)]
    seen: list[int | None] = []

    def read() -> None:
        for step in cluster.generate([1, 2, 3], TOKENS, ignore_eos=True):
            seen.append(step.token_id)
            lies.append(True)

    with pytest.raises(AnswerWithdrawnError, match="gives wrong outputs: that of expert"):
        read()
    assert seen == expected[: len(seen)]
