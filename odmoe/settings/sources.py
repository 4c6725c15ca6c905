"""Where settings come from: flags, then the environment (ODMOE_*), then a configuration file, then the defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odmoe.settings.automatic import check_named, with_automatic
from odmoe.settings.derived import LASTING_ONLY
from odmoe.settings.settings import Settings
from odmoe.settings.system_settings import check_read
from odmoe.settings.table import declaration_of, flag
from scheduler.errors import ConfigError
from scheduler.policies.registry import CHOICES, is_read, keeps_all, readers
from scheduler.unknown_names import nearest
from scheduler.yaml_file import parse_yaml, read_yaml

PREFIX = "ODMOE_"
API_KEY = PREFIX + "API_KEY"
"""Not a setting of a cluster: the key of `odmoe serve`, which no command line should show."""


@dataclass(frozen=True, slots=True)
class Effective:
    """The settings in effect, and in `origin` where each setting that is not a default comes from."""

    settings: Settings
    origin: dict[str, str]
    rank: dict[str, int]
    """How specific that source is: 1 for the file, 2 for the environment, 3 for a flag."""


def variable(name: str) -> str:
    """`group_size` -> `ODMOE_GROUP_SIZE`."""
    return PREFIX + name.upper()


FLAG = 3
"""The rank of a flag; see `Effective`."""
_ALIGNMENT = ("align_token", "align_kv", "align_kv_rows", "align_states")
_VARIABLES = [*map(variable, Settings.model_fields), PREFIX + "CONFIG", API_KEY]


def effective(
    flags: Mapping[str, Any],
    file: str | None = None,
    environ: Mapping[str, str] = os.environ,
    chooses: bool = True,
) -> Effective:
    """Like `merge_sources`, without the settings that a more specific choice makes unread: a value in the file must not
    forbid a system that is chosen with a flag, and one of `LASTING_ONLY` no other kind of cluster. Raises ConfigError
    for any other setting that the system does not read. `chooses`: the system is auto where nothing chooses one
    (`with_automatic`); else auto is refused."""
    found = merge_sources(flags, file, environ)
    settings, origin, rank = found.settings, found.origin, found.rank
    ignored = {name for name in origin if rank[name] < _rank_of_choice(name, found)}
    # Many commands share the environment and the file; a flag is an error for another kind of cluster.
    ignored |= {name for name in LASTING_ONLY if not settings.uses_existing_ray and rank.get(name, FLAG) < FLAG}
    if ignored:
        kept = settings.model_dump(exclude_unset=True, exclude=ignored)
        settings = Settings(lambda name: origin.get(name, flag(name)), **kept)
        origin = {name: source for name, source in origin.items() if name not in ignored}
        rank = {name: number for name, number in rank.items() if name not in ignored}
    named: Callable[[str], str] = lambda name: origin.get(name, flag(name))  # noqa: E731 - the type is checked
    check_used(settings, origin, named)
    if chooses:
        return Effective(with_automatic(settings, named), origin, rank)
    check_named(settings, named)
    return Effective(settings, origin, rank)


def check_used(settings: Settings, given: Collection[str], named: Callable[[str], str]) -> None:
    """Raises ConfigError for a setting of `given` that the system does not read."""
    for name in _ALIGNMENT:
        if name in given and _is_without_shadow(settings) and (value := getattr(settings, name)) != 0:
            raise ConfigError(
                f"{named(name)} is {value} with shadow none; there is nothing to align: leave it out, or give a shadow"
            )
    check_read(given, settings, settings.system_config, named)


def _rank_of_choice(name: str, found: Effective) -> int:
    """The rank of the choice that makes a setting unread; 0 if the setting is read, or a default makes it unread."""
    if name in _ALIGNMENT and _is_without_shadow(found.settings):
        return found.rank.get("shadow", 0)
    if is_read(name, found.settings.system_config):
        return 0
    by = set(readers(name))
    preset = found.rank.get("system", 0)
    return max(found.rank.get(field, preset) for field, names in CHOICES.items() if by & set(names))


def _is_without_shadow(settings: Settings) -> bool:
    """Whether shadow none leaves the predictor sep without a shadow."""
    return settings.system_config.predictor == "sep" and not settings.has_shadow


def merge_sources(
    flags: Mapping[str, Any], file: str | None = None, environ: Mapping[str, str] = os.environ
) -> Effective:
    """The settings from all sources. `flags`: the flags that were given. `file`: the value of --config; without it,
    ODMOE_CONFIG or the file under `$XDG_CONFIG_HOME/odmoe` is read. Raises ConfigError naming the source of a wrong
    value."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    rank: dict[str, int] = {}
    path = file or environ.get(PREFIX + "CONFIG")
    if path or default_file(environ).is_file():
        where = Path(os.path.expanduser(path)) if path else default_file(environ)
        for name, value in read_file(where).items():
            values[name], origin[name], rank[name] = value, f"{name.replace('_', '-')} in {where}", 1
    unknown_names = [key for key in environ if key.startswith(PREFIX) and key not in _VARIABLES]
    if unknown_names:
        near = nearest(unknown_names[0], _VARIABLES)
        raise ConfigError(f"{unknown_names[0]} is set in the environment but is not a setting{near}")
    for name in Settings.model_fields:
        text = environ.get(variable(name))
        if text is not None:
            values[name], origin[name], rank[name] = _from_text(name, text), variable(name), 2
    for name, value in flags.items():
        values[name], origin[name], rank[name] = value, flag(name), FLAG
    return Effective(Settings(lambda name: origin.get(name, flag(name)), **values), origin, rank)


