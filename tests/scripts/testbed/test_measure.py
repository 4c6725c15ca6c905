"""A link between two hosts, both of which are this machine."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.testbed import measure
from scripts.testbed.layout import TestbedError


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python says so at the far end; the near end says alone that nobody answers."""
    monkeypatch.setattr(measure, "enter", lambda pid, user, command: command)
    layout: Any = SimpleNamespace(cluster=SimpleNamespace(user=""))
    source, target = (SimpleNamespace(name=name, address="127.0.0.1") for name in ("near", "far"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(measure, "PORT", port)
        with pytest.raises(
            TestbedError, match=f"from near to far: far: it cannot listen at port {port}: Address already"
        ):
            measure.measure_link(layout, source, target, [0, 0])  # type: ignore[arg-type]
