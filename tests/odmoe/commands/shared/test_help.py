"""The help of a command: first the flags that most people need, on one screen, the rest under headings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from odmoe.command_line import app
from odmoe.commands.shared.flags import SettingsCommand
from odmoe.settings.plan_settings import PlanSettings
from odmoe.settings.serve_settings import ServeSettings
from odmoe.settings.settings import Settings
from odmoe.settings.simulate_settings import SimulateSettings
from odmoe.settings.table import HEADINGS, Table, declaration_of
from scheduler.policies.registry import CHOICES
from scheduler.policies.systems import SYSTEMS
from support.machines.cli import CommandLine

SCREEN = 24
TABLES: dict[str, type[Table]] = {"generate": Settings, "simulate": SimulateSettings, "plan": PlanSettings}
NUMBER_OF_COMMON = {"generate": 10, "simulate": 10, "plan": 8}
OF_ONE_ANSWER = ("max_new_tokens", "seed", "stop", "ignore_eos", "chat", "system_prompt", "trace", "record")
"""A request says these itself; trace and recording would grow without end."""
OWN = {"generate": ("prompts", "json", "quiet"), "simulate": ("json",), "plan": ("json",)}


@pytest.fixture
def shown(cli: CommandLine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """The help's lines on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    answer = cli(request.param, "--help")
    assert answer.code == 0
    return answer.out.splitlines()


def panel_of(lines: list[str], title: str) -> list[str]:
    start = next(number for number, line in enumerate(lines) if line.startswith(f"╭─ {title} "))
    end = next(number for number, line in enumerate(lines[start:], start) if line.startswith("╰"))
    return lines[start + 1 : end]


def flags_in(lines: list[str]) -> list[str]:
    return [found[1] for line in lines if (found := re.match(r"│ \*? *--([a-z-]+)", line))]


@pytest.mark.parametrize(("shown", "command"), [(name, name) for name in TABLES], indirect=["shown"])
def test_common_flags_come_first_a_line_each(shown: list[str], command: str) -> None:
    lines = panel_of(shown, "Options")
    flags = flags_in(lines)
    assert len(lines) == len(flags), "a flag takes more than a line"
    table = TABLES[command]
    common = [name.replace("_", "-") for name in table.names() if declaration_of(table, name).common]
    assert flags == [*common, *OWN[command], "help"]
    assert len(flags) - 1 == NUMBER_OF_COMMON[command]
    assert shown.index(lines[-1]) < SCREEN


@pytest.mark.parametrize(("shown", "command"), [(name, name) for name in TABLES], indirect=["shown"])
def test_every_setting_is_under_its_heading(shown: list[str], command: str) -> None:
    table = TABLES[command]
    for name in table.names():
        found = declaration_of(table, name)
        title = "Options" if found.common else found.heading
        if name == "secret":
            assert "--secret" not in "".join(shown)
        else:
            assert name.replace("_", "-") in flags_in(panel_of(shown, title))
    titles = [found[1] for line in shown if (found := re.match(r"╭─ (\w+) ─", line))]
    assert [title for title in titles if title in HEADINGS] == [name for name in HEADINGS if name in titles]
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize("shown", ["serve"], indirect=True)
def test_what_serves_has_its_own_heading(shown: list[str]) -> None:
    """Beside the settings of a cluster, without those of one answer."""
    own = [name.replace("_", "-") for name in ServeSettings.names() if not declaration_of(ServeSettings, name).common]
    assert flags_in(panel_of(shown, "Service")) == own
    assert "bind" in flags_in(panel_of(shown, "Options"))
    everything = flags_in(shown)
    for name in Settings.names():
        flag = name.replace("_", "-")
        assert (flag in everything) == (name not in (*OF_ONE_ANSWER, "secret")), flag
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize("shown", [*TABLES, "serve"], indirect=True)
def test_no_flag_is_a_paragraph(shown: list[str]) -> None:
    """Three lines at most: long lists of names are in `odmoe systems`."""
    texts = "\n".join(line for line in shown if line.startswith("│"))
    assert max(part.count("\n") for part in texts.split("│ --")) <= 3


