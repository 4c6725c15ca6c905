"""Where settings come from: flags, then the environment (ODMOE_*), then a configuration file, then the defaults."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from odmoe.settings.settings import Settings, flag
from scheduler.errors import ConfigError
from scheduler.policies.registry import PREDICTORS, heeding

PREFIX = "ODMOE_"


@dataclass(frozen=True, slots=True)
class Effective:
    """`settings`, and for each that is not a default `origin`: where it was said."""

    settings: Settings
    origin: dict[str, str]


def variable(name: str) -> str:
    """`group_size` -> `ODMOE_GROUP_SIZE`."""
    return PREFIX + name.upper()


_VARIABLES = [*map(variable, Settings.model_fields), PREFIX + "CONFIG"]


def effective(flags: Mapping[str, Any], file: str | None = None, environ: Mapping[str, str] = os.environ) -> Effective:
    """The settings that hold. `flags`: those that were given; `file`: --config, else ODMOE_CONFIG, else the one under
    `$XDG_CONFIG_HOME/odmoe` where there is one. Raises ConfigError naming where the wrong value was said, or one that
    nobody would heed."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    path = file or environ.get(PREFIX + "CONFIG")
    if path or default_file(environ).is_file():
        where = Path(os.path.expanduser(path)) if path else default_file(environ)
        for name, value in read_file(where).items():
            values[name], origin[name] = value, f"{name.replace('_', '-')} in {where}"
    strangers = [key for key in environ if key.startswith(PREFIX) and key not in _VARIABLES]
    if strangers:
        near = difflib.get_close_matches(strangers[0], _VARIABLES, 1)
        hint = f"; is {near[0]} meant?" if near else ""
        raise ConfigError(f"{strangers[0]} is set in the environment and is no setting{hint}")
    for name in Settings.model_fields:
        text = environ.get(variable(name))
        if text is not None:
            values[name], origin[name] = _from_text(name, text), variable(name)
    for name, value in flags.items():
        values[name], origin[name] = value, flag(name)
    found = Effective(Settings(lambda name: origin.get(name, flag(name)), **values), origin)
    _check_heeded(found)
    return found


def _check_heeded(found: Effective) -> None:
    settings, origin = found.settings, found.origin
    predictor, router = f"--predictor {settings.predictor}", f"--router {settings.router}"
    token_wise = tuple(name for name in PREDICTORS if name.startswith("token-wise"))
    for name, heeded, chosen, those in (
        ("alpha", heeding("alpha"), (settings.predictor, settings.router), f"{predictor} with {router} does"),
        ("prefetch", heeding("prefetch"), (settings.predictor,), f"{predictor} does"),
        ("token_predictor", token_wise, (settings.predictor,), f"{predictor} does"),
    ):
        if getattr(settings, name) is not None and name in origin and not set(heeded) & set(chosen):
            raise ConfigError(
                f"{origin[name]} is {getattr(settings, name)}, which {those} not heed; {', '.join(heeded)} do: "
                "leave it out, or choose one of those"
            )


def default_file(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CONFIG_HOME/odmoe/config.yaml`, `~/.config/...` where that is not set."""
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "odmoe" / "config.yaml"


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML file; `max-new-tokens` and `max_new_tokens` are the same key. Raises ConfigError."""
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} cannot be read: {' '.join(str(error).split())}") from error
    except yaml.YAMLError as error:
        # `from None`, and not its own words: those show the line, which may be the secret's.
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "some character"
        raise ConfigError(
            f"the configuration {path} cannot be read: {where} is not YAML; text with special characters needs quotes"
        ) from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"the configuration {path} is a {type(found).__name__}; allowed: lines of `setting: value`")
    values: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name in values:
            raise ConfigError(f"the configuration {path} says {key} twice; say it once")
        if value is None and name in Settings.model_fields:
            continue  # as if the line were not there
        values[name] = [value] if name == "stop" and isinstance(value, str) else value
    return values


def _from_text(name: str, text: str) -> Any:
    """A variable's text; several stop texts are written as a YAML list."""
    if name != "stop":
        return text
    try:
        found = yaml.safe_load(text) if text.startswith("[") else text
    except yaml.YAMLError:
        found = text
    return found if isinstance(found, list) else [text]


def dump(found: Effective) -> str:
    """The effective settings as a configuration file, each with where it came from. The secret is not shown. What a
    system chose, and slots that a budget decides on, are comments: the same holds where the file is read again."""
    lines = []
    settings = found.settings
    chosen = settings.preset.values() if "system" in found.origin else {}
    for name, value in found.settings.model_dump().items():
        shown: Any = list(value) if isinstance(value, tuple) else value
        if name == "secret" and value:
            lines.append(f"# secret: not shown  # {found.origin.get(name, 'default')}")
            continue
        text = yaml.safe_dump(shown, default_flow_style=True, width=1000).removesuffix("...\n")
        line = f"{name.replace('_', '-')}: {text.rstrip()}"
        if name in found.origin:
            lines.append(f"{line}  # {found.origin[name]}")
        elif name == "slots" and settings.device_memory is not None:
            lines.append("# slots: as many as device-memory has room for")
        else:
            lines.append(f"# {line}  # by system {settings.system}" if name in chosen else f"{line}  # default")
    return "\n".join(lines) + "\n"
