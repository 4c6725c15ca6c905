"""`odmoe chaos` prints its verdict also if it was interrupted, and the exit code says how it ended."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from odmoe.chaos.referee import Verdict
from odmoe.commands import chaos
from odmoe.commands.chaos import Chaos, run_chaos
from odmoe.commands.shared.exit import outcome
from odmoe.settings.settings import Settings


@pytest.mark.parametrize(
    ("violations", "interrupted", "code"), [([], "", 0), (["lost"], "", 1), ([], "all-frozen", 130)]
)
def test_the_verdict_comes_before_the_end(
    violations: list[str], interrupted: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    verdict = Verdict(1.0, 2, 3, 0, 0, [], {}, {}, None, violations, interrupted)
    monkeypatch.setattr(chaos, "prepare_process", lambda debug: None)
    monkeypatch.setattr("odmoe.api.checks.check_early", lambda settings: None)
    monkeypatch.setattr("odmoe.api.model.start_model", lambda settings, terminal: contextlib.nullcontext())
    monkeypatch.setattr(chaos, "_disturb", lambda model, asked, terminal: verdict)
    asked = Chaos(1.0, 0, None, 1, None, 2, as_json=True, quiet=True, debug=False)
    assert outcome(lambda: int(not run_chaos(Settings(model="m"), asked))) == code
    assert json.loads(capsys.readouterr().out)["violations"] == violations
