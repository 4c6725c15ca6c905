"""What `odmoe generate --record FILE` keeps: the scheduler's log of a cluster, from its first event on."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from checkpoint.store import ExpertStore
from main_node.engine.engine import Engine
from odmoe.clusters.budget import slots_of
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError
from scheduler.eventlog.recording import Recorder
from scheduler.policies.choices import Choices
from scheduler.types import ModelShape
from wire.messages import PROTOCOL_VERSION


def choices_of(settings: Settings, shape: ModelShape) -> Choices:
    """What these settings make a scheduler with."""
    group = settings.group_size or (min(shape.top_k, settings.workers) if settings.workers_given else shape.top_k)
    predictor = settings.predictor if settings.predictor != "sep" or settings.shadowed else "none"
    return Choices(
        shape, group, settings.alignment, settings.mini_batch, predictor, settings.residency, settings.prefill,
        settings.router, settings.placement, settings.precision, settings.alpha, settings.prefetch,
    )  # fmt: skip


def record(engine: Engine, settings: Settings, store: ExpertStore) -> Recorder | None:
    """Keep what this engine decides, before it has decided anything; None where nobody has asked for it."""
    if settings.record is None:
        return None
    recorder = Recorder(_about(settings, store), choices_of(settings, engine.core.shape))
    engine.on_decided = recorder.decided
    return recorder


def taken(recorder: Recorder | None) -> bytes:
    """The log so far. Raises ConfigError where none was kept, or it became too large."""
    if recorder is None:
        raise ConfigError("the cluster's nodes keep no record for --record; start them with it")
    return recorder.take()


def _about(settings: Settings, store: ExpertStore) -> dict[str, Any]:
    manifest = store.manifest
    versions = {"odmoe": version("odmoe"), "protocol": PROTOCOL_VERSION, "python": platform.python_version()}
    return {
        "model": settings.model or store.path.name, "fingerprint": manifest.fingerprint, "dtype": manifest.dtype,
        "system": settings.system, "cluster": settings.cluster, "workers": settings.workers,
        "slots": slots_of(settings, store),
        "shadow": settings.shadow if settings.shadowed else "none", "loader": settings.loader,
        "profile": settings.profile, "versions": versions,
    }  # fmt: skip
