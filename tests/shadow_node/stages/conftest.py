"""A shadow of the demo model in two parts, the second as a node of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from scheduler.errors import ODMoEError
from shadow_node.stages.division import Part
from shadow_node.stages.first import FirstStage
from shadow_node.stages.later import LaterStage
from shadow_node.stages.node import Stage
from wire.inprocess import connect

PROMPT = [5, 17, 3, 60, 41, 9]


@pytest.fixture(scope="module")
def later(demo_store: Callable[[str], Any]) -> LaterStage:
    return LaterStage(demo_store("float32"), "fp16", part=Part(1, (1, 1)))


@pytest.fixture
def stage(later: LaterStage, demo_store: Callable[[str], Any]) -> Iterator[Stage]:
    manifest = demo_store("float32").manifest
    made = Stage("part 1 of the shadow", later, manifest.model_digest, manifest.dtype)
    yield made
    made.close()


@pytest.fixture
def first_of(demo_store: Callable[[str], Any], stage: Stage) -> Callable[..., FirstStage]:
    def make(scheme: str = "fp16", rooms: tuple[int, ...] = (1, 1)) -> FirstStage:
        return FirstStage(demo_store("float32"), scheme, "cpu", Part(0, rooms), [partial(connect, stage)])

    return make


@pytest.fixture
def prompted(first_of: Callable[..., FirstStage]) -> tuple[FirstStage, Any, list[ODMoEError]]:
    """A shadow that has read `PROMPT`, the cache of that, and the errors with which parts of it are lost."""
    first, lost = first_of(), list[ODMoEError]()
    first.on_part_lost = lost.append
    first.reach()
    cache = first.new_cache()
    first.forward(PROMPT, cache)
    return first, cache, lost
