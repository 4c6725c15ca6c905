"""Lost nodes are named while answers are under way."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from main_node.answer import Step
from odmoe.clusters import node_watch
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.clusters.node_watch import NodeWatch
from scheduler.errors import LinkError, WrongOutputError
from support.machines.cli import CommandLine

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watch, "LOOK_S", 0.01)


def test_it_asks_for_what_it_has_not_heard() -> None:
    """Nothing that was lost before the answer, and nothing twice; a main node that is away is asked again."""
    asked: list[int | None] = []
    told, ended = [], threading.Event()

    def changes(since: int | None) -> tuple[int, list[str]]:
        asked.append(since)
        if len(asked) == 2:
            raise LinkError("the main node is not there just now")
        if len(asked) == 3:
            return 9, ["worker 1 is lost", "worker 1 is back"]
        if len(asked) > 4:
            ended.set()
        return max(7, since or 0), []

    cluster: Any = SimpleNamespace(changes=changes)
    with NodeWatch(cluster, told.append):
        assert ended.wait(WAIT_S)
    assert asked[:5] == [None, 7, 7, 9, 9]
    assert told == ["worker 1 is lost", "worker 1 is back"]


def test_standard_error_names_a_lost_worker_at_once(
    cli: CommandLine, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the answer ends, and not on standard output."""
    told, looked = threading.Event(), threading.Event()
    notify, take, look = NodeWatch.__init__, EmbeddedCluster.generate, EmbeddedCluster.changes

    def changes(self: EmbeddedCluster, since: int | None) -> tuple[int, list[str]]:
        found = look(self, since)
        looked.set()
        return found

    def watch(self: NodeWatch, cluster: Any, say: Any) -> None:
        notify(self, cluster, lambda line: (say(line), told.set())[0])

    def generate(self: EmbeddedCluster, *args: Any, **how: Any) -> Any:
        peers = self.main.engine.peers
        steps = take(self, *args, **how)

        class Answer:
            tokens = 0

            def __iter__(self) -> Answer:
                return self

            def __next__(self) -> Step:
                self.tokens += 1
                if self.tokens == 3:
                    assert looked.wait(WAIT_S)
                    peers.drop(1, WrongOutputError("worker 1 gave wrong outputs"))
                    assert told.wait(WAIT_S)
                return next(steps)

            def close(self) -> None:
                steps.close()

        return Answer()

    monkeypatch.setattr(NodeWatch, "__init__", watch)
    monkeypatch.setattr(EmbeddedCluster, "generate", generate)
    monkeypatch.setattr(EmbeddedCluster, "changes", changes)
    little = ["--shadow", "none", "--workers", "3", "--threads", "1"]
    answer = cli("generate", "-m", str(demo), "-n", "8", *little, "HAMLET")
    assert answer.code == 0
    lines = answer.err.splitlines()
    assert lines[0] == "worker 1 is lost, 2 left: worker 1 gave wrong outputs"
    assert "worker 1 is lost" not in answer.out
    assert any(line.startswith("  lost ") for line in lines)
