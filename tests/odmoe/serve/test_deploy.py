"""The files in deploy/: alert rules, units, a compose file."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import typer
import yaml

from odmoe.command_line import app
from odmoe.serve.metrics import FINISHES, REASONS
from odmoe.settings.serve_settings import ServeSettings
from support.paths import ROOT

DEPLOY = ROOT / "deploy"
RULES = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
KNOWN = {"up", *re.findall(r"`(odmoe_\w+)`", (ROOT / "docs" / "metrics.md").read_text())}
SERVICE = (DEPLOY / "systemd" / "odmoe.service").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]["odmoe"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_asks_for_what_there_is(rule: dict[str, object]) -> None:
    """With Prometheus' own grammar."""
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    expression = str(rule["expr"])
    promql_parser.parse(expression)
    names = {re.sub(r"_bucket$", "", name) for name in re.findall(r"\b(?:odmoe_\w+|up)\b", expression)}
    assert names
    assert names <= KNOWN
    for label, values in (("finish", FINISHES), ("reason", REASONS)):
        for listed in re.findall(label + r'=~?"([^"]*)"', expression):
            assert set(listed.split("|")) <= set(values)


def unknown_flags(words: list[str]) -> list[str]:
    group = typer.main.get_command(app)
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    flags = {flag for option in command.params for flag in option.opts}
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in flags]


def test_a_stop_waits_for_the_drain() -> None:
    (command,) = re.findall(r"^ExecStart=\S+odmoe (serve .*)$", SERVICE.replace("\\\n", " "), re.MULTILINE)
    words = shlex.split(command)
    assert not unknown_flags(words)
    drain_s = float(words[words.index("--drain-timeout") + 1])
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", SERVICE, re.MULTILINE)[0]) >= drain_s + 30
    assert not unknown_flags(COMPOSE["command"])
    assert int(COMPOSE["stop_grace_period"].rstrip("s")) >= ServeSettings().drain_timeout + 30


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
@pytest.mark.parametrize("name", ["odmoe.service", "odmoe-cluster.service"])
def test_systemd_takes_the_unit(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / name).read_text()
    unit = tmp_path / name
    unit.write_text(text.replace("/opt/odmoe/bin/odmoe", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60, check=False
    )
    ours = [line for line in done.stderr.splitlines() if name in line and "User" not in line]
    assert not ours
