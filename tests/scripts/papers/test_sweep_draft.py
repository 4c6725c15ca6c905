"""Figures of simulated drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.timing.profile import find_profile
from scripts.papers import sweep_draft

SMALL = replace(find_profile("rtx3090-1gbe"), layers=4)


def test_right_drafts_are_all_accepted_and_a_block_gives_its_rows() -> None:
    none, some = (sweep_draft.figures(SMALL, "fp16", None, draft, 1, 60, False) for draft in (0, 3))
    assert (none["accepted"], none["rows"]) == (None, 1.0)
    assert some["accepted"] == 1.0
    assert 2 < some["rows"] <= 4
    assert some["loads_a_token"] < none["loads_a_token"]


@pytest.mark.parametrize("flags", [["--draft", "64"], ["--acceptance", "1.5"], ["--tokens", "1"]])
def test_other_values_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sweep_draft.parse(flags)
    assert "allowed" in capsys.readouterr().err
