"""The figures of answers: in their order, only where they mean something, aligned, within 80 columns."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest

from main_node.figures import ClusterFigures
from main_node.report import Report
from odmoe.commands.generate import progress_of
from odmoe.commands.texts.report_text import show_answer, show_answers
from odmoe.settings.settings import Settings
from odmoe.terminal import Terminal
from support.machines.cli import Screen

MEMORY: dict[str, int | list[int]] = {"main": 2_000_000, "shadow": 0, "workers": [300_000] * 8}
ON_DEMAND: dict[str, Any] = {
    "token_ids": [1, 2, 3],
    "prompt_tokens": 2,
    "new_tokens": 3,
    "ttft_s": 0.5,
    "decode_s": 0.5,
    "shadow_wait_s": 0.0,
    "longest_gap_s": 0.25,
    "decode_tokens_per_s": 4.0,
    "tokens_per_s": 3.0,
    "recall": None,
    "recall_in_time": None,
    "drafted": 0,
    "accepted": 0,
    "recall_by_token": [],
    "unpredicted": 0,
    "recall_complete": True,
    "loads": 176,
    "prefill_loads": 64,
    "reloads": 112,
    "named": 112,
    "hits": 0,
    "host_computed": 0,
    "unused_loads": 0,
    "late_predictions": 0,
    "stall_s": 0.125,
    "prefill_stall_s": 0.0,
    "memory_bytes": MEMORY,
    "memory_of_whole": 0.22,
    "resident_experts_max": [1] * 8,
    "bytes_loaded": 56_000_000,
    "finish": "length",
    "doubted": False,
    "ignored": [],
    "exact": True,
    "requests_per_step": 1.0,
    "prefill_passes": 1,
    "kernel": "exact",
    "seed": None,
    "emulated": None,
    "wire_bytes_per_token": None,
}
CLUSTER: dict[str, Any] = {
    "lost": [],
    "rejoined": [],
    "suspects": [],
    "computations": 0,
    "audits": 0,
    "audit_share": 0.0,
    "audits_missed": {},
    "loads_checked": 0.96,
    "forms": [""],
    "smaller_forms": [],
    "form_costs": {},
    "prediction_step_s": None,
}


def report(**changed: Any) -> Report:
    cluster = ClusterFigures(**(CLUSTER | {name: changed.pop(name) for name in CLUSTER if name in changed}))
    return Report(**(ON_DEMAND | changed), cluster=cluster)


def printed(show: Callable[[Terminal], None], tty: bool = False) -> list[str]:
    """The lines on standard error, which is a terminal or a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", err := Screen(tty=tty))
        patch.setattr(sys, "stdout", out := io.StringIO())
        patch.setenv("COLUMNS", "80")
        patch.setenv("NO_COLOR", "1")
        patch.setenv("TERM", "dumb" if not tty else "xterm")
        show(Terminal())
    assert out.getvalue() == ""
    return err.text().replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()


def one(tty: bool = False, served: dict[str, Any] | None = None, **changed: Any) -> dict[str, str]:
    """What is printed of one answer, by label."""
    settings = Settings(model="m", **(served or {}))
    lines = printed(lambda terminal: show_answer(terminal, report(**changed), settings, "od-moe"), tty)
    assert lines[:2] == ["", "od-moe (embedded)"]
    assert all(len(line) <= 80 for line in lines), lines
    found = [line.strip().split("  ", 1) for line in lines[2:] if line]
    return {label: text.strip() for label, text in found}


def test_what_the_user_wants_comes_first() -> None:
    found = one()
    assert list(found)[:5] == ["speed", "first token", "memory", "output", "tokens"]
    assert found["speed"] == "4.0 tokens/s decoding, 3.0 overall"
    assert found["memory"] == "4.4 MB, 22% of the whole model's 20.0 MB"
    assert found["output"].startswith("exact")


def test_without_a_predictor_and_a_cache_neither_is_spoken_of() -> None:
    """Every load of such a system begins after its gate: that is no failure."""
    assert {"predicted", "not predicted", "hits", "reloads", "shadow", "not used"}.isdisjoint(one())
    assert "hits" in one(served={"residency": "lru"})


def test_predictions_that_came_late_and_never() -> None:
    found = one(recall=0.75, recall_in_time=0.0, unpredicted=14, unused_loads=3)
    assert found["predicted"] == "75.0% of the experts used, none before the gate fired"
    assert found["not predicted"].startswith("14 experts")
    assert found["reloads"].startswith("112 began after the gate,")
    assert found["not used"].startswith("3 loads")
    assert "none" not in one(recall=0.75, recall_in_time=0.5)["predicted"]
    assert "drafts" not in found
    assert one(drafted=1, accepted=0)["drafts"] == "0 of 1 drafted token were right"
    assert one(drafted=1200, accepted=1034)["drafts"] == "1,034 of 1,200 drafted tokens were right"
    lost = one(recall=None, recall_in_time=0.0, unpredicted=112, lost=["shadow"])
    assert "predicted" not in lost
    assert (lost["not predicted"].split(" in ")[0], lost["lost"]) == ("112 experts", "shadow")


