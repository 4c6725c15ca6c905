"""One cluster of Ray in a process: a second one is refused by name, and the first goes on. No Ray is started."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from odmoe.clusters.process import held_ray
from odmoe.on_ray.calls import HeldAnswers, RayAnswer
from odmoe.on_ray.cluster import RayCluster
from odmoe.settings.settings import Settings
from odmoe.start import start_cluster
from scheduler.errors import LaunchError
from support.machines.pretended_ray import MadeError, PretendedRay

JOINED = Settings(model="m", cluster="auto", workers=4)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    (tmp_path / "manifest.json").touch()
    return SimpleNamespace(path=tmp_path, manifest=SimpleNamespace(model_digest="f", dtype="float32"))


@pytest.fixture
def shutdowns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    PretendedRay(monkeypatch)
    found: list[str] = []
    monkeypatch.setattr(ray, "shutdown", lambda: found.append("shutdown"))
    return found


def test_a_second_cluster_is_refused_and_the_first_goes_on(store: Any, shutdowns: list[str]) -> None:
    with held_ray("local"), pytest.raises(LaunchError, match="uses Ray for another model"):
        start_cluster(JOINED, store)
    assert shutdowns == []


def test_a_ray_that_the_program_uses_itself_is_left_alone(
    store: Any, shutdowns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match="connected to Ray already"):
        start_cluster(JOINED, store)
    assert shutdowns == []


def test_a_start_that_fails_makes_room_for_the_next(store: Any, shutdowns: list[str]) -> None:
    before = dict(os.environ)
    for _ in range(2):
        with pytest.raises(MadeError):
            start_cluster(JOINED, store)
        assert dict(os.environ) == before


def test_a_cluster_that_was_closed_leaves_the_next_ones_ray_alone(
    shutdowns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(RayCluster, "_connect", lambda self, settings: None)
    monkeypatch.setattr(RayCluster, "_attach", lambda self, settings, store: True)
    cluster = RayCluster(JOINED, None, at_end=lambda: ended.append("end"))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    cluster.close()
    cluster.close()
    assert (shutdowns, ended) == (["shutdown"], ["end"])


def test_an_answer_is_given_up_after_its_cluster_too(shutdowns: list[str]) -> None:
    main: Any = SimpleNamespace()  # whatever is asked of it fails
    answer = RayAnswer(main, "key", {}, HeldAnswers())
    answer._pending = object()
    answer.cancel()
    answer.close()
    assert list(answer) == []


@pytest.mark.slow
def test_a_ray_that_does_not_start_in_time_is_named(
    store: Any, shutdowns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(**how: Any) -> None:
        raise Exception("The current node timed out during startup.\nSee its logs.")  # as Ray does

    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr("odmoe.on_ray.cluster.kill_half_started", lambda folder: None)
    with pytest.raises(LaunchError, match="does not start on this machine: The current node timed out during startup"):
        start_cluster(Settings(model="m", cluster="local", workers=1), store)
