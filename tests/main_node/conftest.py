"""Desks: an engine among nodes that do as they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.engine_world import WAIT_S, Desk


@pytest.fixture
def desk_of() -> Iterator[Callable[..., Desk]]:
    """Makes desks, and closes them."""
    made: list[Desk] = []

    def build(answer_s: float = 30.0, mini_batch: int = 128) -> Desk:
        made.append(Desk(answer_s, mini_batch))
        return made[-1]

    yield build
    for desk in made:
        desk.engine.close()
        for fake in desk.fakes:
            fake.close()
            assert fake.closed.wait(WAIT_S)


@pytest.fixture
def desk(desk_of: Callable[..., Desk]) -> Desk:
    return desk_of()
