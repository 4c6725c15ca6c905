"""Where experts can be computed: on the device, and on the host beside it where that is a second place."""

from __future__ import annotations

from checkpoint.single import ExpertArithmetic
from checkpoint.store import ExpertStore
from odmoe.settings import Settings
from scheduler.emulation import Emulation
from scheduler.errors import ConfigError
from worker_node.host import HostPlace
from worker_node.pace import EmulatedPace


def make_host(
    settings: Settings, store: ExpertStore, arithmetic: ExpertArithmetic, emulation: Emulation | None
) -> HostPlace | None:
    """None where everything is computed on the device: as chosen, or since there is no second place.

    Raises ConfigError where a second place was asked for by its flag and there is none.
    """
    if settings.placement == "device":
        return None
    if emulation is not None and emulation.profile.host_s is not None:
        return HostPlace("host", store, arithmetic, EmulatedPace(emulation, host=True))
    if emulation is None and settings.loader == "cuda":
        return HostPlace("host", store, arithmetic)
    if "placement" in settings.model_fields_set:
        raise ConfigError(
            f"--placement {settings.placement} needs a second place to compute experts, and there is one only: take "
            "--loader cuda where there is a GPU, or --profile with one that has times for the host (rtx3090-pcie3)"
        )
    return None
