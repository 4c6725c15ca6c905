"""The figures of the service's measurements, from what clients saw and what the engine recorded."""

from __future__ import annotations

import io
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from scheduler import types as t
from scripts.service.clients import Question, Seen
from scripts.service.cost import summary
from scripts.service.faults import pauses, rows_of
from scripts.service.load import outcomes, percentile, times
from scripts.service.recorded import LoadRecord, Loads, read_record
from scripts.service.server import resident_bytes
from scripts.service.vanish import stops
from scripts.service.watching import Held, MemoryWatch, left, slope

LIMIT_S = 60.0
ASKED = Question("p", 3)


def seen(text: str = "x", **fields: Any) -> Seen:
    values = {"due": 0.0, "status": 200, "done": True, "tokens": 3, "ended": 4.0, **fields}
    return Seen(ASKED, text=text, **values)


def test_percentiles_are_those_of_the_statistics_module() -> None:
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6, 5.3]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for share in (1, 25, 50, 95, 99):
        assert percentile(values, share) == pytest.approx(cuts[share - 1])
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([], 50) is None


def test_outcomes() -> None:
    every = [
        seen(times=[2.0]),
        seen("y"),
        seen(status=429, error="queue_full", retry_after="1"),
        seen(status=429, error="queue_full"),
        seen(error="stuck", done=False),
        seen(error="ReadError", done=False),
    ]
    assert outcomes(every, {ASKED: "x"}) == {
        "requests": 6,
        "whole": 1,
        "wrong": 1,
        "stuck": 1,
        "refused_429": 2,
        "no_retry_after": 1,
        "others": {"cut: ReadError": 1},
    }


def test_times_of_whole_answers() -> None:
    row = times([seen(due=1.0, times=[2.0, 2.5, 3.5]), seen(due=0.0, times=[4.0])], 2.0)
    assert (row["tokens_per_s"], row["at_once_mean"]) == (3.0, 3.5)
    assert (row["ttft_p50_s"], row["gap_p50_s"], row["longest_gap_s"]) == (2.5, 0.75, 1.0)


def test_the_cost_is_the_median_ratio_of_turns() -> None:
    def turn(service: float, engine: float) -> dict[str, float]:
        return {"service_s": service, "engine_s": engine, "service_cpu_s": 2 * service, "engine_cpu_s": service}

    found = summary([turn(1.0, 1.0), turn(2.2, 2.0), turn(9.0, 3.0)], 10)
    assert found["service_over_engine"] == pytest.approx(1.1)
    assert (found["cpu_over_engine"], found["engine_ms_a_token"]) == (2.0, 200.0)


def test_memory_is_watched_until_the_process_has_ended() -> None:
    sizes = iter([10, 20, 30, 20, None])
    ended = threading.Event()

    def size() -> int | None:
        found = next(sizes)
        if found is None:
            ended.set()
        return found

    with MemoryWatch(size, period_s=0.001) as memory:
        assert ended.wait(LIMIT_S)
    facts = memory.facts()
    assert (facts["rss_first"], facts["rss_most"], facts["rss_last"]) == (10, 30, 20)


def test_memory_counts_children_and_ends_with_the_process() -> None:
    """A process that starts another one of its size, and ends when its input does."""
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'print(1, flush=True); input()']).wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        whole, own = resident_bytes(process.pid), psutil.Process(process.pid).memory_info().rss
        assert whole is not None
        assert whole > 1.2 * own
        process.stdin.close()
        process.wait(LIMIT_S)
        assert resident_bytes(process.pid) is None


def test_slopes() -> None:
    points = [(0.0, 10), (1.0, 13), (2.0, 12), (5.0, 30)]
    assert slope(points) == pytest.approx(statistics.linear_regression(*zip(*points, strict=True)).slope)
    assert slope(points[:1]) == 0.0


