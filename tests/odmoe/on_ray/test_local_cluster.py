"""The one start of Ray in the fast suite: nodes in processes of their own answer as one process does.

Whoever is killed, frozen, cancelled or interrupted: tests/system/on_ray. The cluster is closed by the last test.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from main_node.answer import collect
from odmoe.clusters.base import Cluster
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.on_ray.cluster import RayCluster
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from scheduler.errors import PromptError
from scheduler.eventlog.recording import read_recording
from scheduler.eventlog.replay import replay
from scheduler.files import write_whole
from support.machines.processes import MARK, marked, wait_until_gone

TOKENS = 16
WORKERS = 2
COMMON: dict[str, Any] = {
    "model": "demo",
    "workers": WORKERS,
    "shadow": "nf4",
    "threads": 1,
    "mini_batch": 4096,
    "departure": "late",  # at once, recall depends on when alignments come
}


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """What every process of the cluster carries in its environment."""
    value = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, value)
        yield value


@pytest.fixture(scope="module")
def cluster(mark: str, demo_store: Callable[[str], Any]) -> Iterator[RayCluster]:
    made = start_cluster(Settings(cluster="local", record="kept", **COMMON), demo_store("float32"))
    assert isinstance(made, RayCluster)
    yield made
    made.close()


def report_of(cluster: Cluster, prompt: list[int]) -> Any:
    *_, last = cluster.generate(prompt, TOKENS, ignore_eos=True)
    return last.report


def test_tokens_and_recall_as_in_one_process(cluster: RayCluster, demo_store: Any, reference: Any) -> None:
    expected = reference("float32", 0, TOKENS)
    embedded = EmbeddedCluster(Settings(**COMMON), demo_store("float32"))
    try:
        near = report_of(embedded, expected.prompt)
    finally:
        embedded.close()
    tokens, report = collect(cluster.generate(expected.prompt, TOKENS, ignore_eos=True))
    assert tokens == expected.tokens
    assert report.token_ids == near.token_ids == expected.tokens
    assert report.recall_by_token == near.recall_by_token
    assert report.recall == near.recall > 0.9
    one_expert = demo_store("float32").manifest.blob_bytes
    assert report.memory_bytes["workers"] == [one_expert] * WORKERS
    assert report.memory_bytes["main"] == near.memory_bytes["main"]
    assert report.memory_bytes["shadow"] > 1 << 20
    assert report.resident_experts_max == [1] * WORKERS


def test_figures_come_over_ray(cluster: RayCluster, reference: Any) -> None:
    before = cluster.figures()
    reports = [report_of(cluster, reference("float32", number, TOKENS).prompt) for number in (0, 1)]
    after = cluster.figures()
    for name in ("prompt_tokens", "named", "hits"):
        gained = getattr(after.totals, name) - getattr(before.totals, name)
        assert gained == sum(getattr(report, name) for report in reports), name
    assert after.totals.answer_tokens - before.totals.answer_tokens == 2 * TOKENS
    assert (after.totals.predicted - before.totals.predicted) / (
        after.totals.activated - before.totals.activated
    ) == pytest.approx(sum(report.recall for report in reports) / 2)
    nodes = {node.name: node for node in after.nodes}
    assert list(nodes) == ["main", "worker 0", "worker 1", "shadow"]
    assert all(node.up for node in after.nodes)
    assert nodes["worker 1"].memory_bytes == reports[-1].memory_bytes["workers"][1]
    assert nodes["worker 1"].bytes_loaded > 0
    assert dict(nodes["shadow"].stream_bytes)["from_shadow"] > 0


def test_every_node_is_a_process(cluster: RayCluster) -> None:
    pids = [cluster.pid(name) for name in ("main node", "shadow", *(f"worker {n}" for n in range(WORKERS)))]
    assert len({os.getpid(), *pids}) == 3 + WORKERS
    for pid in pids:
        os.kill(pid, 0)


def test_errors_come_out_as_themselves(cluster: RayCluster) -> None:
    for prompt in ([], [5] * 1024):
        with pytest.raises(PromptError):
            next(cluster.generate(prompt, 4))


def test_its_log_replays_to_the_same_commands(cluster: RayCluster, tmp_path: Any) -> None:
    write_whole(tmp_path / "log", cluster.recording())
    recording = read_recording(tmp_path / "log")
    done = replay(recording)
    assert done.events > 300
    assert str(done) == f"{len(recording.events)} events, {done.commands} commands: identical, in order"


def test_after_close_nothing_is_left(cluster: RayCluster, mark: str) -> None:
    assert any("raylet" in line for line in marked(mark))
    cluster.close()
    wait_until_gone(mark)
    cluster.close()
