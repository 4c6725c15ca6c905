"""The docs' tables are those of the data beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts import publish
from scripts.doc_tables.tables import TABLES
from scripts.papers import compare_show


@pytest.mark.parametrize("page", publish.PAGES, ids=lambda page: page.name)
def test_every_table_is_that_of_its_data(page: Path) -> None:
    text = page.read_text()
    assert text == publish.written(text), "run `.venv/bin/python -m scripts.publish`"


def test_every_table_stands_somewhere_and_all_data_is_used() -> None:
    named = [name for page in publish.PAGES for name in re.findall("<!-- data: (.+?) -->", page.read_text())]
    assert sorted(named) == sorted(TABLES)
    files = {path.stem for path in publish.DATA.iterdir()}
    assert files == {file for table in TABLES.values() for file in table.files}


def test_a_figure_that_is_not_that_of_the_data_is_found() -> None:
    page = next(page for page in publish.PAGES if "<!-- data: " in page.read_text())
    text = page.read_text()
    begin = text.index("| --- |", text.index("<!-- data: "))
    at = re.compile(r"\d").search(text, begin)
    assert at is not None
    wrong = text[: at.start()] + str((int(at[0]) + 1) % 10) + text[at.end() :]
    assert publish.written(wrong) == text != wrong


def _ratios(name: str, budget: int) -> dict[str, str]:
    rows = [row for row in publish.load(name)["rows"] if row["budget"] == budget]
    return {row["system"]: str(compare_show.interval("tpot")(row)) for row in rows}


def test_the_readme_has_the_figures_of_the_data() -> None:
    [line] = [one for one in publish.PAGES[0].read_text().splitlines() if one.startswith("| Cache and prefetch |")]
    said = {system: ratio for ratio, system in re.findall(r"(\S+ \(\S+ to \S+\))[^`]*`(\w+)`", line)}
    of = _ratios("compare_systems", 25)
    assert said == {system: of[system] for system in ("smoe", "importance", "fate")}


@pytest.mark.parametrize("name", sorted({file for table in TABLES.values() for file in table.files}))
def test_data_says_where_it_is_from(name: str) -> None:
    facts = publish.load(name)
    assert all(facts[fact] for fact in publish.FACTS)
    assert facts["command"].startswith(".venv/bin/python -m scripts.")
    assert not re.search(r"(^|[\s=])/|--quick", facts["command"]), "a whole run, without this machine's own paths"


def test_no_measurement_stands_without_its_data() -> None:
    text = (publish.ROOT / "docs" / "measurements.md").read_text()
    kept = re.sub(r"<!-- data: .*?<!-- /data -->", "", text, flags=re.S)
    assert not re.findall(r"^\| ?---", kept, re.M)


def test_what_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "DATA", tmp_path / "data")
    result = tmp_path / "found.json"
    facts = {"machine": "m", "command": "a --out /b c -d", "commit": "1", "when": "now", "rows": [{"x": 1}]}
    result.write_text(json.dumps(facts))
    copied = publish.copy(result, "new")
    assert json.loads(copied.read_text()) == {**facts, "command": "a c -d"}
    result.write_text(json.dumps(facts | {"commit": ""}))
    with pytest.raises(SystemExit, match="has no commit"):
        publish.copy(result, "new")
