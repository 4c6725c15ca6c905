"""The figures of answers as text: first what the user wants to know, then what the cluster did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from main_node.engine.prediction_trial import pays
from odmoe.settings.settings import Settings
from odmoe.terminal import Terminal, count_text, megabytes
from scheduler.policies.precision import FULL
from scheduler.policies.registry import forms_of

if TYPE_CHECKING:
    from main_node.figures import ClusterFigures
    from main_node.report import Report

_ENDED = {
    "stop": "",
    "length": "",
    "stop_text": ", ended by a stop text",
    "context": ", ended because the context of {context} tokens is full",
}
"""`Report.finish` in words. An end-of-sequence token and --max-new-tokens need none."""
_MISSED = {
    "busy": "no worker was idle",
    "large": "they had too many rows",
    "smaller form": "their experts were in smaller forms",
}
"""`ClusterFigures.audits_missed` in words: why computations were not audited."""
LEAST_AUDITED = 0.95
"""Share of the audits that are asked for, below which the reason is shown."""
PROMPT_SHOWN = 60
"""Characters of a prompt that are shown beside its number."""
MOST_LOST = 0.9
"""Share of the lost time from which no more is concluded of the machine's speed."""
LOST_SHOWN = 0.01
"""Share of an emulated run's time that its machine has added, above which the report says so."""
WAIT_SHOWN_S = 0.05
"""Shortest wait for the shadow that is shown."""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of a report."""

    label: str
    text: str
    shown: bool = True
    """False if the figure means nothing for this answer."""
    timed: bool = False
    """A measured time or a rate. The profile is named beside it where the times are emulated."""


def show_answer(terminal: Terminal, report: Report, served: Settings, system: str) -> None:
    """The figures of one answer. `system`: its name, with the policies that differ from its preset."""
    terminal.console.print()
    terminal.block(
        f"{system} ({served.cluster})",
        _shown_lines([*_speed(report), *_result([report], served)], report),
        _shown_lines([*_prediction(report, served), *_loads([report]), *_nodes([report], served)], report),
    )


def show_answers(
    terminal: Terminal,
    reports: dict[int, Report],
    prompts: Sequence[str],
    seconds: float,
    served: Settings,
    system: str,
) -> None:
    """The figures of several answers together, the number and beginning of each prompt, then a row for each answer.

    `seconds`: from the first request to the last token.
    """
    found = list(reports.values())
    if not found:
        return
    tokens = sum(report.new_tokens for report in found)
    first = [report.ttft_s for report in found]
    speed = [
        Line("speed", f"{tokens / seconds:.1f} tokens/s, all answers together", timed=True),
        Line("first token", f"{min(first):.2f} to {max(first):.2f} s", timed=True),
    ]
    terminal.block(
        f"{system} ({served.cluster}), {len(found)} of {count_text(len(prompts), 'prompt')} answered",
        _shown_lines([*speed, _too_slow(found), _shadow_start(found), *_result(found, served)], found[0]),
        _shown_lines([*_loads(found), *_nodes(found, served)], found[0]),
    )
    terminal.console.print()
    terminal.block("prompts", [(str(number), _beginning(prompt)) for number, prompt in enumerate(prompts, 1)])
    terminal.console.print()
    terminal.table(
        f"each prompt{_emulation_note(found[0])}",
        ("prompt", "tokens in", "out", "first token", "tokens/s", "predicted", "reloads", "stalls"),
        [
            (
                str(number),
                str(report.prompt_tokens),
                str(report.new_tokens),
                f"{report.ttft_s:.2f} s",
                _rate(report),
                "-" if report.recall is None else f"{report.recall:.1%}",
                str(report.reloads),
                f"{report.stall_s:.2f} s",
            )
            for number, report in reports.items()
        ],
    )


def _beginning(prompt: str) -> str:
    """The first characters of a prompt, in one line."""
    text = " ".join(prompt.split())
    return text if len(text) <= PROMPT_SHOWN else f"{text[: PROMPT_SHOWN - 3].rstrip()}..."


def _shown_lines(lines: Sequence[Line], report: Report) -> list[tuple[str, str]]:
    return [(line.label, line.text + _emulation_note(report) * line.timed) for line in lines if line.shown]


def _emulation_note(report: Report) -> str:
    return f" (emulated: {report.emulated})" if report.emulated else ""


def _rate(report: Report) -> str:
    return "-" if report.decode_tokens_per_s is None else f"{report.decode_tokens_per_s:.1f}"


def _speed(report: Report) -> list[Line]:
    return [
        Line("speed", f"{_rate(report)} tokens/s decoding, {report.tokens_per_s:.1f} overall", timed=True),
        Line("first token", f"{report.ttft_s:.2f} s", timed=True),
        _too_slow([report]),
        _shadow_start([report]),
    ]


def _too_slow(reports: Sequence[Report]) -> Line:
    """Of the answer of which the machine added the largest part."""
    worst = max(reports, key=_lost_share)
    share = _lost_share(worst)
    profile, _, times = (worst.emulated or "").partition("@")
    slower = int(times or 1) * 2 * math.ceil(1 / (1 - min(share, MOST_LOST)) - 1e-6)  # twice, to be sure
    lost = f"{worst.lost_s or 0.0:.2f} of {worst.ttft_s + worst.decode_s:.2f} s"
    text = f"this machine added {lost}; try --profile {profile}@{slower}"
    return Line("too slow", text, shown=share > LOST_SHOWN)


def _lost_share(report: Report) -> float:
    """Of the time of an emulated run, the share that its machine has added."""
    return (report.lost_s or 0.0) / max(1e-9, report.ttft_s + report.decode_s)


def _shadow_start(reports: Sequence[Report]) -> Line:
    """Answers that began before the shadow was there waited for it at the same time: the longest wait counts."""
    wait_s = max(report.shadow_wait_s for report in reports)
    return Line("shadow", f"decoding waited {wait_s:.2f} s for it to start", shown=wait_s > WAIT_SHOWN_S)


def _result(reports: Sequence[Report], served: Settings) -> list[Line]:
    """Memory, exactness and length."""
    new, prompt = sum(report.new_tokens for report in reports), sum(report.prompt_tokens for report in reports)
    one = reports[0]
    ended = _ENDED.get(one.finish, "").format(context=one.prompt_tokens + one.new_tokens) if len(reports) == 1 else ""
    seed = f"{one.seed}; the same --seed draws the same tokens"
    return [
        Line("memory", _memory(max(reports, key=_total_bytes))),
        Line("memory shares", _shares(max(reports, key=_total_bytes)), shown=served.memory is not None),
        Line("output", _exactness(reports)),
        Line("precision", _precision(one.cluster), shown=any(forms_of(served.system_config))),
        Line("tokens", f"{new} out, {prompt} in{ended}"),
        Line("shared", _requests_per_step(reports), shown=any(report.requests_per_step > 1 for report in reports)),
        Line("seed", seed, shown=one.seed is not None and len({report.seed for report in reports}) == 1),
        Line("ignored", f"{', '.join(one.ignored)} of the model's settings: not supported", shown=bool(one.ignored)),
    ]


def _total_bytes(report: Report) -> int:
    """Bytes of all nodes together."""
    return sum(sum(held) if isinstance(held, list) else held for held in report.memory_bytes.values())


def _memory(report: Report) -> str:
    if report.memory_of_whole is None:
        return f"{megabytes(_total_bytes(report))}, without the nodes that did not report theirs"
    whole = megabytes(round(_total_bytes(report) / report.memory_of_whole))
    return f"{megabytes(_total_bytes(report))}, {report.memory_of_whole:.0%} of the whole model's {whole}"


def _shares(report: Report) -> str:
    return ", ".join(f"{name} {megabytes(size)}" for name, size in report.memory_shares.items() if size)


def _exactness(reports: Sequence[Report]) -> str:
    if all(report.exact for report in reports):
        return "exact: the same tokens as with all experts in memory"
    reasons = dict.fromkeys(reason for report in reports for reason in report.inexact)
    return f"approximate, because of {' and '.join(reasons)}"


def _requests_per_step(reports: Sequence[Report]) -> str:
    """How many requests shared a step, over all their steps."""
    mean = sum(report.requests_per_step for report in reports) / len(reports)
    chunked = sum(report.prefill_passes > 1 for report in reports)
    cached = sum(report.cached_tokens for report in reports)
    steps = f"{mean:.1f} requests in each step on average, which share its loads"
    steps += f"; {count_text(chunked, 'prompt')} read in chunks" * bool(chunked)
    return steps + f"; {count_text(cached, 'token')} of prompts kept from earlier ones" * bool(cached)


def _precision(cluster: ClusterFigures) -> str:
    """The forms that were loaded, and why it was the full one alone if the precision has others."""
    costs = cluster.form_costs
    if not cluster.smaller_forms:
        return "full: all experts fit, so smaller forms would save nothing"
    largest = cluster.smaller_forms[0]
    if cluster.forms != [FULL] or largest not in costs or sum(costs[largest]) < sum(costs[FULL]):
        return ", ".join(form or "full" for form in cluster.forms)
    load_s, restore_s = costs[largest]
    return f"full, {_ms(costs[FULL][0])} a load; {largest} {_ms(load_s)} and {_ms(restore_s)} to restore"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _prediction(report: Report, served: Settings) -> list[Line]:
    """Predictions, hits and reloads. Without a predictor there are no predictions, without a cache no hits."""
    predicts = report.recall is not None or report.unpredicted > 0
    recall, early = report.recall or 0.0, f"{report.recall_in_time:.1%}" if report.recall_in_time else "none"
    return [
        Line(
            "predicted",
            f"{recall:.1%} of the experts used, {early} before the gate fired",
            shown=report.recall is not None,
        ),
        Line(
            "not predicted",
            f"{count_text(report.unpredicted, 'expert')} in layers without a prediction",
            shown=report.unpredicted > 0,
        ),
        Line("predictions", *_prediction_costs(report.cluster)),
        Line(
            "hits",
            f"{report.hits / max(1, report.named):.1%} of the experts used were in a slot when the gate fired",
            shown=report.hits > 0 or served.system_config.residency != "none",
        ),
        Line(
            "reloads",
            f"{report.reloads:,} began after the gate, for experts not predicted in time",
            shown=predicts and report.reloads > 0,
        ),
        Line(
            "drafts",
            f"{report.accepted:,} of {count_text(report.drafted, 'drafted token')} were right",
            shown=report.drafted > 0,
        ),
    ]


def _prediction_costs(cluster: ClusterFigures) -> tuple[str, bool]:
    """What they cost and save, and whether there is anything to say."""
    if cluster.prediction_step_s is None:
        return "", False
    with_s, without_s = cluster.prediction_step_s
    outcome = "made" if pays((with_s, without_s)) else "left out"
    return f"{outcome}: a step takes {_ms(with_s)} with them and {_ms(without_s)} without", True


def _loads(reports: Sequence[Report]) -> list[Line]:
    loads, prefill = sum(r.loads for r in reports), sum(r.prefill_loads for r in reports)
    unused, stall = sum(r.unused_loads for r in reports), sum(r.stall_s for r in reports)
    prefill_stall = sum(r.prefill_stall_s for r in reports)
    hosted, named = sum(r.host_computed for r in reports), sum(r.named for r in reports)
    found, host = sum(r.loads_from_memory for r in reports), max((sum(r.host_memory_bytes) for r in reports), default=0)
    checked = max((r.cluster.loads_checked or 0.0 for r in reports), default=0.0)
    each = f", mean of {len(reports)} prompts" * (len(reports) > 1)
    stall, prefill_stall = stall / len(reports), prefill_stall / len(reports)
    moved = megabytes(sum(r.bytes_loaded for r in reports))
    return [
        Line("loads", f"{loads:,} experts, {moved}: {prefill:,} in prefill, {loads - prefill:,} in decoding"),
        Line(
            "checked",
            f"{checked:.0%} of loads compared with checksums{' (all: --check-loads all)' * (checked < 1)}",
            shown=loads > 0,
        ),
        Line(
            "not used",
            f"{count_text(unused, 'load')} of experts that the gate did not choose",
            shown=unused > 0,
        ),
        Line("stalls", f"{stall:.2f} s in decoding, {prefill_stall:.2f} s in prefill{each}", timed=True),
        Line(
            "host memory",
            f"{found:,} loads found their expert in {megabytes(host)} between disk and slots",
            shown=host > 0,
        ),
        Line("on the host", f"{hosted:,} of {count_text(named, 'expert')} computed there", shown=hosted > 0),
    ]


def _audits(cluster: ClusterFigures, served: Settings) -> list[Line]:
    """The share that was done and the share that was asked for, and why the first is smaller."""
    done, asked = cluster.audits / max(1, cluster.computations), cluster.audit_share
    missed = cluster.audits_missed
    why = _MISSED[max(missed, key=lambda reason: missed[reason])] if missed else ""
    if why == _MISSED["busy"] and served.audit != "auto":
        why += " and the main node was busy"
    why = f"{'mostly ' * (len(missed) > 1)}because {why}" if why else ""
    shown = cluster.audits > 0 or (served.audit != "auto" and asked > 0)
    compared = f"{done:.1%} of {count_text(cluster.computations, 'computation')} done twice and compared"
    return [
        Line("audits", f"{compared}, {100 * asked:.3g}% asked", shown=shown),
        Line("not audited", why, shown=shown and bool(why) and done < LEAST_AUDITED * asked),
    ]


def _devices(report: Report) -> str:
    """What each role computes on, in few words if it is the same."""
    found = {role: [one] if isinstance(one, str) else list(dict.fromkeys(one)) for role, one in report.devices.items()}
    text = {role: " and ".join(names) for role, names in found.items() if names}
    if text and text.get("workers") == text["main"] and text.get("shadow", text["main"]) == text["main"]:
        return f"{text['main']} for all nodes"
    return ", ".join(f"{role} {names}" for role, names in text.items())


def _nodes(reports: Sequence[Report], served: Settings) -> list[Line]:
    """The nodes' peak memory, from the answer with the highest one."""
    report = max(reports, key=_total_bytes)
    memory = report.memory_bytes
    each = memory["workers"] if isinstance(memory["workers"], list) else []
    workers = [held for held in each if held]  # a host place holds nothing on the device
    shadow = f"shadow {megabytes(memory['shadow'])}, " if memory["shadow"] else ""
    experts = max(report.resident_experts_max, default=0)
    most = f"{megabytes(max(workers, default=0))} and {count_text(experts, 'expert')} at most"
    nodes = f"main {megabytes(memory['main'])}, {shadow}{count_text(len(workers), 'worker')}"
    lost = list(dict.fromkeys(name for one in reports for name in one.cluster.lost))
    rejoined = list(dict.fromkeys(name for one in reports for name in one.cluster.rejoined))
    suspects = list(dict.fromkeys(name for one in reports for name in one.cluster.suspects))
    return [
        Line("nodes", nodes),
        Line("devices", _devices(report), shown=bool(report.devices)),
        Line("each worker", most),
        Line("lost", ", ".join(lost), shown=bool(lost)),
        Line("reconnected", ", ".join(rejoined), shown=bool(rejoined)),
        *_audits(report.cluster, served),
        Line("suspect", "; ".join(suspects), shown=bool(suspects)),
    ]
