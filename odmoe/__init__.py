"""Mixture-of-Experts models too large for any of your machines, from Python (docs/python.md).

What is named here is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from main_node.figures import ClusterFigures
    from main_node.report import Report
    from odmoe.api.asking import Message, Prompt
    from odmoe.api.async_stream import AsyncStream
    from odmoe.api.completion import Alternative, Chunk, Completion, Logprob, Stream
    from odmoe.api.loading import load
    from odmoe.api.model import Model
    from odmoe.api.options import Options
    from odmoe.api.planning import PlanReport, plan
    from odmoe.api.simulating import Simulation, replay, simulate
    from odmoe.settings.keywords import LoadKeywords, PlanKeywords, SimulateKeywords
    from scheduler import errors
    from scheduler.errors import ODMoEError
    from scheduler.eventlog.replay import Replayed

__all__ = [
    "Alternative",
    "AsyncStream",
    "Chunk",
    "ClusterFigures",
    "Completion",
    "LoadKeywords",
    "Logprob",
    "Message",
    "Model",
    "ODMoEError",
    "Options",
    "PlanKeywords",
    "PlanReport",
    "Prompt",
    "Replayed",
    "Report",
    "SimulateKeywords",
    "Simulation",
    "Stream",
    "errors",
    "load",
    "plan",
    "replay",
    "simulate",
]

_NAMES = {
    "main_node.figures": ("ClusterFigures",),
    "main_node.report": ("Report",),
    "odmoe.api.asking": ("Message", "Prompt"),
    "odmoe.api.async_stream": ("AsyncStream",),
    "odmoe.api.completion": ("Alternative", "Chunk", "Completion", "Logprob", "Stream"),
    "odmoe.api.loading": ("load",),
    "odmoe.api.model": ("Model",),
    "odmoe.api.options": ("Options",),
    "odmoe.api.planning": ("PlanReport", "plan"),
    "odmoe.api.simulating": ("Simulation", "replay", "simulate"),
    "odmoe.settings.keywords": ("LoadKeywords", "PlanKeywords", "SimulateKeywords"),
    "scheduler": ("errors",),
    "scheduler.errors": ("ODMoEError",),
    "scheduler.eventlog.replay": ("Replayed",),
}
"""What each module gives, as above."""
_HOME = {name: home for home, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # type checkers would take every name for one that is there

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'odmoe' has no attribute {name!r}")
        home = _HOME[name]
        found = import_module(f"{home}.{name}") if name == "errors" else getattr(import_module(home), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
