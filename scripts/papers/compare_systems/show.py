"""Systems beside each other as a person reads them: rows of figures, tables, what beats what, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from scripts.lib.experiment import plural
from scripts.lib.plots import AMBER, BLUE, DARK, PALE, PURPLE, RED, canvas
from scripts.lib.tables import Column, markdown_down, text_table
from scripts.lib.timing.calibration import SPEEDS
from scripts.lib.timing.idleness import mark
from scripts.lib.timing.intervals import Interval
from scripts.lib.timing.slowdown import slowdown

TRANSFORMERS = "Transformers"
AGAINST: dict[str, tuple[str, ...]] = {
    "importance": ("on-demand", "static", "moe-infinity", "hybrimoe"),
    "smoe": ("on-demand", "ktransformers", "hybrimoe"),
    "fate": ("on-demand", "eap"),
}
"""A paper's system, and what it measures itself against; `static`: llama.cpp. KTransformers needs a second
processor."""
GROUPS: dict[str, tuple[str, ...]] = {
    "Importance and its baselines": ("importance", "hybrimoe", "moe-infinity", "static"),
    "SMOE and its baselines": ("smoe", "smoe-flex", "hybrimoe", "ktransformers"),
    "Fate and its baseline": ("fate", "eap"),
    "The rest": ("od-moe", "mixtral-offloading", "hobbit", "adapmoe", "random-prefetch"),
}
REFERENCES = {"on-demand": "--", "fully-cached": ":"}
GREEN = "#4f9d69"
LOOKS = dict.fromkeys(("importance", "smoe", "fate", "od-moe"), (BLUE, "o", 2.4)) | {
    "hybrimoe": (AMBER, "s", 1.5),
    "moe-infinity": (PURPLE, "^", 1.5),
    "static": (RED, "D", 1.5),
    "ktransformers": (RED, "D", 1.5),
    "smoe-flex": (GREEN, "v", 1.5),
    "eap": (RED, "D", 1.5),
    "mixtral-offloading": (AMBER, "s", 1.5),
    "hobbit": (PURPLE, "^", 1.5),
    "adapmoe": (RED, "D", 1.5),
    "random-prefetch": (GREEN, "v", 1.5),
}
OTHER = (DARK, "x", 1.5)
"""Of a system that was added since."""
BY = "tpot_by_prompt"
MEDIANS = (
    "ttft_s",
    "tpot_s",
    "cpu_s_a_token",
    "hit_rate",
    "recall",
    "recall_in_time",
    "loads_a_token",
    "bytes_a_token",
    "prefill_bytes",
    "stall_s_a_token",
    "unused_loads",
    "host_computed",
)
TIMES = ("ttft_s", "tpot_s", "stall_s_a_token", "token_s")
TOGETHER = ("token_s", "requests_per_step")
"""Of several prompts at once."""


def middle(values: Iterable[float | None]) -> float | None:
    """Their median; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


Pairs = dict[int, list[tuple[dict[str, Any], list[dict[str, Any]]]]]
"""By prompt: answers of a system, each with those of the reference next to it."""


def figures(of: dict[int, dict[int, dict[str, Any]]], pairs: Pairs) -> dict[str, Any]:
    """Medians over prompts of a system's answers, by prompt and place, and of their ratios to those next to them. Times
    of a profile that was slowed down are those of the profile itself."""
    of = {n: {place: _of_profile(one) for place, one in answers.items()} for n, answers in of.items()}
    every = [one for n in sorted(of) for one in of[n].values()]
    found: dict[str, Any] = {name: middle(one[name] for one in every) for name in MEDIANS}
    found |= {name: middle(one.get(name) for one in every) for name in (*TOGETHER, *SPEEDS) if name in every[0]}
    for name in ("tpot_s", "ttft_s"):
        found |= ratio(name, pairs)
    return found | {
        "device_bytes": max(one["device_bytes"] for one in every),
        "shadow_bytes": max(one["shadow_bytes"] for one in every),
        "total_bytes": max((one["total_bytes"] for one in every if "total_bytes" in one), default=None),
        "resident_max": max(one["resident_max"] for one in every),
        "exact": all(one["exact"] for one in every),
        "emulated": every[0]["emulated"],
        "prompts": len(of),
        "others_cores": max(one["others_cores"] for one in every),
        "tpot_by_prompt": [middle(one["tpot_s"] for one in of[n].values()) for n in sorted(of)],
    }


