"""The help of bench, train-predictor and verify."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.machines.cli import CommandLine

TOOLS = ("bench", "train-predictor", "verify")
HEAVY = ("torch", "transformers", "ray", "grpc", "matplotlib", "numpy")


@pytest.mark.slow
@pytest.mark.parametrize("command", TOOLS)
def test_help_fits_80_columns_and_imports_no_library(command: str) -> None:
    code = (
        "import sys\n"
        f"for name in {HEAVY}: sys.modules[name] = None\n"
        f"sys.argv = ['odmoe', {command!r}, '--help']\n"
        "from odmoe.command_line import run\n"
        "sys.exit(run())\n"
    )
    environment = os.environ | {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(f"Usage: odmoe {command}" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert not any("…" in line or line.rstrip().endswith("--") for line in lines), "cut off"


def test_the_list_of_commands_names_them(cli: CommandLine) -> None:
    listed = cli("--help").out
    assert all(f" {command} " in listed for command in TOOLS)
