"""Which rows break a promise, how they are shown, and how the script ends."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from scripts.measure import serve
from scripts.service.promises import broken
from scripts.service.server import ServerFailed
from scripts.service.tables import TABLES, shown

MEMORY = {"rss_first": 90, "rss_most": 120, "rss_last": 100, "rss_growth_a_minute": 0.5, "rss_watched_s": 300.0}
LEFT = {"requests_left": 0.0, "threads_more": 0, "files_more": -1}
SAW = {"requests": 9, "whole": 8, "wrong": 0, "stuck": 0, "refused_429": 1, "no_retry_after": 0, "others": {}}
TIMES = {name: 0.1 for name in ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "gap_p50_s", "gap_p95_s", "gap_p99_s")}
ROWS: dict[str, dict[str, Any]] = {
    "load": {
        "part": "load",
        "share": 0.5,
        "rate": 2.0,
        "at_once_mean": 3.0,
        "at_once_most": 5,
        "tokens_per_s": 9.0,
        **SAW,
        **TIMES,
        **MEMORY,
        **LEFT,
    },
    "full queue": {"part": "full queue", "places": 8, **SAW, **LEFT},
    "cost": {
        "part": "cost",
        "requests": 8,
        "service_over_engine": 1.03,
        "ratio_p25": 1.0,
        "ratio_p75": 1.1,
        "cpu_over_engine": 1.2,
        "service_ms_a_token": 1.0,
        "engine_ms_a_token": 1.0,
        "service_cpu_ms_a_token": 1.0,
        "engine_cpu_ms_a_token": 1.0,
    },
    "vanish": {
        "part": "vanish",
        "how": "among others",
        "clients": 500,
        "mid_answer": 500,
        "early": 120,
        "others": {"429 queue_full": 3},
        "loads_in_flight": 0,
        "unknown": 0,
        "places": 128,
        "places_filled": 128,
        "last_load_p50_s": 0.0,
        "last_load_p99_s": 0.03,
        "last_load_worst_s": 0.09,
        "given_up_p50_s": 0.0,
        "given_up_p99_s": 0.1,
        "given_up_worst_s": 0.2,
        **MEMORY,
        **LEFT,
    },
    "fault": {
        "part": "fault",
        "case": "SIGTERM",
        "clients": "late",
        "count": 16,
        "saw": "503 stopping",
        "tokens": "none",
        "streaming_at_fault": 32,
        "longest_pause_s": None,
        "last_end_s": 1.0,
        "exit_code": 0,
    },
}


def test_rows_that_keep_every_promise() -> None:
    assert broken(ROWS.values()) == []


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        ("load", {"wrong": 1}, "load, 0.5 of what is served: 1 wrong"),
        ("load", {"stuck": 2}, "load, 0.5 of what is served: 2 stuck"),
        ("load", {"others": {"cut: no end": 3}}, "load, 0.5 of what is served: 3 clients saw: cut: no end"),
        ("load", {"no_retry_after": 1}, "load, 0.5 of what is served: 1 no retry after"),
        ("load", {"requests_left": 1.0}, "load, 0.5 of what is served: 1.0 requests left"),
        ("load", {"threads_more": 2}, "load, 0.5 of what is served: 2 threads more"),
        ("load", {"files_more": 2}, "load, 0.5 of what is served: 2 files more"),
        ("load", {"rss_growth_a_minute": 3.0}, "load, 0.5 of what is served: memory grows by 3.0% a minute"),
        ("full queue", {"refused_429": 0}, "a full queue: nobody was refused"),
        ("full queue", {"wrong": 1}, "a full queue: 1 wrong"),
        ("cost", {"service_over_engine": 1.08}, "cost, 8 at once: the service takes 8.0% longer than the engine alone"),
        ("vanish", {"mid_answer": 3}, "vanish, among others: only 3 of 500 clients left in mid-answer"),
        ("vanish", {"others": {"cut: no end": 2}}, "vanish, among others: 2 clients saw: cut: no end"),
        ("vanish", {"threads_more": 1}, "vanish, among others: 1 threads more"),
        ("vanish", {"loads_in_flight": 1}, "vanish, among others: 1 loads in flight"),
        ("vanish", {"unknown": 1}, "vanish, among others: 1 unknown"),
        ("vanish", {"places_filled": 126}, "vanish, among others: 2 of 128 places cannot be taken any more"),
        (
            "vanish",
            {"last_load_worst_s": 0.2},
            "vanish, among others: a load began 0.200 s after its client had gone",
        ),
        ("fault", {"saw": "whole", "tokens": "all the same"}, "SIGTERM: 16 late clients saw: whole"),
        (
            "fault",
            {"case": "killed worker", "clients": "streaming", "saw": "cut: no end"},
            "killed worker: 16 streaming clients saw: cut: no end",
        ),
        (
            "fault",
            {
                "case": "killed main node",
                "clients": "streaming",
                "saw": "error event: main_node_lost",
                "tokens": "others",
            },
            "killed main node: 16 streaming clients saw: error event: main_node_lost",
        ),
        ("fault", {"streaming_at_fault": 30}, "SIGTERM: 30 clients were streaming, not 32"),
        ("fault", {"exit_code": 1}, "SIGTERM: exit code 1"),
        ("fault", {"exit_code": None}, "SIGTERM: exit code None"),
        ("fault", {"requests_left": 2.0}, "SIGTERM: 2.0 requests left"),
    ],
)
def test_each_promise_can_be_broken(part: str, change: dict[str, Any], told: str) -> None:
    (line,) = broken([ROWS[part] | change])
    assert line.startswith(told)


def test_memory_under_load_is_judged_by_the_last_rate() -> None:
    grown, flat = ROWS["load"] | {"rss_growth_a_minute": 3.0}, ROWS["load"] | {"share": 1.3}
    assert broken([grown, flat]) == []
    assert broken([flat, grown]) == ["load, 0.5 of what is served: memory grows by 3.0% a minute"]


def test_memory_is_not_judged_of_a_short_time() -> None:
    assert broken([ROWS["load"] | {"rss_growth_a_minute": 30.0, "rss_watched_s": 20.0}]) == []


def test_every_part_has_a_table() -> None:
    assert set(ROWS) == set(TABLES)
    for part, row in ROWS.items():
        text = shown([row])
        assert text.startswith(part)
        assert all(column.name in text for column in TABLES[part])
    assert "503 stopping" in shown([ROWS["fault"]])


def test_flags_of_other_modes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.parse(["faults", "--parallel", "4"])
    assert "--parallel is for load, cost, vanish; the modes are faults" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        serve.parse(["loads"])
    args = serve.parse(["--parallel", "4", "--quick"])
    assert (args.modes, args.parallel, args.clients, args.cases) == (list(serve.MODES), 4, 40, list(serve.faults.CASES))
    assert serve.parse(["vanish"]).clients == 500


@pytest.mark.parametrize(("wrong", "code"), [(0, 0), (1, 1)])
def test_the_script_ends_with_1_where_a_promise_is_broken(
    wrong: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ROWS["load"] | {"wrong": wrong}
    monkeypatch.setitem(serve.MODES, "load", lambda args, rows: rows.append(row))
    monkeypatch.setattr(sys, "argv", [serve.__file__, "load", "--quick", "--out", str(tmp_path)])
    assert serve.main() == code
    told = capsys.readouterr().out
    assert ("BROKEN: load" in told) == bool(code)
    written = json.loads((tmp_path / "serve-load-quick.json").read_text())
    assert written["rows"] == [row]
    assert written["command"].endswith(f"serve load --quick --out {tmp_path}")


def test_what_was_found_before_a_failure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def two() -> AsyncIterator[dict[str, Any]]:
        yield ROWS["load"]
        raise ServerFailed("it has gone")

    monkeypatch.setitem(serve.MODES, "load", lambda args, rows: serve._take(two(), rows))
    monkeypatch.setattr(sys, "argv", [serve.__file__, "load", "--out", str(tmp_path)])
    assert serve.main() == 1
    assert "BROKEN: load ended early: ServerFailed: it has gone" in capsys.readouterr().out
    assert json.loads((tmp_path / "serve-load.json").read_text())["rows"] == [ROWS["load"]]
