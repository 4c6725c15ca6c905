"""One set of processes for all promises, made sound after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.faults.cluster import Seen, ask
from support.promises import PROMPT, TOKENS, Nodes, greedy


@pytest.fixture(scope="package")
def all_nodes(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(tiny, tmp_path_factory.mktemp("promises") / "store", greedy(tiny, PROMPT, TOKENS))
    yield made
    made.close()


@pytest.fixture
def nodes(all_nodes: Nodes) -> Iterator[Nodes]:
    yield all_nodes
    all_nodes.mend()


@pytest.fixture
def answer() -> Callable[..., Seen]:
    """(cluster, what is done after how many tokens) -> what the client sees."""
    return lambda cluster, acts=None: ask(cluster, PROMPT, TOKENS, acts)
