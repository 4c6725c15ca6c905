"""Policies and presets from one Python file outside of this project (`--policy-file`).

The file has a dict `POLICIES`, kind of policy -> name -> `registry.Choice`, or a dict `SYSTEMS`, name ->
`systems.Preset`, or both. Reading it runs it, as `python FILE` would.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from scheduler.errors import ConfigError
from scheduler.policies import registry
from scheduler.policies.guard import Guarded, methods_of
from scheduler.policies.precision import FORMS, FULL
from scheduler.policies.registry import CHOICES, Choice
from scheduler.policies.strategy import Strategy
from scheduler.policies.system_config import SystemConfig
from scheduler.policies.systems import SYSTEMS, Preset
from scheduler.types import ModelShape
from scheduler.unknown_names import unknown

PROTOCOLS: dict[str, type] = {name: kind for name, kind in get_type_hints(Strategy).items() if name in CHOICES}
"""The kinds of policies that a file may have, and what a policy of each kind must have."""
LEAST_SHAPE = ModelShape((0,), 2, 1)
"""Of the model for which each policy of a file is made once, to check it."""
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

_loaded: dict[str, bytes] = {}
"""File -> its bytes when it was loaded."""


def load_policy_file(path: str, label: str = "--policy-file") -> None:
    """Register what a file has. One that was loaded before, and is the same, is not run again; one that has changed
    replaces what it had. `label`: how messages call the setting. Raises ConfigError: nothing is registered then."""
    file = Path(path).expanduser().resolve()
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{label} {path} cannot be read: {error.strerror}; check the path") from error
    if _loaded.get(str(file)) == source:
        return
    where = f"{label} {path}"
    module = _run(file, source, where)
    policies, systems = getattr(module, "POLICIES", {}), getattr(module, "SYSTEMS", {})
    if not (policies or systems):
        raise ConfigError(f"{where} has neither policies nor presets; give it a dict POLICIES, or SYSTEMS")
    former = _loaded.get(str(file)), remove_policies_of(file)
    try:
        _check(policies, systems, where)
    except BaseException as error:
        if former[0] is not None:
            _loaded[str(file)] = former[0]
            _register(former[1])
        if isinstance(error, ConfigError) or not isinstance(error, Exception):
            raise
        raise ConfigError(f"{where} cannot be checked: {_where(error, file)}; mend it, or leave it out") from error
    registered = {
        kind: {name: _guarded(kind, name, choice, file) for name, choice in named.items()}
        for kind, named in policies.items()
    }
    _register(registered | {"system": {name: replace(preset, file=str(file)) for name, preset in systems.items()}})
    _loaded[str(file)] = source


def loaded_files() -> list[Path]:
    """The files whose policies are registered."""
    return [Path(file) for file in _loaded]


def remove_policies_of(file: Path) -> dict[str, dict[str, Any]]:
    """Forget what a file has registered. Returns it, by kind."""
    found: dict[str, dict[str, Any]] = {}
    for kind, names in _tables().items():
        found[kind] = {name: one for name, one in names.items() if one.file == str(file)}
        for name in found[kind]:
            del names[name]
    _loaded.pop(str(file), None)
    return found


def names_from_files() -> list[str]:
    """A line for each policy and preset that is from a file: `--residency NAME: what it is (from FILE)`."""
    return [
        f"--{kind} {name}: {one.about} (from {Path(one.file).name})"
        for kind, names in _tables().items()
        for name, one in names.items()
        if one.file
    ]


def _register(found: Mapping[str, Mapping[str, Any]]) -> None:
    tables = _tables()
    for kind, names in found.items():
        tables[kind].update(names)


def _tables() -> dict[str, dict[str, Any]]:
    return {**CHOICES, "system": SYSTEMS}


def _guarded(kind: str, name: str, choice: Choice[Any], file: Path) -> Choice[Any]:
    what = f"--{kind} {name} of {file.name}"

    def make(shape: ModelShape, system: SystemConfig) -> Guarded:
        try:
            policy = choice.make(shape, system)
        except ConfigError:
            raise  # it names what is wrong
        except Exception as error:
            model = f"a model of {len(shape.layers)} layers"
            raise ConfigError(f"{what} cannot be made for {model}: {_where(error, file)}; mend the file") from error
        return Guarded(policy, what, PROTOCOLS[kind], shape)

    return replace(choice, file=str(file), make=make)


def _run(file: Path, source: bytes, where: str) -> Any:
    name = f"odmoe_policy_file_{re.sub(r'[^0-9a-zA-Z]', '_', file.stem)}"
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        exec(compile(source, file, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{where} cannot be run: {_where(error, file)}; mend it, or leave it out") from error
    return module


def _where(error: BaseException, file: Path) -> str:
    """The error, and the last line of the file that led to it."""
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == str(file)]
    line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
    text = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    return text + (f" (line {line})" if line else "")


def _check(policies: Any, systems: Any, where: str) -> None:
    for kind, named in _dict(policies, f"POLICIES of {where}").items():
        if kind not in PROTOCOLS:
            raise ConfigError(unknown(f"a kind of POLICIES in {where}", kind, PROTOCOLS, "odmoe systems"))
        for name, choice in _dict(named, f"POLICIES[{kind!r}] of {where}").items():
            _check_name(f"{kind} {name!r} of {where}", name, CHOICES[kind])
            _check_choice(f"{kind} {name!r} of {where}", kind, choice)
    for name, preset in _dict(systems, f"SYSTEMS of {where}").items():
        _check_name(f"system {name!r} of {where}", name, SYSTEMS)
        _check_preset(f"system {name!r} of {where}", preset, policies)


def _dict(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is a {type(value).__name__}; allowed: a dict by name")
    return value


def _check_name(what: str, name: Any, taken: Mapping[str, Any]) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{what} has a name that no flag can take; allowed: small letters, digits and hyphens")
    if name in taken:
        raise ConfigError(f"{what} has the name of one from {taken[name].file or 'odmoe itself'}; choose another")


def _check_choice(what: str, kind: str, choice: Any) -> None:
    if not isinstance(choice, Choice):
        raise ConfigError(f"{what} is a {type(choice).__name__}; allowed: scheduler.policies.registry.Choice(...)")
    if choice.is_bound:
        raise ConfigError(f"{what} has is_bound=True, and a file's policy is told no routes to come; leave it out")
    read = {name for names in CHOICES.values() for one in names.values() for name in one.reads}
    for name in choice.reads:
        if name not in read:
            raise ConfigError(unknown(f"{what} reads a setting that", name, sorted(read), "odmoe config"))
    try:
        policy = choice.make(LEAST_SHAPE, SystemConfig())
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} cannot be made for a model of one layer and two experts: {text}") from error
    _check_members(what, PROTOCOLS[kind], policy)
    _check_exactness(what, kind, choice, policy)


def _check_members(what: str, protocol: type, policy: Any) -> None:
    """`policy` has what the Protocol names, and its methods take as many arguments."""
    wanted = f"{protocol.__module__.replace('.', '/')}.py says what it is for"
    for name in (name for name, one in vars(protocol).items() if isinstance(one, property)):
        if not hasattr(policy, name):
            raise ConfigError(f"{what} has no property {name}; {wanted}")
    for name, declared in methods_of(protocol).items():
        method, takes = getattr(policy, name, None), [one for one in declared.parameters if one != "self"]
        if not callable(method):
            raise ConfigError(f"{what} has no method {name}; {wanted}")
        try:
            inspect.signature(method).bind(*takes)
        except TypeError:
            text = f"{name}({', '.join(takes)})"
            raise ConfigError(f"{what} has a method {name} that takes other arguments; wanted: {text}") from None


def _check_exactness(what: str, kind: str, choice: Choice[Any], policy: Any) -> None:
    """What may change answers says so. Nothing else in the project could find out."""
    if kind == "router" and choice.exact:
        raise ConfigError(f"{what} chooses experts, which changes answers; give its Choice exact=False")
    if kind == "precision":
        if not choice.forms or any(form not in FORMS for form in choice.forms) or policy.forms != choice.forms:
            raise ConfigError(
                f"{what} has forms {policy.forms!r}, and its Choice {choice.forms!r}; allowed: the same, of {FORMS!r}"
            )
        if choice.exact and choice.forms != (FULL,):
            raise ConfigError(f"{what} loads smaller forms, which changes answers; give its Choice exact=False")
    if kind in ("router", "precision") and policy.exact != choice.exact:
        raise ConfigError(f"{what} has exact {policy.exact}, and its Choice {choice.exact}; give both the same")


def _check_preset(what: str, preset: Any, policies: Mapping[str, Mapping[str, Any]]) -> None:
    if not isinstance(preset, Preset):
        raise ConfigError(f"{what} is a {type(preset).__name__}; allowed: scheduler.policies.systems.Preset(...)")
    if not isinstance(preset.config, SystemConfig):
        kind = type(preset.config).__name__
        raise ConfigError(f"{what} has a config that is a {kind}; allowed: SystemConfig(...)")
    config, plain = preset.config, SystemConfig()
    own = {
        field.name: getattr(plain, field.name)
        for field in fields(SystemConfig)
        if getattr(config, field.name) in policies.get(field.name, {})
    }
    registry.check(replace(config, **own), lambda name: f"{name} of {what}")
