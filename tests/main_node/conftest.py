"""The engine's small world, and a desk in it: test files do not import each other, so it is made known here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location("engine_world", Path(__file__).with_name("engine_world.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
_WORLD = sys.modules["engine_world"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_WORLD)


@pytest.fixture
def desk_of() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def build(answer_s: float = 30.0, **settings: Any) -> Any:
        made.append(_WORLD.Desk(answer_s, **settings))
        return made[-1]

    yield build
    for desk in made:
        desk.engine.close()
        for fake in desk.fakes:
            fake.close()
            assert fake.closed.wait(_WORLD.WAIT_S)


@pytest.fixture
def desk(desk_of: Callable[..., Any]) -> Any:
    return desk_of()
