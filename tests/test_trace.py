"""A trace of a real run agrees with the report, and with what cannot be otherwise."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from scheduler.timing.profile import find_profile
from scheduler.trace import Span, read_trace
from support.paths import ROOT

COUNT = 16


def run(store: Any, prompt: list[int], **settings: Any) -> tuple[Any, list[Span], int]:
    """An answer's report, what was traced, and how many experts its gates named in all."""
    cluster = EmbeddedCluster(Settings(model="demo", threads=1, trace="memory", **settings), store)
    named = 0
    try:
        experts = cluster.main.engine.experts

        def counted(visit: Any, hidden: Any, index: Any, weights: Any) -> Any:
            nonlocal named
            named += len(set(index.flatten().tolist()))
            return experts(visit, hidden, index, weights)

        cluster.main.engine.experts = counted  # type: ignore[method-assign]
        *_, last = cluster.generate(prompt, COUNT, ignore_eos=True)
        spans = cluster.trace()
        assert cluster.trace() == []
    finally:
        cluster.close()
    return last.report, spans, named


def length(spans: list[Span], what: str) -> float:
    return sum(span.end - span.start for span in spans if span.what == what)


@pytest.mark.parametrize("settings", [{"shadow": "none"}, {"shadow": "nf4"}, {"shadow": "nf4", "slots": 2}], ids=str)
def test_the_trace_is_what_happened(settings: dict[str, Any], demo_store: Callable[[str], Any], reference: Any) -> None:
    expected = reference("float32", 0, COUNT)
    report, spans, named = run(demo_store("float32"), expected.prompt, mini_batch=4096, **settings)
    assert report.token_ids == expected.tokens
    count = Counter(span.what for span in spans)
    assert count["token"] == COUNT
    assert count["layer"] == count["gate"] == count["wait"] == 8 * COUNT
    assert count["compute"] == named
    assert count["load"] <= report.loads <= count["load"] + count["given up"] + report.unused_loads
    assert sum(s.what == "transfer" and " to #" in s.label for s in spans) == named
    assert sum(s.what == "transfer" and s.label.startswith("from #") for s in spans) == named
    assert length(spans, "stall") == pytest.approx(report.stall_s + report.prefill_stall_s, rel=0.02, abs=0.02)
    shadow = settings["shadow"] != "none"
    assert (count["shadow"] >= 8 * (COUNT - 1)) is shadow
    assert (count["late"] > 0) is shadow
    for row in {span.row for span in spans if span.row.startswith("worker")}:
        for what in ("load", "compute"):  # one at a time
            mine = sorted((s for s in spans if (s.row, s.what) == (row, what)), key=lambda s: s.start)
            assert all(after.start >= before.end - 1e-4 for before, after in itertools.pairwise(mine))
    token = [span for span in spans if span.what == "token"]
    inside = [s for s in spans if s.row == "main" and s.what in ("layer", "gate", "wait", "head")]
    assert sum(s.end - s.start for s in inside) == pytest.approx(sum(s.end - s.start for s in token), rel=1e-6)


@pytest.mark.parametrize("slots", [1, 2])
def test_emulated_time_is_kept_and_said(slots: int, demo_store: Callable[[str], Any], reference: Any) -> None:
    """Every load and computation lasts as the profile has it, in the trace too, and tokens stay the same."""
    expected = reference("float32", 0, COUNT)
    profile = find_profile("rtx3090-1gbe")
    report, spans, _ = run(
        demo_store("float32"), expected.prompt, mini_batch=4096, shadow="nf4", profile="rtx3090-1gbe", slots=slots
    )
    assert report.token_ids == expected.tokens
    assert report.emulated == "rtx3090-1gbe"
    decode = [span for span in spans if span.what == "token"][1].start
    for span in spans:
        if span.what == "load":
            assert span.end - span.start >= profile.load_s - 1e-6
        if span.what == "compute" and span.start > decode:
            assert span.end - span.start == pytest.approx(profile.expert_s, abs=1e-6)
        if span.what == "layer" and span.start > decode:
            assert span.end - span.start >= profile.main_layer_s - 1e-6
    for row in {span.row for span in spans if span.row.startswith("worker")}:
        # its link and its processor do one thing at a time; with one slot, one of the two at a time
        lanes = [("load", "given up", "compute")] if slots == 1 else [("load", "given up"), ("compute",)]
        for lane in lanes:
            mine = sorted((s for s in spans if s.row == row and s.what in lane), key=lambda s: (s.start, s.end))
            assert all(after.start >= before.end - 1e-6 for before, after in itertools.pairwise(mine))
    for span in spans:  # a computation's expert was there by then
        if span.what == "compute":
            loads = [s.end for s in spans if (s.row, s.what, s.label) == (span.row, "load", span.label)]
            assert any(end <= span.start + 1e-6 for end in loads)


def test_from_the_command_line_to_a_picture(demo: Path, tmp_path: Path) -> None:
    import matplotlib.image

    odmoe = Path(sys.executable).with_name("odmoe")
    trace, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    flags = ["-q", "-m", demo, "-n", "6", "--shadow", "nf4", "--threads", "1", "--trace", trace, "HAMLET"]
    subprocess.run([odmoe, "generate", *flags], check=True, timeout=120, capture_output=True)
    spans, about = read_trace(trace)
    assert sum(span.what == "token" for span in spans) == 6
    assert (about["cluster"], about["shadow"], about["emulated"]) == ("embedded", "nf4", None)
    script = ROOT / "scripts" / "timeline.py"
    said = ""
    for token in range(5):  # which of them finds the shadow waiting is a matter of time
        command = [sys.executable, script, trace, "--token", str(token), "--out", picture]
        said += subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout
        if "late" in said:
            break
    assert "stalls" in said
    assert "late" in said
    image = matplotlib.image.imread(picture)
    assert image.shape[1] > 1000
    assert len({tuple(pixel) for row in image[::7, ::7] for pixel in row}) > 5
    wrong = subprocess.run([sys.executable, script, demo / "config.json"], check=False, timeout=60, capture_output=True)
    assert wrong.returncode == 1
    assert b"no trace of ours" in wrong.stderr
