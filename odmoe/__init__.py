"""Mixture-of-Experts models too large for any of your machines, from Python (docs/python.md).

What is named here is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from odmoe.api.asking import AnyModel as AnyModel
    from odmoe.api.asking import Options as Options
    from odmoe.api.async_stream import AsyncStream as AsyncStream
    from odmoe.api.completion import Alternative as Alternative
    from odmoe.api.completion import Chunk as Chunk
    from odmoe.api.completion import Completion as Completion
    from odmoe.api.completion import Logprob as Logprob
    from odmoe.api.completion import Stream as Stream
    from odmoe.api.loading import load as load
    from odmoe.api.model import Model as Model
    from odmoe.api.planning import PlanReport as PlanReport
    from odmoe.api.planning import plan as plan
    from odmoe.api.served.connecting import ServedModel as ServedModel
    from odmoe.api.served.connecting import connect as connect
    from odmoe.api.simulating import Simulation as Simulation
    from odmoe.api.simulating import replay as replay
    from odmoe.api.simulating import simulate as simulate
    from scheduler import errors as errors
    from scheduler.errors import ODMoEError as ODMoEError

_HOMES = {
    "odmoe.api.asking": ("AnyModel", "Options"),
    "odmoe.api.async_stream": ("AsyncStream",),
    "odmoe.api.completion": ("Alternative", "Chunk", "Completion", "Logprob", "Stream"),
    "odmoe.api.served.connecting": ("ServedModel", "connect"),
    "odmoe.api.loading": ("load",),
    "odmoe.api.model": ("Model",),
    "odmoe.api.planning": ("PlanReport", "plan"),
    "odmoe.api.simulating": ("Simulation", "replay", "simulate"),
    "scheduler.errors": ("ODMoEError",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # type checkers would take every name for one that is there

    def __getattr__(name: str) -> Any:
        if name == "errors":
            found: Any = import_module("scheduler.errors")
        elif name in _HOME:
            found = getattr(import_module(_HOME[name]), name)
        else:
            raise AttributeError(f"module 'odmoe' has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, "errors"})
