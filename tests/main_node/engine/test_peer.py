"""A worker's answer becomes the event of its arrival; forms and costs that cannot be are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from main_node.engine.peer import worker_of
from scheduler.errors import ProtocolError
from scheduler.types import FormCost, WorkerJoined
from wire.messages import WorkerReady

READY = WorkerReady(1, "w", 3, 100, "cpu", "disk", "box", 7, "a processor", 1, 50.0)
FORMED = replace(READY, forms=("", "int4"), form_load_s=(0.5, 0.2), form_restore_s=(0.0, 0.1), form_fits=(False, True))


def test_costs_of_each_form() -> None:
    assert worker_of(2, READY) == WorkerJoined(2, 3, 2.0)
    costs = (FormCost("", 0.5, 0.0, False), FormCost("int4", 0.2, 0.1, True))
    assert worker_of(2, FORMED) == WorkerJoined(2, 3, 2.0, forms=costs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"forms": ("int2", "int4")}, "the full form"),
        ({"forms": ("", "")}, "each of them once"),
        ({"forms": ("", "int3")}, "int3"),
        ({"form_fits": (True,)}, "2, 2, 1"),
        ({"form_load_s": (math.nan, 0.2)}, "nan"),
        ({"form_load_s": (0.5, math.inf)}, "inf"),
        ({"form_restore_s": (0.0, -0.1)}, "-0.1"),
    ],
    ids=str,
)
def test_forms_that_cannot_be(changes: dict[str, tuple[object, ...]], words: str) -> None:
    with pytest.raises(ProtocolError, match=rf"worker 2 .*{words}"):
        worker_of(2, replace(FORMED, **changes))  # type: ignore[arg-type]
