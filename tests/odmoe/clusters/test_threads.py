"""How many threads a node gets where nobody says: one, where experts are small. Shared threads: tests/odmoe/api."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odmoe.clusters import threads
from odmoe.clusters.threads import SharedThreads, with_threads
from odmoe.settings import settings as settings_module
from odmoe.settings.settings import Settings
from scheduler.errors import ClusterError
from support.machines.cli import CommandLine


@pytest.fixture(autouse=True)
def no_open_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests before have left open."""
    monkeypatch.setattr(threads, "SHARED_THREADS", SharedThreads())


@pytest.mark.parametrize(
    ("expert_bytes", "given", "expected"),
    [
        (2 << 20, {}, 1),
        ((2 << 20) + 1, {}, 4),
        (1, {"threads": 3}, 3),
        (1, {"cluster": "local"}, 4),
        (1, {"profile": "rtx3090-pcie3"}, 4),
    ],
)
def test_one_for_small_experts(
    expert_bytes: int, given: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_module, "available_cores", lambda: 8 if given.get("cluster") else 4)
    store: Any = SimpleNamespace(manifest=SimpleNamespace(restored_bytes=expert_bytes))
    settings = Settings(model="m", shadow="none", **given)
    assert with_threads(settings, store).threads_a_node == expected
    with threads.SHARED_THREADS.hold(None, 4):
        assert with_threads(settings, store) == settings, "an open model computes with its number"


def test_verify_computes_its_reference_with_as_many(
    cli: CommandLine, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of several threads have other last bits."""
    found: list[int] = []
    monkeypatch.setattr(settings_module, "available_cores", lambda: 2)

    def load(*_: Any) -> None:
        found.append(torch.get_num_threads())
        raise ClusterError("enough")

    monkeypatch.setattr("odmoe.commands.shared.whole_model.load_whole", load)
    for limit in (threads.SMALL_EXPERT_BYTES, 1):
        monkeypatch.setattr(threads, "SMALL_EXPERT_BYTES", limit)
        cli("verify", str(demo), "HAMLET", "--shadow", "none", "-n", "2")
    assert found == [1, 2]
