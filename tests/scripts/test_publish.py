"""The docs' tables are those of the data beside them."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from scripts import publish
from scripts.doc_tables import readme
from scripts.doc_tables.papers import SYSTEMS_RUNS
from scripts.doc_tables.readme import STATED_RUNS
from scripts.doc_tables.tables import TABLES
from scripts.papers.compare_systems import runs as compare_runs

PAGES_TEXT = "".join(page.read_text() for page in publish.PAGES)


@pytest.mark.parametrize("page", publish.PAGES, ids=lambda page: page.name)
def test_every_table_is_that_of_its_data(page: Path) -> None:
    text = page.read_text()
    assert text == publish.with_tables(text), "run `.venv/bin/python -m scripts.publish`"


def test_every_table_stands_somewhere_and_all_data_is_used() -> None:
    named = [name for page in publish.PAGES for name in re.findall("<!-- data: (.+?) -->", page.read_text())]
    assert len(set(named)) == len(named)
    assert set(named) <= set(TABLES)
    assert all(table.title for name, table in TABLES.items() if name not in named), "the others are on the data's page"
    files = {path.stem for path in publish.DATA.glob("*.json")}
    assert files == {file for table in TABLES.values() for file in table.files}


def test_the_page_of_the_data_is_up_to_date() -> None:
    assert publish.DATA_PAGE.read_text() == publish.data_page(), "run `.venv/bin/python -m scripts.publish`"


def test_every_picture_is_on_a_page() -> None:
    docs = publish.ROOT / "docs"
    used = {name for page in publish.PAGES for name in re.findall(r"\]\((?:docs/)?([\w-]+\.png)\)", page.read_text())}
    assert {path.name for path in docs.glob("*.png")} == used


def test_the_page_of_measurements_is_short() -> None:
    assert (publish.ROOT / "docs" / "measurements.md").stat().st_size <= 40_000


def test_a_figure_that_is_not_that_of_the_data_is_found() -> None:
    page = next(page for page in publish.PAGES if "<!-- data: " in page.read_text())
    text = page.read_text()
    begin = text.index("| --- |", text.index("<!-- data: "))
    at = re.compile(r"\d").search(text, begin)
    assert at is not None
    wrong = text[: at.start()] + str((int(at[0]) + 1) % 10) + text[at.end() :]
    assert publish.with_tables(wrong) == text != wrong


def _said(row: str) -> str:
    """README's row of results."""
    [line] = [one for one in publish.PAGES[0].read_text().splitlines() if one.startswith(f"| {row} |")]
    return line


def test_the_readme_has_the_fitted_speed_of_the_data() -> None:
    fit = publish.load("fits")["rows"][0]
    line = _said("Speed")
    assert f"{fit['at_once']:.2f} tokens/s" in line
    assert f"**fitted** so that the paper's policy (`--departure late`) gives {fit['late']:.2f}" in line


def _timed() -> dict[str, list[dict[str, Any]]]:
    """Rows of each run of README's timed figures."""
    return {file: publish.load(file)["rows"] for file in readme.FILES}


def test_the_readme_states_what_its_runs_hold() -> None:
    runs = readme.ratios(_timed())
    shares = ("a quarter of the experts", "all experts")
    capped, whole = (f"Beside other engines, {share} in memory" for share in shares)
    peers, drafts = _said(capped) + _said(whole), _said("Drafts")
    ratio = re.compile(r"(\d\S* \(\S+ to \S+\)) (?:times|of) (llama\.cpp|accelerate|Transformers)")
    said = {peer: of for of, peer in ratio.findall(peers)}
    assert sorted(said) == ["Transformers", "accelerate", "llama.cpp"]
    for peer, of in said.items():
        [found] = [ratio for name, ratio in runs.items() if name.startswith(f"decoding over {peer}")]
        assert of == str(found.stated), peer
    [found] = [ratio for name, ratio in runs.items() if "--draft auto" in name]
    assert f"decodes {found.stated} times as fast" in drafts


def test_a_ratio_of_the_readme_has_five_turns_or_more() -> None:
    for name, ratio in readme.ratios(_timed()).items():
        assert ratio.stated.count >= 5, name
        assert max(len(run.turns) for run in ratio.runs) >= 5, name
        assert any(run.others_cores is not None for run in ratio.runs), "the machine was seen to be idle, or not"


def test_the_runs_of_the_readme_are_of_one_machine_and_hours_apart() -> None:
    for files in (readme.PEERS, readme.KILLS, SYSTEMS_RUNS):
        facts = [publish.load(file) for file in files]
        assert len({one["machine"] for one in facts}) == 1
        first, second, *later = (datetime.strptime(one["when"], "%Y-%m-%d %H:%M") for one in facts)
        assert second - first >= timedelta(minutes=55), files
        assert all(one > second for one in later), files
        assert max(later) - first >= timedelta(hours=2), files


def test_the_readme_says_how_many_of_its_ratios_a_run_hours_later_found_again() -> None:
    within = [ratio.later[-1][1] for ratio in readme.ratios(_timed()).values() if ratio.later]
    last = compare_runs.later_checks(_systems_runs(), 25, STATED_RUNS)[-1]
    within += [last[one] for one in ("smoe", "importance", "fate")]
    assert f"the medians of {sum(within)} of {len(within)} ratios lie within" in " ".join(
        publish.PAGES[0].read_text().split()
    )


