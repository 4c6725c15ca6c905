"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from support.machines.processes import Starter, starter


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No colours forced from outside."""
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when a cluster is started."""

    def started(*args: Any) -> NoReturn:
        pytest.fail("a cluster was started")

    monkeypatch.setattr("odmoe.api.model.start_cluster", started)


@pytest.fixture
def start() -> Iterator[Starter]:
    """`start("generate", ...)`: the command line in a process of its own."""
    with starter() as made:
        yield made
