"""What a cluster's recording says of its workers is what is simulated."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.eventlog.recording import Recording
from scheduler.policies.system_config import CoreConfig
from scheduler.types import Event, ModelShape, RequestOpened, WorkerJoined, WorkerLost
from scripts.measure import agreement


def recording(*events: Event) -> Recording:
    about: dict[str, Any] = {"workers": 8, "slots": 1}  # as the settings of hosts say that nobody has counted
    return Recording(
        about, CoreConfig(ModelShape((0,), 4, 2), 2), [(0.0, event) for event in events], [[] for _ in events]
    )


def test_as_many_workers_as_came() -> None:
    came = recording(*(WorkerJoined(number, 2) for number in range(5)), RequestOpened(1, 4))
    assert agreement.joined(came) == {"workers": 5, "slots": 2}


@pytest.mark.parametrize(
    "events",
    [
        (WorkerJoined(0, 1), WorkerJoined(1, 2)),
        (WorkerJoined(0, 1), WorkerJoined(1, 1), WorkerLost(1, "gone"), WorkerJoined(1, 1)),
        (RequestOpened(1, 4),),
    ],
)
def test_workers_that_differ_or_were_lost_are_not_compared(events: tuple[Event, ...]) -> None:
    with pytest.raises(SystemExit, match="nothing to compare"):
        agreement.joined(recording(*events))
