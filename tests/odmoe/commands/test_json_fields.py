"""Every field that --json prints is in docs/reports.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.machines.cli import CommandLine
from support.paths import CONFIGS, ROOT

FILE = ROOT / "docs" / "reports.md"


def fields(section: str) -> set[str]:
    """The names in the first column of the section's tables, or in its paragraphs."""
    text = FILE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] if line.startswith("|") else line for line in text.splitlines()]
    return set(re.findall(r"`([a-z_0-9]+)`", "\n".join(rows))) - {"null"}


def compared(cli: CommandLine) -> set[str]:
    """The fields of a comparison and of its points."""
    small = ("--tokens", "2", "--prompt-tokens", "2", "--layers", "2", "--experts", "4", "--top-k", "1")
    answer = cli("simulate", "--json", *small, "--compare", "lru", "--device-memory", "50%")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    return set(found).union(*found["points"])


@pytest.mark.usefixtures("short_plans", "few_visits")
@pytest.mark.parametrize("command", ["generate", "simulate", "plan"])
def test_every_field_is_explained_and_none_that_is_not_there(command: str, cli: CommandLine, demo: Path) -> None:
    arguments = {
        "generate": ["-m", str(demo), "-n", "2", "--shadow", "none", "--threads", "1", "HAMLET"],
        "simulate": ["--tokens", "4"],
        "plan": ["-m", str(demo), "--workers", "2", "--group-size", "2", "--slots", "1"],
    }[command]
    answer = cli(command, "--json", *arguments)
    assert answer.code == 0, answer.err
    printed, explained = set(json.loads(answer.out)), fields(f"odmoe {command}")
    if command == "simulate":
        printed |= compared(cli)
    if command == "plan":
        of_machines = cli("plan", "--json", "-m", str(CONFIGS / "mixtral-8x7b.json"), "--machine", "pc: ram=64GB")
        printed |= set(json.loads(of_machines.out))
    assert printed <= explained, f"not explained: {sorted(printed - explained)}"
    more = {
        "generate": {"prompt"},  # with --prompts
        "simulate": {"recording", "commands", "difference", "identical"},  # with --replay
        "plan": set(),
    }[command]
    assert explained - printed == more, "explained, and not printed"
