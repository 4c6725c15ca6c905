"""Lists that follow from declarations, and the keywords that are generated from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from odmoe.settings.derived import (
    FIXED_BY_UP,
    FIXED_WHILE_RUNNING,
    FROM_CLUSTER,
    HERE_ONLY,
    LASTING_ONLY,
    OUTPUT_FILES,
    SERVE_FLAGS,
    VERIFY_FLAGS,
)
from odmoe.settings.settings import Settings
from odmoe.settings.table import count, declaration_of, setting
from scripts import generate_keywords as script
from support.paths import ROOT


def test_every_list_has_settings_in_the_order_of_the_help() -> None:
    for names in (FIXED_WHILE_RUNNING, SERVE_FLAGS, VERIFY_FLAGS, HERE_ONLY):
        common = [declaration_of(Settings, name).common for name in names]
        assert names
        assert common == sorted(common, reverse=True)


def test_lists_agree_with_each_other() -> None:
    assert set(FROM_CLUSTER) <= set(FIXED_WHILE_RUNNING)
    assert not set(FIXED_BY_UP) & set(FIXED_WHILE_RUNNING)
    assert not {*HERE_ONLY, *LASTING_ONLY, *OUTPUT_FILES} & set(FIXED_WHILE_RUNNING), "nodes would be compared with it"
    assert set(FIXED_WHILE_RUNNING) <= set(SERVE_FLAGS), "serve starts nodes with it"


def test_a_use_that_is_not_there_is_an_error() -> None:
    with pytest.raises(TypeError, match="fixd"):
        setting(1, "a number", "About", heading="Cluster", fixd="running")
    with pytest.raises(TypeError, match="server"):
        count(1, "About", heading="Cluster", server=False)


def test_keywords_are_up_to_date_and_the_check_notices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.check() == 0
    committed = (ROOT / script.FILE).read_text(encoding="utf-8")
    there = tmp_path / script.FILE
    there.parent.mkdir(parents=True)
    there.write_text(committed.replace("    workers: int\n", "", 1), encoding="utf-8")
    assert script.check(tmp_path) == 1
    assert "odmoe/settings/keywords.py: not what the tables of settings give" in capsys.readouterr().err
