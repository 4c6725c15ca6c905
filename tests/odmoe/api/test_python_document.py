"""The examples of docs/python.md run, in their order."""

from __future__ import annotations

import re

import pytest

from support.machines.http_service import Served
from support.paths import ROOT

FILE = ROOT / "docs" / "python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def examples() -> list[tuple[int, str]]:
    """(line, code) of each block."""
    text = FILE.read_text()
    return [(text.count("\n", 0, found.start(1)) + 1, found.group(1)) for found in BLOCK.finditer(text)]


@pytest.mark.slow
def test_every_example_runs(
    service: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    # They take longer than all the rest; tests/odmoe/commands/test_plan.py has them.
    monkeypatch.setattr("scheduler.planning.plan.trials", lambda *_: [])
    monkeypatch.setattr("scheduler.planning.plan.TOGETHER", [])
    monkeypatch.setattr("scheduler.planning.plan.DRAFTED", [])
    namespace = {"__name__": "example", "url": service.url}
    found = examples()
    assert len(found) == FILE.read_text().count("```") / 2 >= 10, "every block is Python, and is run"
    for line, code in found:
        exec(compile("\n" * (line - 1) + code, str(FILE), "exec"), namespace)
    out = capsys.readouterr().out
    for part in ("of the experts predicted", "no chat template", "tokens/s", "given up", "did you mean workers?"):
        assert part in out
