"""Whole runs of the scripts that set systems beside each other, on the demo model."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = ["--quick", "--models", "models/demo-moe", "--prompts", "1", "--history", "1"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any) -> Callable[..., tuple[dict[str, Any], str]]:
    """`run(script, *flags)`: what it wrote as JSON, and what it said on both streams; its status must be 0."""

    def call(script: Any, *flags: str) -> tuple[dict[str, Any], str]:
        name = Path(script.__file__).stem
        monkeypatch.setattr(sys, "argv", [script.__file__, *SMALL, "--out", str(tmp_path), *flags])
        status = script.main()
        told = capfd.readouterr()
        assert status == 0, told.out + told.err
        written = tmp_path / f"{name}-quick"
        assert written.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        lines = [line for line in written.with_suffix(".csv").read_text().splitlines() if not line.startswith("#")]
        found = json.loads(written.with_suffix(".json").read_text())
        assert len(list(csv.DictReader(lines))) == len(found["rows"])
        return found, told.out + told.err

    return call
