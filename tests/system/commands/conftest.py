"""Starts the command line in processes of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.machines.processes import Starter, starter


@pytest.fixture
def start() -> Iterator[Starter]:
    with starter() as made:
        yield made
