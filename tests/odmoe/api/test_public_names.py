"""`import odmoe` names everything and imports nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

import odmoe
from support.paths import ROOT

HEAVY = ("torch", "transformers", "ray", "grpc", "numpy", "pydantic", "httpx2", "fastapi", "yaml", "msgpack", "rich")


def in_a_fresh_interpreter(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_import_costs_nothing() -> None:
    program = (
        "import sys\n"
        f"for name in {HEAVY}: sys.modules[name] = None\n"
        "import odmoe\n"
        "print([name for name in sys.modules if name.startswith('odmoe.')], 'load' in dir(odmoe))\n"
    )
    assert in_a_fresh_interpreter(program) == "[] True"


def test_a_simulation_needs_no_tensors() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'ray', 'grpc', 'numpy', 'httpx2'): sys.modules[name] = None\n"
        "import odmoe\n"
        "print(odmoe.simulate(tokens=2).tokens)\n"
    )
    assert in_a_fresh_interpreter(program) == "[2]"


def test_what_type_checkers_see_is_what_there_is() -> None:
    tree = ast.parse((ROOT / "odmoe" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == odmoe._HOME
    assert sorted(seen) == sorted(odmoe.__all__)
    assert set(seen) <= set(dir(odmoe))
    for name, home in seen.items():
        found = getattr(odmoe, name)
        assert found is (import_module("scheduler.errors") if name == "errors" else getattr(import_module(home), name))


def test_what_users_meet_has_a_name() -> None:
    """Every class that an answer, a plan or a simulation gives whoever asks for it."""
    program = "from odmoe import *\ndef of(answer: Completion, model: Model) -> Report: return answer.report\n"
    names: dict[str, Any] = {}
    exec(compile(program, "a user's program", "exec", dont_inherit=True), names)
    assert names["errors"].ODMoEError is names["ODMoEError"]


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = odmoe.laod
