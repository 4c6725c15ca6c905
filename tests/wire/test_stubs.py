"""The committed stubs are those that the source gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import generate_stubs as script
from support.paths import ROOT


def test_stubs_are_up_to_date_and_the_check_notices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.check() == 0
    (tmp_path / "wire").mkdir()
    for name in script.STUBS:
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / script.STUBS[0]).write_text("# stale")
    assert script.check(tmp_path) == 1
    assert "wire/odmoe_pb2.py: not what proto/odmoe.proto gives" in capsys.readouterr().err