@pytest.mark.parametrize("name", ["bench", "train-predictor", "verify"])
def test_flags_of_other_commands_read_like_those_of_generate(name: str) -> None:
    """A phrase without a full stop, and the default in it."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for parameter in group.commands[name].params:
        text = getattr(parameter, "help", None) or ""
        assert text, parameter.name
        assert not text.endswith("."), text
        assert not getattr(parameter, "show_default", False) or parameter.default in (None, False), text
        if isinstance(parameter.default, int) and not isinstance(parameter.default, bool):
            assert text.endswith(f"(default: {parameter.default})"), text


def test_systems_and_policies_are_listed(cli: CommandLine) -> None:
    """Name and one line for each, none wider than a terminal."""
    lines = cli("systems").out.splitlines()
    assert max(map(len, lines)) <= 80
    named = [line.split()[0] for line in lines if line.startswith("  ")]
    assert named == [*SYSTEMS, *(name for names in CHOICES.values() for name in names)]
    assert [line.split()[0] for line in lines if " * " in line] == [
        "importance",
        "fate",
        "mixtral-offloading",
        "eap",
        "hobbit",
        "adapmoe",
    ]


def test_one_system_is_shown(cli: CommandLine) -> None:
    answer = cli("systems", "importance")
    assert answer.out.startswith("importance: Importance-Driven Expert Scheduling; approximate\n")
    assert re.search(r"^  --alpha +0\.3$", answer.out, re.MULTILINE)
    found = json.loads(cli("systems", "importance", "--json").out)
    assert found["systems"]["importance"]["placement"] == "balance"
    assert set(json.loads(cli("systems", "--json").out)["policies"]) == set(CHOICES)
    wrong = cli("systems", "importanse")
    assert (wrong.code, wrong.out) == (2, "")
    assert "did you mean importance?" in wrong.err


def test_hidden_spellings(cli: CommandLine) -> None:
    assert "temperature: 0.5  # --temperature\n" in cli("config", "--temp", "0.5").out
    assert "chat: false  # --chat\n" in cli("config", "--no-chat").out
    assert "chat: true  # --chat\n" in cli("config", "--chat").out


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--no-chat", "--chat"], "chat: true  # --chat"),
        (["--chat", "--no-chat"], "chat: false  # --chat"),
        (["--chat", "--no-chat", "--chat"], "chat: true  # --chat"),
        (["--temp", "0.7", "--temperature", "0.5"], "temperature: 0.5  # --temperature"),
        (["--temperature", "0.5", "--temp=0.7"], "temperature: 0.7  # --temperature"),
    ],
    ids=" ".join,
)
def test_the_last_spelling_wins(flags: list[str], line: str, cli: CommandLine) -> None:
    assert f"\n{line}\n" in cli("config", *flags).out


def test_every_command_with_hidden_spellings_reads_them() -> None:
    commands: dict[str, Any] = typer.main.get_group(app).commands
    hidden = {name for name, one in commands.items() if any("alias_of_" in str(param.name) for param in one.params)}
    assert hidden >= {"generate", "config", "up"}
    assert {name for name, one in commands.items() if isinstance(one, SettingsCommand)} >= hidden


def test_a_default_is_written_one_way() -> None:
    """In round brackets, as the flags of settings have it; typer would write square ones."""
    commands: dict[str, Any] = typer.main.get_group(app).commands
    options = [one for command in commands.values() for one in command.params if one.param_type_name == "option"]
    given = [one for one in options if isinstance(one.default, int | float | str) and not one.is_flag]
    assert len(given) > 5
    for one in given:
        number = one.default if isinstance(one.default, str) else f"{one.default:g}"
        assert f"(default: {number})" in one.help
        assert not one.show_default


def test_defaults_that_a_system_decides_are_said(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = cli("generate", "--help").out
    assert "Worker nodes (default: 8, or the system's)" in text
    assert "Temperature (default: 0, greedy)" in text
    assert "Workers (default: system's or profile's)" in cli("simulate", "--help").out


@pytest.mark.parametrize(("command", "default"), [("generate", "auto"), ("up", "od-moe"), ("verify", "od-moe")])
def test_the_systems_default_is_that_of_the_command(command: str, default: str, cli: CommandLine) -> None:
    assert f"Preset of policies (default: {default})" in cli(command, "--help").out


def test_a_command_imports_none_of_the_others() -> None:
    code = (
        "import sys\nfrom odmoe.command_line import run\nsys.argv = ['odmoe', 'systems']\nrun()\n"
        "print([name for name in sys.modules if name.startswith('odmoe.commands.')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "odmoe.commands.systems" in done.stderr
    assert not any(f"odmoe.commands.{name}" in done.stderr for name in ("generate", "plan", "serve", "verify"))
