"""Figures of the turns: one row for each engine and case, and what the rows say about each other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from scripts.lib.experiment import Cell
from scripts.lib.timing.idleness import mark
from scripts.lib.timing.intervals import Interval
from scripts.peers.engines import ACCELERATE, EAGER, LLAMA

FITS, QUARTER, CAPPED = "everything fits", "a quarter fits", "a quarter fits, capped"
CACHED = "fully-cached"
BASE = "on-demand"
"""The system that all others are paired with."""
STEP = 64 << 20
"""Caps are multiples of it."""

Turns = list[dict[str, Any]]
Rate = Callable[[dict[str, Any]], float]


def is_llama(engine: str) -> bool:
    return engine.startswith(LLAMA)


def decode_rate(turn: dict[str, Any]) -> float:
    """Decoded tokens a second."""
    return (len(turn["choices"]) - 1) / float(turn["decode_s"])


def ttft(turn: dict[str, Any]) -> float:
    return float(turn["ttft_s"])


def best_system(model: str, cells: Sequence[Cell], results: Sequence[dict[str, Any]]) -> tuple[str, int] | None:
    """The fastest system at 25 %, with the cap for all: its peak of resident memory, rounded up. None where none ran.

    Compared by the ratio to on-demand in the same turns. A system whose shadow needs a second copy of the model takes
    part like any other.
    """
    found: dict[str, tuple[float, int]] = {}
    for cell, result in zip(cells, results, strict=True):
        name = cell.params["engine"]
        if cell.params["model"] != model or cell.params["case"] != QUARTER or "failed" in result[BASE]:
            continue
        found.setdefault(BASE, (1.0, result[BASE]["peak_bytes"]))
        if "failed" not in result[name]:
            ratio = statistics.median(ratios(result[name]["turns"], result[BASE]["turns"], decode_rate))
            found[name] = ratio, result[name]["peak_bytes"]
    if not found:
        return None
    best = max(found, key=lambda name: found[name][0])
    return best, -(-found[best][1] // STEP) * STEP


def ratios(turns: Turns, base: Turns, of: Rate) -> list[float]:
    """Turn by turn."""
    return [of(one) / of(other) for one, other in zip(turns, base, strict=True)]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, its interval (of up to five turns the lowest and the highest), and each turn's value."""
    found = Interval.of(values)
    return {"median": found.median, "low": found.low, "high": found.high, "turns": list(values)}


def said(ratio: dict[str, Any]) -> str:
    """What `spread` gave, `1.19 (1.18 to 1.20)`, and a * where others used the processor meanwhile."""
    return f"{Interval.of(ratio['turns'])}{mark(ratio.get('others_cores'))}"


def rows(cells: Sequence[Cell], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row an engine and case. An engine that several cells compare with is shown with its turns of all of them."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    turns: dict[tuple[str, str, str], Turns] = {}
    chosen = _reference(cells, results)
    for cell, result in zip(cells, results, strict=True):
        model, case = cell.params["model"], cell.params["case"]
        for name, of in result.items():
            key = model, case, name
            row = found.setdefault(key, {"model": model, "case": case, "engine": name, "cap": cell.params.get("cap")})
            if "failed" in of:
                row["failed"] = of["failed"]
                continue
            turns.setdefault(key, []).extend(of["turns"])
            row |= {name: of[name] for name in ("start_s", "peak_bytes", "group_peak_bytes")}
            row |= _compared(cell.params, name, result)
    for key, row in found.items():
        if key in turns:
            row |= _of_turns(turns[key], chosen.get((row["model"], row["engine"]), chosen.get((row["model"], ""), [])))
    return list(found.values())


def _reference(cells: Sequence[Cell], results: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[list[int]]]:
    """The choices in each turn that others are compared with: by model those of eager, and by model and engine in few
    bits those of the first of its cell."""
    found: dict[tuple[str, str], list[list[int]]] = {}
    for cell, result in zip(cells, results, strict=True):
        engines = cell.params.get("engines")
        first = engines[0] if engines else EAGER
        if cell.params["case"] == FITS and "failed" not in result[first]:
            choices = [turn["choices"] for turn in result[first]["turns"]]
            found |= {(cell.params["model"], name): choices for name in engines or [""]}
    return found


def _of_turns(turns: Turns, eager: list[list[int]]) -> dict[str, Any]:
    decoded = sum(len(turn["choices"]) - 1 for turn in turns)
    pairs = [
        (mine, theirs)
        for number, turn in enumerate(turns if eager else [])
        for mine, theirs in zip(turn["choices"], eager[number % len(eager)], strict=True)
    ]
    named = sum(turn["named"] or 0 for turn in turns)
    rate = spread([decode_rate(turn) for turn in turns])
    return {
        "tokens_per_s": rate["median"],
        "tokens_per_s_low": rate["low"],
        "tokens_per_s_high": rate["high"],
        "ttft_s": statistics.median(map(ttft, turns)),
        "read_bytes_a_token": sum(turn["read_bytes"] for turn in turns) / decoded,
        "hit_rate": sum(turn["hits"] or 0 for turn in turns) / named if named else None,
        "agreement": sum(a == b for a, b in pairs) / len(pairs) if pairs else None,
        "exact": bool(turns[0]["exact"]),
    }


def _compared(params: dict[str, Any], name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Ratios of an engine to the one that it is paired with: eager, on-demand, or the capped peers; in few bits always
    llama.cpp."""
    engines = params.get("engines")
    if engines:
        mine, others = [[one for one in engines if is_llama(one) is wanted] for wanted in (False, True)]
    else:
        mine = [params["engine"]]
        others = {FITS: [EAGER], QUARTER: [BASE], CAPPED: [LLAMA, ACCELERATE]}[params["case"]]
    if name not in mine:
        return {}
    found: dict[str, Any] = {}
    for other in others:
        if other in result and other != name and "failed" not in result[other]:
            own, theirs = result[name]["turns"], result[other]["turns"]
            busy = {"others_cores": max(turn["others_cores"] for turn in [*own, *theirs])}
            found[f"decode over {other}"] = spread(ratios(own, theirs, decode_rate)) | busy
            found[f"ttft over {other}"] = spread(ratios(own, theirs, ttft)) | busy
            found[f"start over {other}"] = result[name]["start_s"] / result[other]["start_s"]
    return found


def claims(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The ratios that the project is measured by, in words."""
    found = []
    for row in rows:
        for key, value in row.items():
            what, _, other = key.partition(" over ")
            if other and what != "start" and (row["engine"] == CACHED or row["case"] == CAPPED or is_llama(other)):
                found.append(f"{row['model']}, {row['case']}: {row['engine']}, {what} over {other}: {said(value)}")
    return found
