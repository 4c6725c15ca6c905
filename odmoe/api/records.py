"""The files that `trace` and `record` name, written when the answers are done."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odmoe.settings.settings import Settings
from odmoe.settings.system_settings import CHOSEN
from scheduler.errors import ODMoEError
from scheduler.files import write_whole
from scheduler.trace import write_trace

if TYPE_CHECKING:
    from odmoe.api.model import Model


def write_records(settings: Settings, running: Settings, model: Model) -> None:
    """Write the files that `settings` ask for. `running`: the settings of the nodes."""
    from odmoe.clusters.configuration import resources, with_precision

    failing = sys.exc_info()[0] is not None
    cluster, store = model.cluster, model.opened.store
    try:
        with ExitStack() as both:  # each is written even if the other fails
            if settings.record is not None:
                both.callback(lambda path: write_whole(path, cluster.recording()), Path(settings.record))
            if settings.trace is not None:
                slots = resources(with_precision(running, store), store).slots
                facts = about(running, slots)
                both.callback(lambda path: write_trace(path, cluster.trace(), facts), Path(settings.trace))
    except (ODMoEError, OSError):
        if not failing:  # the first error is the one to show
            raise


def shadow_of(settings: Settings) -> str:
    """The precision of the shadow that runs; none if nothing asks it."""
    return settings.shadow if settings.has_shadow else "none"


def about(settings: Settings, slots: int) -> dict[str, Any]:
    """What a trace says of itself. `slots`: of each worker."""
    shown = (
        "model",
        "cluster",
        "workers",
        "slots",
        "device_memory",
        "memory",
        "system",
        *CHOSEN,
        "align_token",
        "align_kv",
        "dtype",
        "loader",
    )
    values = {name: getattr(settings, name) for name in shown} | {"slots": slots}
    return values | {"shadow": shadow_of(settings), "emulated": settings.profile}