def test_times_name_the_profile_that_they_are_of() -> None:
    found = one(emulated="rtx3090-1gbe")
    timed = {label for label, text in found.items() if text.endswith("(emulated: rtx3090-1gbe)")}
    assert timed == {"speed", "first token", "stalls"}


@pytest.mark.parametrize(
    ("profile", "lost_s", "slower"),
    [("rtx3090-1gbe", 0.5, 4), ("rtx3090-1gbe@3", 0.5, 12), ("rtx3090-1gbe", 0.05, 4), ("rtx3090-1gbe", 1.0, 20)],
)
def test_a_machine_that_cannot_keep_up_with_the_profile_is_told_what_to_do(
    profile: str, lost_s: float, slower: int
) -> None:
    found = one(emulated=profile, lost_s=lost_s)
    told = f"this machine added {lost_s:.2f} of 1.00 s; try --profile rtx3090-1gbe@{slower}"
    assert found["too slow"] == told
    fast, slow = report(emulated=profile, lost_s=0.0), report(emulated=profile, lost_s=lost_s)
    both = {1: fast, 2: slow}
    text = printed(lambda terminal: show_answers(terminal, both, ["a", "b"], 1.0, Settings(model="m"), "od-moe"))
    assert any(told in line for line in text), "of the answer that lost most"


@pytest.mark.parametrize("lost_s", [None, 0.0, 0.009])
def test_a_machine_that_keeps_up_is_not_spoken_of(lost_s: float | None) -> None:
    assert "too slow" not in one(emulated="rtx3090-1gbe", lost_s=lost_s)


def test_an_answer_that_may_differ_says_why() -> None:
    text = one(exact=False, inexact=["--router expert-cache"])["output"]
    assert text == "approximate, because of --router expert-cache"
    both = one(exact=False, inexact=["--router skip", "--precision int4"])["output"]
    assert both == "approximate, because of --router skip and --precision int4"
    found = one(exact=False, inexact=["ignored generation settings"], ignored=["num_beams=4"])
    assert found["output"] == "approximate, because of ignored generation settings"
    assert found["ignored"].startswith("num_beams=4 of the model's settings")


def test_it_names_the_device_of_each_role() -> None:
    gpu, other = "cuda:0 (H200)", "cuda:1 (H200)"
    both = {"main": gpu, "workers": [gpu, gpu]}
    assert one(devices=both)["devices"] == one(devices=both | {"shadow": gpu})["devices"] == f"{gpu} for all nodes"
    assert one(devices=both | {"shadow": other})["devices"] == f"main {gpu}, workers {gpu}, shadow {other}"
    mixed = one(devices={"main": gpu, "workers": [gpu, "cpu (Xeon)"]}, exact=False, inexact=["devices"])
    assert mixed["devices"] == f"main {gpu}, workers {gpu} and cpu (Xeon)"
    assert mixed["output"] == "approximate, because of devices"


def test_the_forms_that_were_loaded_and_why_no_smaller_ones() -> None:
    def precision(system: str, **changed: Any) -> str:
        return one(served={"system": system}, **changed)["precision"]

    assert "precision" not in one()
    both = ["int4", "int2"]
    assert precision("fate", forms=both, smaller_forms=both) == "int4, int2"
    assert precision("hobbit", forms=["", "int4"], smaller_forms=["int4"]) == "full, int4"
    assert precision("fate") == "full: all experts fit, so smaller forms would save nothing"
    slow = {"": (0.0104, 0.0), "int4": (0.003, 0.0091), "int2": (0.002, 0.004)}
    found = precision("fate", smaller_forms=both, form_costs=slow)
    assert found == "full, 10.40 ms a load; int4 3.00 ms and 9.10 ms to restore"
    # no token of these answers needed a smaller one
    assert precision("hobbit", smaller_forms=["int4"]) == "full"
    assert precision("hobbit", smaller_forms=["int4"], form_costs=slow | {"int4": (0.003, 0.001)}) == "full"


def test_how_it_ended_and_what_it_was_drawn_with() -> None:
    assert one(finish="context")["tokens"] == "3 out, 2 in, ended because the context of 5 tokens is full"
    assert one(finish="stop_text", seed=7) | {"tokens": "3 out, 2 in, ended by a stop text"} == one(
        finish="stop_text", seed=7
    )
    assert one(seed=7)["seed"].startswith("7;")


def test_workers_with_wrong_outputs_are_named() -> None:
    assert "suspect" not in one()
    assert one(suspects=["worker 2: is not finite"])["suspect"] == "worker 2: is not finite"


