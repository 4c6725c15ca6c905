"""What the nodes of a cluster are made with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from odmoe.clusters.nodes import make_engine
from odmoe.settings.settings import Settings
from scheduler.core.groups import RoundRobin
from scheduler.types import ModelShape


@pytest.mark.parametrize(
    ("given", "group"),
    [
        ({"cluster": "auto"}, 10),
        ({"cluster": "auto", "group_size": 12}, 12),
        ({"cluster": "auto", "workers": 4}, 4),
        ({"cluster": "local"}, 8),
        ({"cluster": "local", "workers": 12}, 10),
    ],
)
def test_groups_of_a_model_of_top_10(given: dict[str, Any], group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many workers a Ray cluster has is not known beforehand: the default number bounds nothing there."""
    monkeypatch.setattr("odmoe.clusters.nodes.model_shape", lambda store: ModelShape(layers=(0,), experts=64, top_k=10))
    store: Any = SimpleNamespace(manifest=SimpleNamespace(fingerprint="f", dtype="float32"))
    chosen: list[int] = []
    monkeypatch.setattr("scheduler.build.RoundRobin", lambda size: chosen.append(size) or RoundRobin(size))
    make_engine(Settings(model="m", shadow="none", **given), store).close()
    assert chosen == [group]
