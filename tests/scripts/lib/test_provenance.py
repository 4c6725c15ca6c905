"""The command that stands beside a figure is one that runs."""

from __future__ import annotations

import sys

import pytest

from scripts.lib import provenance
from scripts.papers import recall
from scripts.testbed import __main__ as testbed


@pytest.mark.parametrize(
    ("program", "flags", "command"),
    [
        (recall.__file__, ["--quick"], "-m scripts.papers.recall --quick"),
        (recall.__file__, ["--out", "a b"], "-m scripts.papers.recall --out 'a b'"),
        (testbed.__file__, ["up"], "-m scripts.testbed up"),
        ("elsewhere/mine.py", [], "elsewhere/mine.py"),
    ],
)
def test_the_command_is_the_module_that_was_run(
    program: str, flags: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program, *flags])
    assert provenance.command() == f".venv/bin/python {command}"