def test_audits_say_what_was_asked_what_was_done_and_why_less() -> None:
    half = {"audits": 527, "computations": 1603, "audit_share": 0.5, "audits_missed": {"busy": 407, "large": 3}}
    found = one(served={"audit": 0.5}, **half)
    assert found["audits"] == "32.9% of 1,603 computations done twice and compared, 50% asked"
    assert found["not audited"] == "mostly because no worker was idle and the main node was busy"
    assert one(**half)["not audited"] == "mostly because no worker was idle"
    large = one(served={"audit": 0.5}, **(half | {"audits_missed": {"busy": 1, "large": 3}}))
    assert large["not audited"] == "mostly because they had too many rows"
    smaller = one(**(half | {"audits_missed": {"smaller form": 3}}))
    assert smaller["not audited"] == "because their experts were in smaller forms"
    few = one(served={"audit": 0.004}, **(half | {"audit_share": 0.004}))
    assert few["audits"].endswith("compared, 0.4% asked")
    none = one(served={"audit": 0.5}, **(half | {"audits": 0}))
    assert none["audits"].startswith("0.0% of 1,603 computations")
    whole = one(served={"audit": 0.5}, **(half | {"audits": 800}))
    assert "not audited" not in whole
    assert {"audits", "not audited"}.isdisjoint(one(computations=20, audit_share=0.01))


def test_how_many_loads_were_checked_and_how_to_check_all() -> None:
    assert one()["checked"] == "96% of loads compared with checksums (all: --check-loads all)"
    assert one(loads_checked=1.0)["checked"] == "100% of loads compared with checksums"


def test_a_node_that_did_not_report_its_memory() -> None:
    assert "did not report" in one(memory_of_whole=None)["memory"]


def test_a_host_place_is_no_worker_with_memory() -> None:
    found = one(memory_bytes=MEMORY | {"workers": [300_000, 0]}, host_computed=5, hits=40)
    assert found["nodes"] == "main 2.0 MB, 1 worker"
    assert found["on the host"] == "5 of 112 experts computed there"


def test_a_terminal_and_a_file_show_the_same_lines() -> None:
    assert one(tty=True, emulated="rtx3090-1gbe") == one(emulated="rtx3090-1gbe")


def test_several_answers_together_and_each() -> None:
    reports = {1: report(), 3: report(recall=0.5, recall_in_time=0.5, ttft_s=1.5, decode_tokens_per_s=None)}
    settings = Settings(model="m")
    prompts = ["Question: 1 + 1?\nAnswer:", "b", "word " * 50]
    lines = printed(lambda terminal: show_answers(terminal, reports, prompts, 2.0, settings, "od-moe"))
    assert lines[0] == "od-moe (embedded), 2 of 3 prompts answered"
    found = {line[2:15].strip(): line[15:] for line in lines[1:]}
    assert found["speed"] == "3.0 tokens/s, all answers together"
    assert found["first token"] == "0.50 to 1.50 s"
    assert found["loads"].startswith("352 experts, 112.0 MB: 128 in prefill, 224 in decoding")
    assert "shadow" not in found
    assert found["stalls"] == "0.12 s in decoding, 0.00 s in prefill, mean of 2 prompts"
    table = [line.split() for line in lines[-3:]]
    assert [row[0] for row in table] == ["prompt", "1", "3"]
    assert table[1][5:7] == ["4.0", "-"]
    assert table[2][5:7] == ["-", "50.0%"]
    assert len({len(line) for line in lines[-3:]}) == 1
    listed = lines[lines.index("prompts") + 1 : -5]
    assert listed[:2] == ["  1  Question: 1 + 1? Answer:", "  2  b"]
    assert listed[2].startswith("  3  word word ")
    assert listed[2].endswith("...")
    assert (len(listed), len(listed[2]) <= 65) == (3, True)
    assert printed(lambda terminal: show_answers(terminal, {}, ["a"], 2.0, settings, "od-moe")) == []


def test_several_answers_that_shared_steps_and_waited_for_the_shadow() -> None:
    """They waited for it at the same time."""
    reports = {number: report(shadow_wait_s=2.0, requests_per_step=1.5 + number) for number in (1, 2)}
    lines = printed(lambda terminal: show_answers(terminal, reports, ["a", "b"], 2.0, Settings(model="m"), "od-moe"))
    assert "  shadow       decoding waited 2.00 s for it to start" in lines
    assert "  shared       3.0 requests in each step on average, which share its loads" in lines
    assert all(len(line) <= 80 for line in lines)


def test_progress_says_what_decoding_waits_for() -> None:
    """Of a cluster that was joined, the shadow was there before."""
    ours, joined = Settings(model="m"), Settings(model="m", cluster="auto")
    assert progress_of(1, ours) == "answering: 1 token; decoding begins when the shadow is ready"
    assert progress_of(2, ours) == "answering: 2 tokens"
    assert progress_of(1, ours.replace(shadow="none")) == progress_of(1, joined) == "answering: 1 token"
