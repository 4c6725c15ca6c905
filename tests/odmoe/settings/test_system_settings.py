"""A choice is declared once: flags, presets, recordings, reports and the simulator take it from there."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import fields

import pytest

from odmoe.settings.derived import FIXED_WHILE_RUNNING
from odmoe.settings.settings import Settings
from odmoe.settings.simulate_settings import SimulateSettings
from odmoe.settings.system_settings import CHOSEN
from scheduler.errors import ConfigError
from scheduler.policies.registry import CHOICES
from scheduler.policies.system_config import SystemConfig
from scheduler.policies.systems import SYSTEMS
from support.paths import ROOT

ANOTHER = """
import dataclasses, json, sys
from scheduler.policies import system_config

metadata = {"heading": "Experiments", "about": "Order in which dice are rolled"}
system_config.SystemConfig = dataclasses.make_dataclass(
    "SystemConfig",
    [("dice", str, dataclasses.field(default="six", metadata=metadata))],
    bases=(system_config.SystemConfig,), frozen=True, slots=True,
)
from scheduler.policies import registry

registry.CHOICES["dice"] = {name: registry.Choice(name, lambda shape, c: c) for name in ("six", "twelve")}

import click.testing, contextlib, io
from odmoe.command_line import app
from odmoe.api.records import about
from odmoe.commands.generate import Job
from odmoe.settings.derived import FIXED_WHILE_RUNNING
from odmoe.settings.settings import Settings
from scheduler.eventlog.recording import Recorder
from scheduler.policies.system_config import CoreConfig
from scheduler.types import ModelShape

def printed(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            app(words, standalone_mode=False)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return out.getvalue()

settings = Settings(model="m", dice="twelve")
log = Recorder({}, CoreConfig(ModelShape((0,), 2, 1), 1, system=settings.system_config)).take()
print(json.dumps({
    "settings": settings.system_config.dice,
    "trace": about(settings, 1)["dice"],
    "report": Job(settings, settings, None).system,
    "fixed": "dice" in FIXED_WHILE_RUNNING,
    "recorded": b"dice" in log and b"twelve" in log,
    "config": printed("config", "--dice", "twelve"),
    "simulate": json.loads(printed("simulate", "--tokens", "2", "--json", "--dice", "twelve"))["dice"],
    "systems": printed("systems"),
    "help": printed("generate", "--help"),
    "wrong": printed("simulate", "--dice", "seven"),
    "wrong setting": printed("config", "--dice", "seven"),
}))
"""


@pytest.mark.slow
def test_another_choice_takes_its_declaration_and_the_registry_alone() -> None:
    """In a process where `dice` was declared and registered before anything read the declaration."""
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["settings"] == found["trace"] == found["simulate"] == "twelve"
    assert found["report"] == "od-moe + dice twelve"
    assert found["fixed"]
    assert found["recorded"]
    assert "dice: twelve  # --dice\n" in found["config"]
    assert "--dice: order in which dice are rolled\n  six " in found["systems"]
    assert "--dice" in found["help"]
    assert found["wrong"] == found["wrong setting"] == "ConfigError: --dice is 'seven'; allowed: six, twelve"


def test_every_list_is_that_of_the_declaration() -> None:
    names = [field.name for field in fields(SystemConfig)]
    assert list(CHOSEN) == names
    assert set(names) <= set(Settings.model_fields) & set(SimulateSettings.model_fields) & set(FIXED_WHILE_RUNNING)
    for name in CHOICES:
        assert Settings.model_fields[name].default == getattr(SystemConfig(), name)
    assert Settings().system_config == SystemConfig() == SYSTEMS["od-moe"].config


@pytest.mark.slow
def test_no_second_list_is_written_anywhere() -> None:
    """No collection of the product names three choices outside the policies: there the declaration, the registry of
    what each name stands for, presets with their values, and the objects that a core takes. Type checkers need the
    keywords of `odmoe.load` written out: tests/odmoe/api/test_keywords.py compares them with the tables."""
    collections = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Call, ast.ClassDef)
    found = []
    for package in ("scheduler", "main_node", "worker_node", "shadow_node", "wire", "odmoe"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, collections) and len(_named(node) & set(CHOSEN)) >= 3:
                    found.append(str(path.relative_to(ROOT)))
    policies = [f"scheduler/policies/{name}.py" for name in ("registry", "strategy", "system_config", "systems")]
    assert sorted(set(found)) == ["odmoe/settings/keywords.py", *policies]


def _named(node: ast.AST) -> set[str]:
    """Names that a node lists: texts, keywords, fields."""
    named = set()
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.Constant):
            named.add(str(part.value))
        elif isinstance(part, ast.keyword):
            named.add(str(part.arg))
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            named.add(part.target.id)
    return named


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_preset_gives_its_configuration(name: str) -> None:
    settings = Settings(model="m", system=name)
    assert settings.system_config == SYSTEMS[name].config
    assert settings.workers == (1 if SYSTEMS[name].single_machine else 8)
    assert not set(SYSTEMS[name].values()) & settings.model_fields_set


@pytest.mark.parametrize(("field", "name"), [("residency", "belady"), ("predictor", "perfect")])
def test_a_bound_is_for_simulations_only(field: str, name: str) -> None:
    assert getattr(SimulateSettings(**{field: name}), field) == name
    with pytest.raises(ConfigError, match=f"--{field} is '{name}', a bound that knows the routes to come"):
        Settings(**{field: name})
