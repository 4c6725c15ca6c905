"""`--system auto`: whether the system is chosen by this machine, once the model's sizes are known."""

from __future__ import annotations

from collections.abc import Callable

from odmoe.settings.settings import Settings
from odmoe.settings.system_settings import AUTO, CHOSEN
from scheduler.errors import ConfigError

OWN_CHOICES = (
    *CHOSEN,
    *(
        "shadow",
        "align_token",
        "align_kv",
        "align_kv_rows",
        "align_states",
        "draft",
        "draft_from",
        "token_predictor",
        "predictor_learning_rate",
    ),
    *("workers", "group_size", "slots", "device_memory", "audit", "profile"),
    *("loader", "device", "main_device", "shadow_device", "worker_device"),
)
"""Settings that choose a system, or what a system's worth depends on. With any of them the system is as it is declared:
od-moe, unless it is named. What was measured is one process on the processor."""


def with_automatic(settings: Settings, named: Callable[[str], str]) -> Settings:
    """The settings with system auto where neither it nor one of `OWN_CHOICES` is given, for a model in this process.

    `named`: gives the name of a setting in messages. Raises ConfigError for an auto that cannot be followed.
    """
    others = [name for name in OWN_CHOICES if settings.is_given(name)]
    here = settings.cluster == "embedded" and bool(settings.model)
    if settings.system != AUTO:
        return settings.replace(system=AUTO) if here and not others and not settings.is_given("system") else settings
    if others:
        raise ConfigError(
            f"{named('system')} is auto with {named(others[0])}, which is a choice of its own; leave one of them out, "
            "or name a system (odmoe systems)"
        )
    if not here:
        raise ConfigError(
            f"{named('system')} is auto with {named('cluster')} {settings.cluster}; auto is for a model in this "
            "process (embedded): name a system (odmoe systems)"
        )
    return settings


def check_named(settings: Settings, named: Callable[[str], str]) -> None:
    """For commands that compare or start systems, and choose none. Raises ConfigError for auto."""
    if settings.system == AUTO:
        raise ConfigError(
            f"{named('system')} is auto, which only commands that answer (generate, serve) choose; name a system "
            "(odmoe systems)"
        )
