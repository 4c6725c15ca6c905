"""Streams over each transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.nodes.streams import Kit
from wire.base import Channel, Handler, Node


@pytest.fixture
def kit() -> Iterator[Kit]:
    with Kit() as made:
        yield made


@pytest.fixture(params=["in-process", "gRPC"])
def open_stream(request: pytest.FixtureRequest, kit: Kit) -> Callable[[Node, Handler], Channel]:
    """Opens a stream from a handler to a node, over each transport in turn."""
    if request.param == "in-process":
        return kit.connect_in_process
    return lambda node, handler: kit.connect(kit.serve(node).address, handler)
