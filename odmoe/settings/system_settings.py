"""The settings of a system, made from the declaration of its configuration in `scheduler.policies.system_config`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, asdict, fields
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import create_model

from odmoe.settings.table import Count, Number, Table, flag, one_of, setting
from scheduler.errors import ConfigError
from scheduler.policies.policy_file import load_policy_file
from scheduler.policies.registry import CHOICES, check, is_read, readers
from scheduler.policies.system_config import SystemConfig
from scheduler.policies.systems import SYSTEMS, Preset, preset_of

EMBEDDED = "embedded"
"""The cluster in one process."""
DEFAULT, AUTO = "od-moe", "auto"
"""Chosen once the model is known (`odmoe.clusters.system_choice`); until then the policies are those of od-moe."""
CHOSEN = tuple(field.name for field in fields(SystemConfig))
"""The settings that define a system."""


def _declare(field: Field[Any]) -> tuple[Any, Any]:
    """Type and default of a pydantic field."""
    more = field.metadata
    about: dict[str, Any] = {"heading": more["heading"], "fixed": "running", "verify": True}
    if field.name in CHOICES:
        default: Any = field.default
        return str, one_of(default, CHOICES[field.name], more["about"], registered=True, **about)
    kind: Any = Count if more["kind"] is int else Number
    return kind | None, setting(None, more["allowed"], more["about"], **about)


if TYPE_CHECKING:
    _Chosen = Table
else:
    _Chosen = create_model("_Chosen", __base__=Table, **{field.name: _declare(field) for field in fields(SystemConfig)})


class SystemSettings(_Chosen):
    """A preset, and a setting for every field of SystemConfig."""

    may_be_automatic: ClassVar[bool] = False
    """Whether `system` may be auto."""

    system: str = one_of(
        DEFAULT,
        SYSTEMS,
        "Preset of policies",
        heading="Cluster",
        common=True,
        registered=True,
        fixed="running",
        verify=True,
    )

    policy_file: str | None = setting(
        None,
        "a file",
        "Policies and presets of your own: a Python file, which is run (docs/systems.md)",
        heading="Experiments",
        here_only=True,
        verify=True,
    )

    def __init__(self, named: Callable[[str], str] | None = None, **values: Any) -> None:
        load_policies(values, named or flag)
        super().__init__(named, **values)
        if not (self.may_be_automatic and self.system == AUTO):
            preset_of(self.system, (named or flag)("system"))
        check(self.system_config, named or flag)

    @property
    def system_config(self) -> SystemConfig:
        """The policies in effect."""
        return SystemConfig(**{name: getattr(self, name) for name in CHOSEN})

    @property
    def preset(self) -> Preset:
        """The preset that `system` names; od-moe while it is auto."""
        return SYSTEMS[DEFAULT if self.system == AUTO else self.system]


def load_policies(values: Mapping[str, Any], named: Callable[[str], str]) -> None:
    """Register the policies of the file that `policy_file` of `values` names, if any. Raises ConfigError.

    The file is code, and stays in this process: other machines and processes would have to run it, too.
    """
    path, cluster = values.get("policy_file"), values.get("cluster", EMBEDDED)
    if not isinstance(path, str):
        return
    if cluster != EMBEDDED:
        raise ConfigError(
            f"{named('policy_file')} is {path} with {named('cluster')} {cluster}; a policy file is run in this process "
            f"only: leave {named('cluster')} out, or add the policy to the code (docs/systems.md)"
        )
    load_policy_file(path, named("policy_file"))


def system_name(preset: str, config: SystemConfig) -> str:
    """The preset, and what was chosen otherwise: `fate + residency lru`."""
    chosen = asdict(SYSTEMS[preset].config)
    changed = [f"{name} {value}" for name, value in asdict(config).items() if value != chosen[name]]
    return " + ".join([preset, *changed])


def check_read(given: Collection[str], values: Table, system: SystemConfig, named: Callable[[str], str]) -> None:
    """Check that every setting of `given` has an effect. Raises ConfigError naming one that no policy of the system
    reads."""
    for name in given:
        value = getattr(values, name)
        if value is None or is_read(name, system) or (name == "shadow" and value == "none"):
            continue
        by = readers(name)
        flags = [f"--{field} {getattr(system, field)}" for field, names in CHOICES.items() if set(by) & set(names)]
        unread = f"{flags[0]} does not read" if len(flags) == 1 else f"neither {' nor '.join(flags)} reads"
        raise ConfigError(
            f"{named(name)} is {value}, which {unread}; {', '.join(by)} {'does' if len(by) == 1 else 'do'}: leave it "
            "out, or choose one of those"
        )


def chosen_by_preset(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that the preset chooses, except those in `values`."""
    name = values.get("system", DEFAULT)
    preset = SYSTEMS.get(name) if isinstance(name, str) else None
    return {name: value for name, value in preset.values().items() if name not in values} if preset else {}