def default_file(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CONFIG_HOME/odmoe/config.yaml`, or `~/.config/...` if that variable is not set."""
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "odmoe" / "config.yaml"


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML file; `max-new-tokens` and `max_new_tokens` are the same key. Raises ConfigError."""
    found = read_yaml(path, f"the configuration {path}")
    if found is None:  # `odmoe config` writes nothing but comments where every setting is a default
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"the configuration {path} is a {type(found).__name__}; allowed: lines of `setting: value`")
    values: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name in values:
            raise ConfigError(f"the configuration {path} has {key} twice; keep one of them")
        if value is None and name in Settings.model_fields:
            continue  # as if the line were not there
        values[name] = [value] if name == "stop" and isinstance(value, str) else value
    return values


def _from_text(name: str, text: str) -> Any:
    """A variable's text; several stop texts are written as a YAML list."""
    if name != "stop":
        return text
    try:
        found = parse_yaml(text, variable(name)) if text.startswith("[") else text
    except ConfigError:  # no list: the text itself
        found = text
    return found if isinstance(found, list) else [text]


def dump(found: Effective) -> str:
    """The settings as a configuration file, each with its source. Defaults and what follows from other settings are
    comments, so that the file does not forbid another system. The secret is not shown."""
    import yaml

    lines = []
    settings = found.settings
    chosen = settings.preset.values() if "system" in found.origin else {}
    for name in Settings.names():
        value = getattr(settings, name)
        shown: Any = list(value) if isinstance(value, tuple) else value
        if declaration_of(Settings, name).secret and value:
            lines.append(f"# {name}: not shown  # {found.origin.get(name, 'default')}")
            continue
        text = yaml.safe_dump(shown, default_flow_style=True, width=1000).removesuffix("...\n")
        line = f"{name.replace('_', '-')}: {text.rstrip()}"
        if name in found.origin:
            lines.append(f"{line}  # {found.origin[name]}")
        elif name == "slots" and settings.device_memory is not None:
            lines.append("# slots: as many as device-memory has room for")
        elif name == "slots" and settings.memory is not None:
            lines.append("# slots: as many as memory has room for")
        elif name == "slots" and keeps_all(settings.system_config):
            lines.append("# slots: one for every expert")
        else:
            lines.append(f"# {line}  # {f'by system {settings.system}' if name in chosen else 'default'}")
    return "\n".join(lines) + "\n"
