"""Table 2 as a person reads it: rows of cells, Markdown beside the paper's columns, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from scripts.lib.tables import Column, markdown, markdown_across

AS_IT_IS, PRINTED = "as it is", "paper"
CASES = ((16, 64), (16, 256), (128, 64), (128, 256))
METRICS = {"ttft_s": "TTFT, ms", "decode_tokens_per_s": "decode, tokens/s", "tokens_per_s": "overall, tokens/s"}
ROLES = {"main": "main node", "shadow": "shadow", "workers": "workers"}
# Table 2 (i) of the paper, by CASES: TTFT in ms, decode tokens/s, overall tokens/s.
_SPEED: dict[str, tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]] = {
    "OD-MoE": ((1349.78, 1340.89, 3150.87, 3135.85), (3.67, 3.65, 3.74, 3.71), (3.41, 3.54, 3.09, 3.44)),
    "Transformers": ((385.52, 386.86, 447.43, 448.16), (4.90, 4.87, 4.90, 4.89), (4.84, 4.86, 4.81, 4.86)),
    "llama.cpp": ((2025.10, 2008.60, 6592.81, 6527.13), (0.85, 0.82, 0.81, 0.81), (0.84, 0.82, 0.75, 0.78)),
    "AdapMoE": ((1345.12, 1428.23, 1343.96, 1430.69), (3.14, 3.15, 3.11, 3.12), (2.99, 2.98, 3.09, 3.08)),
    "Mixtral-Offloading": ((1727.81, 1705.15, 1967.16, 1979.81), (2.26, 2.26, 2.22, 2.21), (2.16, 2.24, 2.11, 2.18)),
    "HOBBIT": ((5456.37, 5467.42, 5898.92, 5896.04), (0.78, 0.79, 0.79, 0.78), (0.74, 0.78, 0.74, 0.77)),
    "MoE-Infinity": ((5521.63, 5560.34, 5819.49, 7573.27), (0.68, 0.68, 0.70, 0.69), (0.66, 0.67, 0.66, 0.68)),
}
# Table 2 (ii), GB of GPU memory; OD-MoE's roles from section 4.4. llama.cpp computes on the CPU.
_MEMORY: dict[str, dict[str, Any]] = {
    "OD-MoE": {"main": 7e9, "shadow": 45e9, "workers": [1e9] * 8},
    "Transformers": {"main": 180e9, "shadow": 0, "workers": []},
    "AdapMoE": {"main": 8e9, "shadow": 0, "workers": []},
    "Mixtral-Offloading": {"main": 11e9, "shadow": 0, "workers": []},
    "HOBBIT": {"main": 22e9, "shadow": 0, "workers": []},
    "MoE-Infinity": {"main": 21.5e9, "shadow": 0, "workers": []},
}


def paper_rows() -> list[dict[str, Any]]:
    """What the paper printed, in the form of our own rows."""
    found = []
    for name, (ttft, decode, overall) in _SPEED.items():
        roles = _MEMORY.get(name)
        memory = {"memory_bytes": roles, "of_whole": held(roles) / held(_MEMORY["Transformers"])} if roles else {}
        for n, (given, wanted) in enumerate(CASES):
            figures = {"ttft_s": ttft[n] / 1000, "decode_tokens_per_s": decode[n], "tokens_per_s": overall[n]}
            where = {"part": "speed", "block": PRINTED, "column": f"paper: {name}", "input": given, "output": wanted}
            found.append({**where, **figures, **memory})
    return found


def held(roles: dict[str, Any]) -> float:
    """Bytes of all roles."""
    return float(roles["main"] + roles["shadow"] + sum(roles["workers"]))


def speed_rows(done: Iterable[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """(block, parameters, result) of each speed cell -> a row, means over its prompts."""
    found = []
    for block, params, result in done:
        about = {name: params[name] for name in ("column", "model", "input", "output", "prompts")}
        figures = {name: statistics.fmean(values) if name in METRICS else values for name, values in result.items()}
        found.append({"part": "speed", "block": block, **about, **figures})
    return found


def blocks(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Speed rows by block; the paper's columns stand in every emulated one, of the same cases if there are any."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["part"] == "speed":
            found.setdefault(row["block"], []).append(row)
    return {name: some + (_beside(some) if name != AS_IT_IS else []) for name, some in found.items()}


def _beside(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    cases = {(row["input"], row["output"]) for row in rows}
    papers = paper_rows()
    return [row for row in papers if (row["input"], row["output"]) in cases] or papers


def columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["column"] for row in rows))


def mean(rows: list[dict[str, Any]], column: str, metric: str, given: int | None = None) -> float | None:
    """Over a column's cases; of prompts of `given` tokens."""
    values = [row[metric] for row in rows if row["column"] == column and given in (None, row["input"])]
    return statistics.fmean(values) if values else None


def most(rows: list[dict[str, Any]], column: str) -> dict[str, Any] | None:
    """The row in which a column held most."""
    mine = [row for row in rows if row["column"] == column and row.get("memory_bytes")]
    return max(mine, key=lambda row: held(row["memory_bytes"])) if mine else None