def test_the_docs_say_where_the_two_runs_of_the_readme_do_not_agree() -> None:
    alike = [ratio.is_alike for ratio in readme.ratios(_timed()).values() if ratio.later]
    text = (publish.ROOT / "docs" / "measurements.md").read_text()
    assert f"the first two runs agree on {sum(alike)} of {len(alike)} ratios to peers" in " ".join(text.split())


def test_the_readme_has_the_loads_recall_and_pauses_of_the_data() -> None:
    loads = {
        (row["model"], row["requests"]): row["loads_a_token"]
        for row in publish.load("requests")["rows"]
        if row["case"] == "od-moe"
    }
    assert loads["demo-wide", 8] / loads["demo-wide", 1] == pytest.approx(1 / 3, abs=0.02)
    assert loads["A", 8] / loads["A", 1] == pytest.approx(2 / 3, abs=0.02)
    assert "a third of the loads a token (2 of 8 experts) to two thirds (8 of 64)" in _said("Several requests")
    [recall] = [
        row["recall"]
        for row in publish.load("recall")["rows"]
        if (row["shadow"], row["token_period"], row["kv_period"]) == ("int8", 1, 1)
    ]
    assert f"predicts {recall:.1%}".replace("%", " %") in _said("Recall")
    kills = [row for file in readme.KILLS for row in publish.load(file)["rows"]]
    assert all(row["tokens_equal"] for row in kills)
    longest, calm = (max(seconds) for seconds in readme.pauses(_timed()).values())
    assert f"pauses for {longest:.2f} s at most (the longest pause without a kill: {calm:.2f} s)" in _said("Failover")


def _systems_runs() -> list[dict[str, Any]]:
    return [{"file": file, **row} for file in SYSTEMS_RUNS for row in publish.load(file)["rows"]]


def test_the_readme_has_the_systems_of_two_runs() -> None:
    line = _said("Cache and prefetch, a quarter of the experts cached")
    ratios = re.findall(r"(\S+ \(\S+ to \S+\))[^`]*`(\w+)`", line)
    said = {system: ratio for ratio, system in ratios}
    rows = _systems_runs()
    stated = {
        one: str(compare_runs.stated_interval(rows, 25, one, STATED_RUNS)) for one in ("smoe", "importance", "fate")
    }
    assert said == stated


def test_the_docs_say_how_many_medians_of_later_runs_lie_within() -> None:
    rows = _systems_runs()
    third, fourth = compare_runs.later_checks(rows, 25, STATED_RUNS)
    alike = compare_runs.agreeing(rows, 25, STATED_RUNS)
    text = (publish.ROOT / "docs" / "measurements.md").read_text()
    assert len(third) >= 4
    assert len(fourth) == len(alike)
    assert f"**{sum(fourth.values())} of {len(fourth)} medians of run 4 lie within**" in text
    assert f"{sum(third.values())} of {len(third)} of run 3" in text
    assert f"the two agree for {sum(alike.values())} of {len(alike)} systems" in text


def test_every_system_is_emulated_as_it_is_simulated() -> None:
    rows = publish.load("agreement-systems")["rows"]
    assert len(rows) >= 18
    for row in rows:
        for ratio in (row["ratio"], row["ttft_ratio"]):
            assert 0.95 <= ratio <= 1.05, row


def test_data_says_where_it_is_from() -> None:
    for name in sorted({file for table in TABLES.values() for file in table.files}):
        facts = publish.load(name)
        assert all(facts[fact] for fact in publish.FACTS), name
        assert facts["command"].startswith(".venv/bin/python -m scripts."), name
        assert not re.search(r"(^|[\s=])/|--quick", facts["command"]), f"{name}: a whole run, no paths of this machine"
        assert not [fact for fact, value in facts.items() if str(value).startswith("/")], f"{name}: paths"


def test_no_measurement_stands_without_its_data() -> None:
    text = (publish.ROOT / "docs" / "measurements.md").read_text()
    kept = re.sub(r"<!-- data: .*?<!-- /data -->", "", text, flags=re.S)
    assert not re.findall(r"^\| ?---", kept, re.M)


def test_no_picture_stands_without_data_in_its_section() -> None:
    text = (publish.ROOT / "docs" / "measurements.md").read_text()
    sections = re.split(r"^#{2,3} ", text, flags=re.M)
    assert any("![" in section for section in sections)
    assert not [section[:40] for section in sections if "![" in section and "<!-- data: " not in section]


def test_what_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "DATA", tmp_path / "data")
    result = tmp_path / "found.json"
    facts = {"machine": "m", "command": "a --out /b c --fresh -d", "commit": "1", "when": "now", "rows": [{"x": 1}]}
    result.write_text(json.dumps(facts))
    copied = publish.copy(result, "new")
    assert json.loads(copied.read_text()) == {**facts, "command": "a c -d"}
    result.write_text(json.dumps(facts | {"commit": ""}))
    with pytest.raises(SystemExit, match="has no commit"):
        publish.copy(result, "new")
