"""`odmoe systems`: every preset, and every policy that a flag can choose."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from odmoe.commands.shared.options import Json, option
from odmoe.settings.table import flag
from scheduler.policies.policy_file import load_policy_file
from scheduler.policies.registry import CHOICES, Choice, is_exact
from scheduler.policies.system_config import SystemConfig
from scheduler.policies.systems import SYSTEMS, Preset, preset_of


def systems(
    name: Annotated[str | None, typer.Argument(help="Show the policies of this system only")] = None,
    policy_file: Annotated[str | None, option(help="List those of this Python file, too", metavar="PATH")] = None,
    as_json: Json = False,
) -> None:
    """List systems and policies."""
    if policy_file is not None:
        load_policy_file(policy_file)
    chosen = SYSTEMS if name is None else {name: preset_of(name)}
    if as_json:
        facts = {
            key: {"about": preset.about, **asdict(preset.config), "exact": is_exact(preset.config), "file": preset.file}
            for key, preset in chosen.items()
        }
        names = {field: {key: choice.about for key, choice in found.items()} for field, found in CHOICES.items()}
        files = {field: {key: one.file for key, one in found.items() if one.file} for field, found in CHOICES.items()}
        more = {"policies": names, "policy_files": {field: found for field, found in files.items() if found}}
        print(json.dumps({"systems": facts} | ({} if name is not None else more)))
        return
    print("\n".join(_system_lines(name) if name is not None else _all_lines()))


def _system_lines(name: str) -> list[str]:
    preset = SYSTEMS[name]
    chosen = {field: value for field, value in asdict(preset.config).items() if value is not None}
    width = max(map(len, chosen)) + 2
    exact = "exact" if is_exact(preset.config) else "approximate"
    lines = [f"{name}: {preset.about}{_origin(preset)}; {exact}"]
    for field, value in chosen.items():
        about = f"  {CHOICES[field][value].about}{_origin(CHOICES[field][value])}" if field in CHOICES else ""
        lines.append(f"  {flag(field):<{width}} {value!s:<20}{about}".rstrip())
    return lines


def _all_lines() -> list[str]:
    lines = ["--system: preset of policies (* the answer may be approximate)"]
    for name, preset in SYSTEMS.items():
        lines.append(f"  {name + ('' if is_exact(preset.config) else ' *'):<21} {preset.about}{_origin(preset)}")
    for field, names in CHOICES.items():
        lines += ["", f"{flag(field)}: {SystemConfig.__dataclass_fields__[field].metadata['about'].lower()}"]
        lines += [f"  {name:<21} {choice.about}{_origin(choice)}" for name, choice in names.items()]
    return lines


def _origin(one: Choice[Any] | Preset) -> str:
    """Where it is from, if not from this project."""
    return f" (from {Path(one.file).name})" if one.file else ""