def test_what_is_left() -> None:
    assert left(Held(0, 5, 20), Held(1, 7, 19)) == {"requests_left": 1, "threads_more": 2, "files_more": -1}


def test_the_last_load_counts_from_the_moment_at_which_its_client_left() -> None:
    def gone(tokens: int, when: float | None, streamed: bool = True) -> Seen:
        return Seen(Question("p", tokens), 0.0, times=[1.0] if streamed else [], left=when)

    clients = [gone(1, 10.0), gone(2, 20.0), gone(3, 30.0), gone(4, 40.0, streamed=False), gone(5, None), gone(6, 60.0)]
    record = [
        Loads(1, 3, 4.0, 5.0),  # of a client before it that asked for as many tokens
        Loads(1, 3, 9.5, 10.02),
        Loads(2, 3, 20.05, 20.25),
        Loads(3, 0, None, 30.0),
        Loads(4, 3, 45.0, 45.0),
        Loads(5, 3, 50.0, 50.0),
    ]
    found = stops(clients, record)
    assert (found["unknown"], found["loaded_afterwards"]) == (1, 1)
    assert found["last_load_worst_s"] == pytest.approx(0.05)
    assert found["last_load_p50_s"] == pytest.approx(0.025)
    assert found["given_up_worst_s"] == pytest.approx(0.25)


class Core:
    """As much of a scheduler as is recorded: figures by request."""

    def __init__(self, **loads: int) -> None:
        self.stats = {int(name[1:]): type("Stats", (), {"loads": count})() for name, count in loads.items()}

    def snapshot(self) -> Any:
        return type("Snapshot", (), {"loads": (7,)})()


def test_the_record_of_loads(tmp_path: Path) -> None:
    file = io.StringIO()
    record = LoadRecord(file)
    for number, tokens in ((1, 100), (2, 200)):
        record.opened(number, type("Sequence", (), {"max_new_tokens": tokens})())  # type: ignore[arg-type]
    load = t.Load(0, 0, t.ExpertId(0, 0), 1)
    record.handled(Core(r1=2, r2=0), t.RequestOpened(2, 5), [load])  # type: ignore[arg-type]
    record.handled(Core(r1=3, r2=0), t.RequestOpened(2, 5), [])  # type: ignore[arg-type]
    record.handled(Core(r1=2, r2=0), t.RequestClosed(1), [])  # type: ignore[arg-type]
    record.handled(Core(r2=1), t.RequestClosed(1), [load])  # type: ignore[arg-type]
    record.handled(Core(), t.RequestClosed(2), [])  # type: ignore[arg-type]
    path = tmp_path / "record"
    path.write_text(file.getvalue())
    first, second = read_record(path)
    assert (first.max_new_tokens, first.loads, first.open, first.in_flight) == (100, 2, 1, 1)
    assert (second.max_new_tokens, second.loads, second.open) == (200, 1, 0)
    assert first.last_load is not None
    assert second.last_load is not None
    assert first.last_load <= first.closed <= second.last_load <= second.closed


def test_a_row_for_each_thing_that_clients_saw() -> None:
    every = [
        seen(times=[1.0, 2.0, 5.0], ended=5.0),
        seen(times=[1.0, 9.0], ended=9.0),
        seen("", status=503, error="stopping", ended=2.0),
    ]
    rows = rows_of("late", every, {ASKED: "x"}, 1.5, {"case": "SIGTERM"})
    told = [(row["clients"], row["count"], row["saw"], row["tokens"]) for row in rows]
    assert told == [("late", 2, "whole", "all the same"), ("late", 1, "503 stopping", "none")]
    assert (rows[0]["longest_pause_s"], rows[0]["last_end_s"]) == (8.0, 7.5)
    assert rows[1]["longest_pause_s"] is None


def test_pauses_of_before_do_not_count() -> None:
    assert pauses(seen(times=[0.0, 5.0, 6.0, 8.0]), 5.0) == [1.0, 2.0]