# --- Markdown ---------------------------------------------------------------------------------------------------


def tables(rows: list[dict[str, Any]]) -> str:
    parts = []
    for name, some in blocks(rows).items():
        models = ", ".join(dict.fromkeys(row["model"] for row in some if "model" in row))
        title = "this machine as it is" if name == AS_IT_IS else f"{name}, beside the paper's Table 2"
        parts += [f"## (i) Speed, {title}; {models}", _speed_table(some)]
        parts += [f"## (ii) Device memory, MB; {models}", _memory_table(some)]
    quality = [row for row in rows if row["part"] == "quality"]
    if quality:
        parts += ["## (iii) Answer quality", _quality_table(quality)]
    return "\n\n".join(parts) + "\n"


def of_docs(rows: list[dict[str, Any]], part: str) -> str:
    """One table: `native`, `emulated` (of the paper's columns its own system's and Transformers'), `memory` or
    `quality`."""
    if part == "quality":
        return _quality_table([row for row in rows if row["part"] == "quality"])
    found = blocks(rows)
    if part == "memory":
        return _memory_table(found[AS_IT_IS])
    if part == "native":
        return _speed_table(found[AS_IT_IS])
    [emulated] = [some for name, some in found.items() if name != AS_IT_IS]
    shown = ("paper: OD-MoE", "paper: Transformers")
    return _speed_table([row for row in emulated if row["block"] != PRINTED or row["column"] in shown])


MEANS = (
    Column("recall, %", "recall", ".2f", 100),
    Column("loads a decode token", "loads_a_token", ".2f"),
    Column("MB read from disk a token", "read_bytes_a_token", ".1f", 1e-6),
)


def _speed_table(rows: list[dict[str, Any]]) -> str:
    names = columns(rows)
    lines = [["", "in, out", *names]]
    ours = list(dict.fromkeys((row["input"], row["output"]) for row in rows if row["block"] != PRINTED))
    for metric, title in METRICS.items():
        for case in ours:
            found = {
                row["column"]: _number(row[metric], metric) for row in rows if (row["input"], row["output"]) == case
            }
            lines.append([title, f"{case[0]}, {case[1]}", *(found.get(name, "-") for name in names)])
        lines.append([title, f"mean of {len(ours)} cases", *(_mean(rows, name, metric, ours) for name in names)])
    for of in MEANS:
        values = {
            name: [r[of.value] for r in rows if r["column"] == name and r.get(of.value) is not None] for name in names
        }
        if any(values.values()):
            means = [{of.value: statistics.fmean(v)} if v else {} for v in values.values()]
            lines.append([of.name, "mean", *map(of.text, means)])
    return markdown(lines)


def _mean(rows: list[dict[str, Any]], column: str, metric: str, cases: list[tuple[int, int]]) -> str:
    """Over a column's cases, which it names where they are others than `cases`."""
    found = [(row["input"], row["output"]) for row in rows if row["column"] == column]
    said = _number(mean(rows, column, metric), metric)
    return said if sorted(found) == sorted(cases) else said + f" ({'; '.join(f'{i}, {o}' for i, o in found)})"


def _number(value: float | None, metric: str) -> str:
    if value is None:
        return "-"
    if metric == "ttft_s":
        return f"{1000 * value:.0f}" if value >= 0.1 else f"{1000 * value:.1f}"
    return f"{value:.2f}"


def _memory_table(rows: list[dict[str, Any]]) -> str:
    names = columns(rows)
    found = {name: most(rows, name) for name in names}
    lines = [["", *names]]
    for role, title in ROLES.items():
        lines.append([title, *(_held(row["memory_bytes"][role]) if row else "-" for row in found.values())])
    lines.append(["all", *(_held(held(row["memory_bytes"])) if row else "-" for row in found.values())])
    lines.append(["of the whole model", *(f"{row['of_whole']:.0%}" if row else "-" for row in found.values())])
    return markdown(lines)


def _quality_table(rows: list[dict[str, Any]]) -> str:
    return markdown_across(QUALITY, rows, [row["column"] for row in rows])


def _held(value: float | list[float]) -> str:
    """MB, of each node if there are several."""
    if not isinstance(value, list):
        return f"{value / 1e6:.1f}" if value < 1e9 else f"{value / 1e6:.0f}"
    sizes = [_held(one) for one in sorted(value)]
    return f"{len(value)} x {' to '.join(dict.fromkeys((sizes[0], sizes[-1])))}" if value else "0.0"


QUALITY = (
    Column("tokens as Transformers'", lambda row: f"{row['same_tokens']} of {row['tokens']}"),
    Column("perplexity, held-out text", "perplexity", ".4f"),
    Column("most nats a token off", "most_nats_off", ".1e"),
    Column("GSM8K final answers", lambda row: f"{row['final_answers']} of {row['problems']}"),
    Column("GSM8K answers with a number", lambda row: f"{row['numbers_found']} of {row['problems']}"),
)
