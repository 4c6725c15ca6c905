"""Where experts can be computed: on the device, and on the host beside it where that is a second place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError
from scheduler.timing.profile import Profile

if TYPE_CHECKING:
    from checkpoint.expert import ExpertArithmetic
    from checkpoint.store import ExpertStore
    from scheduler.emulation.clock import Emulation
    from worker_node.host import HostPlace


def hosted(settings: Settings, profile: Profile | None) -> bool:
    """Whether experts can be computed on the host, too, and are to be. `profile`: that of the settings, read.

    Raises ConfigError where a second place was asked for by its flag and there is none.
    """
    placement = settings.system_config.placement
    if placement == "device" or settings.cluster != "embedded":
        return False
    if profile.host_s is not None if profile is not None else settings.loader == "cuda":
        return True
    if settings.given("placement"):
        raise ConfigError(
            f"--placement {placement} needs a second place to compute experts, and there is one only: take "
            "--loader cuda where there is a GPU, or --profile with one that has times for the host (rtx3090-pcie3)"
        )
    return False


def make_host(
    settings: Settings, store: ExpertStore, arithmetic: ExpertArithmetic, emulation: Emulation | None
) -> HostPlace | None:
    """None where everything is computed on the device: as chosen, or since there is no second place.

    Raises ConfigError where a second place was asked for by its flag and there is none.
    """
    if not hosted(settings, None if emulation is None else emulation.profile):
        return None
    from worker_node.host import HostPlace
    from worker_node.pace import WorkerPace

    return HostPlace("host", store, arithmetic, None if emulation is None else WorkerPace(emulation, host=True))
