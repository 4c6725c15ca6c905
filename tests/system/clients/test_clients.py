"""Clients that people use hold a conversation of two turns with a tool call, streamed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.machines.http_service import Served

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
PROGRAMS = sorted((Path(__file__).parent / "programs").glob("with_*.py"))
PROGRAM_S = 180
OLDER = ("with_instructor", "with_llama_index")
"""Those that need an older version of the openai package."""


def conversation(command: list[str], folder: Path) -> None:
    """A program of a client, which prints what it got."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # imports take long
    quiet = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        command, cwd=folder, env=kept | quiet, capture_output=True, text=True, timeout=PROGRAM_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["calls"] == [{"a": 19, "b": 23}]
    assert found["answer"] == "The sum of both is 42."
    assert found["pieces"] > 3


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem.removeprefix("with_"))
def test_a_client_of_python(served: Served, python_of: Callable[[str], Path], program: Path) -> None:
    requirements = "requirements-older.txt" if program.stem in OLDER else "requirements.txt"
    conversation([str(python_of(requirements)), program.name, served.url], program.parent)


def test_the_ai_sdk(served: Served, node: Path) -> None:
    conversation(["node", "with_ai_sdk.mjs", served.url], node)
