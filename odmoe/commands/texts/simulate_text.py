"""The figures of a simulation as text, on standard output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from odmoe.settings.system_settings import CHOSEN, system_name
from odmoe.terminal import count_text
from scheduler.one_line import escape
from scheduler.policies.system_config import SystemConfig

BAR = 30
LEAST_LUCK = 0.0005
CAUSES = {
    "main": "main node computes",
    "compute": "experts compute",
    "network": "messages travel",
    "load": "loads, even if predicted early",
    "shadow": "loads predicted late or wrongly",
}
"""The causes of `scheduler.simulation.time_breakdown` in words. Without a predictor no load is early, so it is just
"loads"."""
_UNFORESEEN = {cause: words for cause, words in CAUSES.items() if cause != "shadow"} | {"load": "loads"}
_ROUTES = {"uniform": "drawn at random, every expert as likely as any other"}
_SAYS = {"sep": "a shadow predicts", "random": "random prefetch", "none": "no predictor"}


def show(facts: dict[str, Any]) -> None:
    """`facts`: what --json prints."""
    console = Console(highlight=False)
    console.print(f"simulated: {escape(facts['profile'])}", style="bold", markup=False)
    rows = list(_rows(facts))
    for name, value in rows:
        console.print(f"  {name:<{max(len(name) for name, _ in rows)}}  {escape(value)}", soft_wrap=True, markup=False)
    if facts["bound"] is not None:
        what = "token" if len(facts["requests"]) == 1 and not facts["draft"] else "step"
        for line in _time_lines(what, facts["where_ms"], CAUSES if facts["predictor"] != "none" else _UNFORESEEN):
            console.print(line, soft_wrap=True)
    if "recorded_ttft_s" in facts["requests"][0]:
        console.print(_recorded_table(facts["requests"]))
    if facts["trace"] is not None and len(facts["requests"]) > 1:
        console.print(f"{facts['trace']} has the first request", soft_wrap=True, markup=False)


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    model, requests = facts["model"], facts["requests"]
    shape = f"{model['layers']} layers, {model['experts']} experts, top-{model['top_k']}"
    if facts["system"] is not None:
        config = SystemConfig(**{name: facts[name] for name in CHOSEN})
        yield "system", system_name(facts["system"], config)
    yield "model", f"{shape}; layer and load times are the profile's, for any shape"
    if facts["routes"] is not None:
        yield "routes", facts["routes"]
    if facts["route_model"] is not None:
        yield "routes", _ROUTES.get(facts["route_model"], f"drawn like those of models/{facts['route_model']}")
    slots = f"{count_text(facts['slots'], 'slot')} each"
    stay = {"none": "", "all": ", experts stay"}.get(facts["residency"], f", residency {facts['residency']}")
    if facts["host_slots"] is not None:
        stay += f", host memory for {facts['host_slots']} experts each ({facts['host_residency']})"
    stay += f", placement {facts['placement']} with a host" if facts["host"] else ""
    yield "cluster", f"{count_text(facts['workers'], 'worker')} in groups of {facts['group_size']}, {slots}{stay}"
    aligned = f", aligned every {facts['align_token']} (token) and {facts['align_kv']} (KV)"
    name = facts["predictor"]
    yield "prediction", _SAYS.get(name, f"by {name}") + (aligned if name == "sep" else "")
    several = len(requests) > 1
    if several:
        yield "requests", _requests(facts)
    else:
        yield "request", f"{facts['prompt_tokens'][0]} tokens in, {facts['tokens'][0]} out"
    average = f" on average, {facts['ttft_worst_s']:.3f} s at worst" if several else ""
    yield "first token", f"{facts['ttft_s']:.3f} s{average}, prefill {facts['prefill']}"
    rate = facts["decode_tokens_per_s"]
    if rate is not None:
        yield from _decode_rows(facts, rate)
    yield "overall", f"{facts['tokens_per_s']:.2f} tokens/s"
    if facts["recall"] is not None:
        yield "recall", f"{facts['recall']:.2%}"
    if facts["bound"] is not None:
        chance = facts["bound"] == "shadow" and facts["predictor"] != "sep"  # there is no shadow
        yield "bottleneck", "wrong predictions" if chance else facts["bound"]
    yield "simulated in", f"{facts['wall_s']:.2f} s"


def _decode_rows(facts: dict[str, Any], rate: float) -> Iterator[tuple[str, str]]:
    """`rate`: tokens/s."""
    several = len(facts["requests"]) > 1
    yield "decoding", f"{rate:.2f} tokens/s{by_luck(facts['luck'])}{', all requests together' * several}"
    if several:
        gap = facts["token_gap_s"]
        yield "next token", f"after {gap['median']:.3f} s (median), {gap['worst']:.3f} s at worst"
    if facts["rows_a_pass"] is not None:
        yield "drafts", _drafts(facts)
    yield "loads", f"{facts['loads_a_token']:.1f} per token, {facts['reloads_a_token']:.1f} of them reloads"
    if facts["loads_from_memory"] is not None:
        yield "host memory", f"{facts['loads_from_memory']:.1%} of all loads found their expert there, not on disk"
    if facts["hit_rate"] is not None and facts["residency"] != "none":
        yield "hits", f"{facts['hit_rate']:.1%} of the experts used were in a slot when the gate fired"
    if facts["misses_a_token"] is not None and facts["residency"] != "none":
        yield "misses", _misses(facts["misses_a_token"])
    if several and facts["experts_a_layer"] is not None:
        each = f"{facts['tokens_a_step']:.1f} tokens need {facts['experts_a_layer']:.2f} of {facts['model']['experts']}"
        yield "step", f"{each} experts in a layer"


def by_luck(share: float | None) -> str:
    """The standard error over random routes and mispredictions; empty if it is negligible."""
    return f" ± {share:.1%} (standard error)" if share and share >= LEAST_LUCK else ""


def _misses(misses: dict[str, float]) -> str:
    parts = f"{misses['working_set']:.1f} with the best eviction too (working set), {misses['policy']:.1f} not (policy)"
    return f"{misses['total']:.1f} per token: {parts}"


def _drafts(facts: dict[str, Any]) -> str:
    each = f"{facts['rows_a_pass']:.1f} rows a pass give {facts['tokens_a_pass']:.1f} tokens"
    share = "" if facts["accepted"] is None else f", {facts['accepted']:.0%} of the drafts accepted"
    recorded = "recorded_ttft_s" in facts["requests"][0] and not facts["acceptance_given"]
    right = f"{facts['acceptance']:.1%} of the shadow's own tokens are right{', as recorded' * recorded}"
    return f"--draft {facts['draft']}: {each}{share}; {right}"


def _requests(facts: dict[str, Any]) -> str:
    """How many there are, how they come, and how the main node computes them."""
    count, at_once = len(facts["requests"]), facts["at_once"]
    found = f"{count}: {sum(facts['prompt_tokens'])} tokens in, {sum(facts['tokens'])} out"
    found += f"; one every {facts['interval']:g} s" if facts["interval"] else ""
    if at_once == 1:
        return f"{found}; one after the other"
    found += f"; {'all' if at_once >= count else f'up to {at_once}'} at once"
    return f"{found}, dense layers {'together' if facts['batch_dense'] else 'one by one'}"


def _time_lines(what: str, where: dict[str, float], causes: dict[str, str]) -> Iterator[str]:
    """The time of a decode token or step, by cause."""
    whole, wide = sum(where.values()), max(map(len, causes.values()))
    yield f"a decode {what}: {whole:.1f} ms"
    for cause, words in causes.items():
        share = where[cause] / whole if whole else 0.0
        yield f"  {words:<{wide}}  {where[cause]:8.2f} ms  {share:6.1%}  {'█' * round(BAR * share)}".rstrip()


def _recorded_table(requests: list[dict[str, Any]]) -> Table:
    """The simulated and the recorded speed of each request."""
    table = Table(box=None, padding=(0, 1), show_header=True, header_style="")
    for name in ("request", "first token s", "recorded", "decode tokens/s", "recorded"):
        table.add_column(f" {name}" if name == "request" else name, justify="right")
    for number, one in enumerate(requests, 1):
        rates = (one["decode_tokens_per_s"], one["recorded_decode_tokens_per_s"])
        table.add_row(
            str(number),
            f"{one['ttft_s']:.3f}",
            f"{one['recorded_ttft_s']:.3f}",
            *("-" if rate is None else f"{rate:.2f}" for rate in rates),
        )
    return table