def _of_profile(answer: dict[str, Any]) -> dict[str, Any]:
    times = slowdown(answer.get("emulated"))
    return answer | {name: answer[name] / times for name in TIMES if answer.get(name) is not None}


def ratio(name: str, pairs: Pairs) -> dict[str, Any]:
    """Of each prompt, and their median with its interval; None of what has nothing next to it."""
    short = name[:4]
    by_prompt = [middle(over(name, one, near) for one, near in of) for of in pairs.values()]
    known = [one for one in by_prompt if one is not None]
    cores = max(others_cores(pairs), default=None)
    busy = {} if cores is None else {f"{short}_others_cores": cores}
    if len(known) < len(by_prompt) or not known:
        return busy | {f"{short}_ratio": None, f"{short}_ratio_low": None, f"{short}_ratio_high": None}
    interval = Interval.of(known)
    bounds = {f"{short}_ratio_low": interval.low, f"{short}_ratio_high": interval.high}
    return busy | {f"{short}_ratio": interval.median, **bounds, f"{short}_ratio_by_prompt": known}


def others_cores(pairs: Pairs) -> Iterator[float]:
    """Of the answers and of those that they are divided by."""
    for of in pairs.values():
        for one, near in of:
            yield from (answer["others_cores"] for answer in (one, *near) if "others_cores" in answer)


def over(name: str, one: dict[str, Any], near: list[dict[str, Any]]) -> float | None:
    if not near:
        return None
    return float(one[name] / statistics.geometric_mean(each[name] for each in near))


