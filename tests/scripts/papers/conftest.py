"""Whole runs of scripts, in this process."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SMALL = ["--quick", "--models", "models/demo-moe", "--prompts", "1", "--history", "1"]


@dataclass
class Written:
    """`facts`: NAME.json; `table`: NAME.csv, a dict of texts a row; `told`: both streams, on one line."""

    facts: dict[str, Any]
    table: list[dict[str, str]]
    told: str


@pytest.fixture
def run_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Written]:
    """`run_script(module, *flags, name=...)`: its status must be 0. What it writes is called `name`."""

    def call(module: ModuleType, *flags: str, name: str) -> Written:
        monkeypatch.setattr(sys, "argv", [str(module.__file__), "--out", str(tmp_path), *flags])
        capfd.readouterr()
        try:
            status = module.main()
        except SystemExit as ended:
            status = ended.code
        said = capfd.readouterr()
        assert not status, said.out + said.err + str(status)
        text = (tmp_path / f"{name}.csv").read_text()
        assert text.startswith("# machine: ")
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        found = Written(
            json.loads((tmp_path / f"{name}.json").read_text()),
            list(csv.DictReader(lines)),
            " ".join((said.out + said.err).split()),
        )
        assert len(found.table) == len(found.facts["rows"])
        return found

    return call


@pytest.fixture
def run(run_script: Callable[..., Written], tmp_path: Path) -> Callable[..., tuple[dict[str, Any], str]]:
    """`run(module, *flags)`: what a script that compares systems wrote as JSON, and what it said. `name`: of what it
    writes, if not the module's."""

    def call(module: ModuleType, *flags: str, name: str = "") -> tuple[dict[str, Any], str]:
        name = name or f"{module.__name__.removesuffix('.__main__').rpartition('.')[2]}-quick"
        found = run_script(module, *SMALL, *flags, name=name)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        return found.facts, found.told

    return call
