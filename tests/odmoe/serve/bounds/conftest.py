"""One demo model and one server a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from support.machines.http_service import Served, demo_model, serving

if TYPE_CHECKING:
    from odmoe.api.model import Model


@pytest.fixture(scope="module")
def model(demo_store: Callable[[str], Any]) -> Iterator[Model]:
    with demo_model(demo_store("float32")) as made:
        yield made


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serving(model) as made:
        yield made
