"""`odmoe generate --record FILE`: the scheduler's event log of a cluster, from its first event on."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from checkpoint.store import ExpertStore
from odmoe.clusters.configuration import Configuration
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError
from scheduler.eventlog.recording import Recorder
from scheduler.policies.precision import FULL
from scheduler.simulation.recorded_forms import FORM_BYTES
from wire.messages import PROTOCOL_VERSION


def make_recorder(settings: Settings, store: ExpertStore, configuration: Configuration) -> Recorder | None:
    """The recorder of --record; None without that setting."""
    if settings.record is None:
        return None
    return Recorder(_about(settings, store, configuration.resources.slots), configuration.core)


def recording_of(recorder: Recorder | None) -> bytes:
    """The log so far. Raises ConfigError if there is none, or if it became too large."""
    if recorder is None:
        raise ConfigError("the cluster's nodes keep no record for --record; start them with it")
    return recorder.take()


def _about(settings: Settings, store: ExpertStore, slots: int) -> dict[str, Any]:
    manifest = store.manifest
    versions = {"odmoe": version("odmoe"), "protocol": PROTOCOL_VERSION, "python": platform.python_version()}
    return {
        "model": settings.model or store.path.name,
        "fingerprint": manifest.fingerprint,
        "dtype": manifest.dtype,
        "system": settings.system,
        "cluster": settings.cluster,
        "workers": settings.workers,
        "slots": slots,
        FORM_BYTES: {form: manifest.form_bytes(form) for form in (FULL, *manifest.forms)},
        "shadow": settings.shadow if settings.has_shadow else "none",
        "loader": settings.loader_used,
        "profile": settings.profile,
        "draft": settings.draft,
        "draft_from": settings.draft_from,
        "batch_dense": settings.batch_dense,
        "versions": versions,
    }
