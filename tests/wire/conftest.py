"""What tests of the transports open streams with, and certificates for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.machines.certificates import Authority
from support.nodes.streams import EchoNode, Kit
from wire.base import Channel, Handler


@pytest.fixture
def kit() -> Iterator[Kit]:
    with Kit() as made:
        yield made


@pytest.fixture
def authority(tmp_path: Path) -> Callable[..., Authority]:
    """Makes a CA."""
    folder = tmp_path / "certificates"
    folder.mkdir()
    return lambda *args, **settings: Authority(folder, *args, **settings)


@pytest.fixture(params=["in-process", "gRPC"])
def open_stream(request: pytest.FixtureRequest, kit: Kit) -> Callable[[EchoNode, Handler], Channel]:
    """Opens a stream from a handler to a node, over each transport in turn."""
    if request.param == "in-process":
        return kit.connect_in_process
    return lambda node, handler: kit.connect(kit.serve(node).address, handler)
