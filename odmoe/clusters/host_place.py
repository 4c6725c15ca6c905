"""The host place of an embedded cluster: the host's processor, if it is a second place to compute beside the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError
from scheduler.policies.registry import needs_host
from scheduler.timing.profile import Profile

if TYPE_CHECKING:
    from checkpoint.expert import ExpertArithmetic
    from checkpoint.store import ExpertStore
    from scheduler.emulation.clock import Emulation
    from worker_node.host import HostPlace


def check_host_place(settings: Settings, profile: Profile | None) -> bool:
    """Whether there is a host place, and the placement uses it. `profile`: the parsed profile of the settings.

    Raises ConfigError if there is no host place, and --placement was given or the system is nothing without one.
    """
    placement = settings.system_config.placement
    if placement == "device" or settings.cluster != "embedded":
        return False
    if profile.host_s is not None if profile is not None else settings.loader_used == "cuda":
        return True
    if settings.is_given("placement") or needs_host(settings.system_config):
        flag = f"--placement {placement}" if settings.is_given("placement") else f"--system {settings.system}"
        raise ConfigError(
            f"{flag} needs a host that computes beside the device; use --loader cuda if "
            "there is a GPU, or a --profile with times for the host (rtx3090-pcie3)"
        )
    return False


def make_host(
    settings: Settings, store: ExpertStore, arithmetic: ExpertArithmetic, emulation: Emulation | None
) -> HostPlace | None:
    """The host place; None if the placement is `device`, or if the host cannot compute beside the device.

    Raises ConfigError as `check_host_place` does.
    """
    if not check_host_place(settings, None if emulation is None else emulation.profile):
        return None
    from worker_node.host import HostPlace
    from worker_node.pace import WorkerPace

    pace = None if emulation is None else WorkerPace(emulation, host=True)
    return HostPlace("host", store, arithmetic, pace, settings.check_loads != "none")
