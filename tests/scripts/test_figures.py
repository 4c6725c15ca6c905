"""The papers' figures are drawn one after the other, and one that fails keeps none of the others."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest

import scripts.papers
from scripts import figures, publish


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def call(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", [figures.__file__, *args, "--out", str(tmp_path / "out")])
        return figures.main()

    return call


def test_every_script_of_the_papers_is_run() -> None:
    found = pkgutil.walk_packages(scripts.papers.__path__, "scripts.papers.")
    names = {one.name.removesuffix(".__main__") for one in found if hasattr(importlib.import_module(one.name), "main")}
    assert {f"scripts.papers.{one.script}" for one in figures.FIGURES.values()} == names


@pytest.mark.slow
def test_one_that_fails_is_named_and_the_others_are_drawn(
    main: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = figures.Figure("recall", "Fig 0", "--shadows none")
    monkeypatch.setattr(figures, "FIGURES", {"wrong": wrong, "pipeline": figures.FIGURES["pipeline"]})
    assert main("--quick") == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("wrong") and line.endswith("exit code 2") for line in lines)
    assert any(line.startswith("pipeline") and "pipeline.png" in line for line in lines)
    assert (tmp_path / "out" / "pipeline-quick" / "pipeline.png").stat().st_size > 10_000
    assert main("pipeline") == 0


def test_one_that_does_not_end_is_killed(main: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(figures, "QUICK_LIMIT_S", 0.01)
    assert main("recall", "--quick") == 1
    assert "not ended after 0 s" in capsys.readouterr().out


def test_what_cannot_be(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for args, words in ((["fig99"], "FIGURE is fig99; allowed: pipeline, recall"), (["--quick", "--publish"], "whole")):
        with pytest.raises(SystemExit) as ended:
            main(*args)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err


def test_data_and_pictures_have_the_figures_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "DATA", tmp_path / "docs" / "data")
    (tmp_path / "docs").mkdir()
    out = tmp_path / "out"
    out.mkdir()
    facts = {"machine": "m", "command": f"a --out {out} --shadow nf4", "commit": "1", "when": "now", "rows": []}
    (out / "sweep_alignment.json").write_text(json.dumps(facts))
    (out / "sweep_alignment.png").write_bytes(b"x")
    (out / "sweep_alignment-other.png").write_bytes(b"x")
    (tmp_path / "docs" / "sweep_alignment_nf4.png").write_bytes(b"y")
    run = figures.Run("sweep_alignment_nf4", "", 1.0, "", out)
    put = [path.relative_to(tmp_path).as_posix() for path in figures.put_into_docs(run)]
    assert put == ["docs/data/sweep_alignment_nf4.json", "docs/sweep_alignment_nf4.png"], "no picture that no page has"
    assert json.loads((tmp_path / put[0]).read_text())["command"] == "a --shadow nf4"
    (out / "sweep_alignment.json").rename(out / "compare_systems-emulated.json")
    put = figures.put_into_docs(figures.Run("compare_systems-emulated", "", 1.0, "", out))
    assert put[0].name == "compare_systems-emulated.json", "the script has said so already"
