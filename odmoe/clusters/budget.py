"""Memory for experts: how many slots a budget is."""

from __future__ import annotations

from pathlib import Path

from checkpoint.store import ExpertStore
from checkpoint.token_predictor import FILE
from odmoe.settings.settings import Settings, parse_memory
from scheduler.errors import ConfigError
from scheduler.policies.registry import forms_of
from worker_node.restorer import restoring_bytes


def slots_of(settings: Settings, store: ExpertStore) -> int:
    """Slots of each worker: as said, or what --device-memory has room for, all workers' together. A share is one of all
    experts in full; where they travel in a smaller form, more of them fit, beside the room to restore one.

    Raises ConfigError where not one does.
    """
    if settings.device_memory is None:
        return settings.slots
    manifest = store.manifest
    share, size = parse_memory(settings.device_memory)
    if share is not None:
        size = int(share * manifest.expert_bytes)
    forms = forms_of(settings.precision)
    each = max(manifest.form_bytes(form) for form in forms)
    experts = sum(len(layer.blobs) for layer in manifest.layers.values())
    beside = restoring_bytes(store, forms, "cuda" if settings.loader == "cuda" else "cpu")
    slots = min((size // settings.workers - beside) // each, -(-experts // settings.workers))
    if slots < 1:
        bare = settings.device_memory.replace(".", "").isdigit()
        meant = f", or is {settings.device_memory}% meant?" if bare and float(settings.device_memory) <= 100 else ""
        raise ConfigError(
            f"--device-memory {settings.device_memory} is {size} bytes for {settings.workers} worker(s), and one that "
            f"holds one expert needs {each + beside}{f', {beside} of it to restore one' if beside else ''}; "
            f"give at least {(each + beside) * settings.workers} bytes{meant}"
        )
    return slots


def find_token_predictor(settings: Settings, store: ExpertStore) -> Path | None:
    """Weights of the token-wise predictor: as said, or beside the model, or what came into the store with it.

    Raises ConfigError where one is needed and there is none.
    """
    if not settings.predictor.startswith("token-wise"):
        return None
    beside = [Path(settings.model) / FILE, store.dense / FILE]
    file = (
        Path(settings.token_predictor) if settings.token_predictor else next((p for p in beside if p.is_file()), None)
    )
    if file is None or not file.is_file():
        raise ConfigError(
            f"--predictor {settings.predictor} needs trained weights, and {file or beside[0]} is not there; "
            f"make them: odmoe train-predictor {settings.model}"
        )
    return file