def peer_row(model: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Transformers with every expert in memory."""
    of = {name: statistics.median(one[name] for one in results) for name in ("ttft_s", "tpot_s")}
    return {"model": model, "budget": None, "system": TRANSFORMERS, **of, "prompts": len(results)}


def claims(rows: list[dict[str, Any]]) -> list[str]:
    """For each paper's system and each of its baselines: TPOT as a part of the baseline's and how much more is hit, by
    budget, and where it does not win."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = {(row["system"], row["budget"]): row for row in rows if row["model"] == model and "tpot_by_prompt" in row}
        for system, others in AGAINST.items():
            for other in others:
                budgets = [budget for name, budget in of if name == system and (other, budget) in of]
                if budgets:
                    pairs = [(budget, of[system, budget], of[other, budget]) for budget in budgets]
                    found.append(f"{model}: {system} against {other}: {_claim(pairs)}")
    return found


def _claim(pairs: list[tuple[int, dict[str, Any], dict[str, Any]]]) -> str:
    times, hits, slower, unclear, fewer = [], [], [], [], []
    for budget, mine, theirs in pairs:
        key = "tpot_ratio_by_prompt" if "tpot_ratio_by_prompt" in mine and "tpot_ratio_by_prompt" in theirs else BY
        interval = Interval.of(a / b for a, b in zip(mine[key], theirs[key], strict=True))
        low, high = round(interval.low, 2), round(interval.high, 2)  # 0.99999 is no difference to 1
        times.append(interval)
        hits.append((mine["hit_rate"] or 0) - (theirs["hit_rate"] or 0))
        slower += [budget] if low >= 1 else []
        unclear += [budget] if low < 1 <= high else []
        fewer += [budget] if hits[-1] <= 0 else []
    at = ", ".join(str(budget) for budget, *_ in pairs)
    words = [
        f"TPOT {', '.join(map(str, times))} of its, hit rate {' '.join(f'{one:+.2f}' for one in hits)}",
        f"at {at} %",
    ]
    missed = [
        f"{what} at {', '.join(map(str, where))} %"
        for what, where in (("slower", slower), ("no difference shown", unclear), ("no more hits", fewer))
        if where
    ]
    return " ".join(words) + (f"; {'; '.join(missed)}" if missed else "; ahead in both everywhere")


def interval(name: str) -> Any:
    """A ratio's median and interval as text."""

    def text(row: dict[str, Any]) -> str | None:
        if row.get(f"{name}_ratio") is None:
            return None
        bounds = row[f"{name}_ratio"], row[f"{name}_ratio_low"], row[f"{name}_ratio_high"]
        busy = row.get(f"{name}_others_cores", row.get("others_cores"))
        return f"{Interval(*bounds, row['prompts'])}{mark(busy)}"

    return text


def milliseconds(name: str, form: str) -> Any:
    """A time as text, marked if others used the processor."""

    def text(row: dict[str, Any]) -> str | None:
        return None if row.get(name) is None else f"{1e3 * row[name]:{form}}{mark(row.get('others_cores'))}"

    return text


COLUMNS = (
    Column("system", "system"),
    Column("TPOT, ms", milliseconds("tpot_s", ".1f")),
    Column("TPOT of on-demand's", interval("tpot")),
    Column("CPU, ms", "cpu_s_a_token", ".1f", 1e3),
    Column("TTFT, ms", "ttft_s", ".0f", 1e3),
    Column("TTFT of on-demand's", interval("ttft")),
    Column("hits", "hit_rate", ".1%"),
    Column("recall", "recall", ".1%"),
    Column("in time", "recall_in_time", ".1%"),
    Column("loads", "loads_a_token", ".2f"),
    Column("MB", "bytes_a_token", ".2f", 1e-6),
    Column("stall, ms", "stall_s_a_token", ".1f", 1e3),
    Column("device MB", "device_bytes", ".1f", 1e-6),
    Column("total MB", "total_bytes", ".1f", 1e-6),
    Column("same tokens", lambda row: row["same_tokens"] / row["tokens"] if "tokens" in row else None, ".0%"),
    Column("exact", lambda row: {True: "yes", False: "no"}.get(row.get("exact"))),
)
"""CPU, loads, MB and stall are those of a token."""
TOGETHER_COLUMNS = (
    Column("a token, ms", "token_s", ".1f", 1e3),
    Column("requests a step", "requests_per_step", ".2f"),
)


def with_batch(columns: Sequence[Column], batch: int) -> list[Column]:
    """With those of several prompts at once behind TPOT."""
    place = 1 + next(n for n, column in enumerate(columns) if column.name == "TPOT, ms")
    return [*columns[:place], *(TOGETHER_COLUMNS if batch > 1 else ()), *columns[place:]]


PUBLISHED = (
    "system",
    "TPOT, ms",
    "TPOT of on-demand's",
    "TTFT, ms",
    "TTFT of on-demand's",
    "CPU, ms",
    "hits",
    "recall",
    "MB",
    "total MB",
    "same tokens",
    "exact",
)


def budget_table(rows: list[dict[str, Any]], budget: int) -> str:
    """In Markdown: the systems at one budget, by their time, and Transformers."""
    of = [row for row in rows if row["budget"] == budget and "refused" not in row]
    peers = [row for row in rows if row["system"] == TRANSFORMERS]
    columns = [one for one in COLUMNS if one.name in PUBLISHED]
    return markdown_down(columns, [*sorted(of, key=lambda one: float(one["tpot_ratio"])), *peers])


def tables(rows: list[dict[str, Any]], total: bool = False, batch: int = 1) -> None:
    """To standard output, a table a model and budget. `total`: budgets are for all that the nodes hold."""
    meant = "memory of all nodes {} % of the whole model" if total else "device memory {} % of the experts"
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        peers = [row for row in mine if row["system"] == TRANSFORMERS]
        for budget in dict.fromkeys(row["budget"] for row in mine if row["budget"] is not None):
            of = [row for row in mine if row["budget"] == budget]
            shown = sorted((row for row in of if "refused" not in row), key=lambda one: float(one["tpot_s"]))
            print(f"{model}, {meant.format(budget)}")
            print(text_table(with_batch(COLUMNS, batch), shown + peers))
            for row in of:
                if "refused" in row:
                    print(f"{row['system']} cannot be: {row['refused']}")
            print()


def picture(rows: list[dict[str, Any]], args: Any) -> Any:
    """TPOT (of on-demand's, if that is among the systems) over budget with the hit rate beneath it; a column a
    paper, two rows a model."""
    times = ("tpot_s", 1e3, "time per token, ms")
    if "on-demand" in {row["system"] for row in rows}:
        times = ("tpot_ratio", 1, "time per token, of on-demand's")
    names = list(dict.fromkeys(row["model"] for row in rows))
    present = {row["system"] for row in rows if "refused" not in row}
    groups = {title: [one for one in of if one in present] for title, of in GROUPS.items()}
    rest = present - set(REFERENCES) - {TRANSFORMERS} - {one for of in groups.values() for one in of}
    groups["The rest"] += sorted(rest)
    groups = {title: of for title, of in groups.items() if of}
    figure, panels = canvas(
        3.7 * len(groups) + 0.4, 2 * 2.45 * len(names) + 1.7, 2 * len(names), len(groups), sharex=True, sharey="row"
    )
    for m, model in enumerate(names):
        mine = [row for row in rows if row["model"] == model]
        for g, (title, of) in enumerate(groups.items()):
            above, below = (panels[(2 * m + k) * len(groups) + g] for k in (0, 1))
            for panel, name, scale in ((above, *times[:2]), (below, "hit_rate", 100)):
                _lines(panel, mine, name, scale, of, present)
                panel.set_xscale("log")
                panel.set_xticks(args.budgets, [f"{one}" for one in args.budgets])
                panel.minorticks_off()
                panel.set_ylim(bottom=0)
            above.set_title(f"{title}\n{model}" if not m else model, fontsize=10)
            below.set_ylim(0, 104)
            if not g:
                above.set_ylabel(times[2])
                below.set_ylabel("hit rate in decoding, %")
            if m == len(names) - 1:
                below.set_xlabel("device memory, % of all experts")
                below.legend(
                    *above.get_legend_handles_labels(),
                    fontsize=8,
                    loc="upper center",
                    bbox_to_anchor=(0.5, -0.24),
                    ncols=2,
                    frameon=False,
                )
    figure.suptitle(
        f"Time per output token and hit rate over the memory budget; medians of {plural(args.prompts, 'prompt')}, "
        f"answers of {args.tokens} tokens; bars: intervals of 95 %. Pale: the other systems",
        fontsize=11,
    )
    return figure


def _lines(panel: Any, rows: list[dict[str, Any]], name: str, scale: float, of: list[str], present: set[str]) -> None:
    def line(system: str) -> tuple[list[int], list[float]]:
        pairs = sorted(
            (row["budget"], scale * row[name])
            for row in rows
            if row["system"] == system and row.get(name) is not None and row["budget"]
        )
        return [x for x, _ in pairs], [y for _, y in pairs]

    for other in sorted(present - set(of) - set(REFERENCES) - {TRANSFORMERS}):
        panel.plot(*line(other), color=PALE, lw=0.8, alpha=0.7, zorder=1)
    for system, style in REFERENCES.items():
        if system in present:
            mark = "*" if system == "fully-cached" else ""
            panel.plot(*line(system), color=DARK, ls=style, marker=mark, ms=9, lw=1.2, label=system, zorder=2)
    for place, system in enumerate(of):
        colour, mark, width = LOOKS.get(system, OTHER)
        panel.plot(*line(system), color=colour, marker=mark, ms=4.5, lw=width, label=system, zorder=3)
        for row in rows:
            if row["system"] == system and row.get(f"{name}_low") is not None:
                beside = row["budget"] * (0.96 + 0.02 * place)
                panel.plot([beside] * 2, [row[f"{name}_low"], row[f"{name}_high"]], color=colour, lw=0.9, alpha=0.7)
