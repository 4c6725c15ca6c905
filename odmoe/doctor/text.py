"""The report as a person reads it: what is wrong first in each machine's lines, and how to cure it."""

from __future__ import annotations

import textwrap
from collections import Counter
from itertools import groupby

from rich.console import Console
from rich.text import Text

from odmoe.doctor.doctor import HERE, Report
from odmoe.doctor.machine import Result, State
from odmoe.terminal import count_text
from scheduler.one_line import one_line

STYLES = {State.OK: "green", State.WARNING: "yellow", State.FAILURE: "bold red", State.UNKNOWN: "dim"}
LABELS = {State.UNKNOWN: "-"}
STATE_WIDTH, NAME_WIDTH = 7, 12
WHOLE = 10_000
"""Width of a line that is not wrapped: of a pipe or a file."""


def print_report(report: Report, console: Console, every: bool) -> None:
    """`every`: also what is right on a cluster's hosts, which are many."""
    for host, results in groupby(report.results, lambda result: result.host):
        of_host = list(results)
        shown = [one for one in of_host if every or host == HERE or one.state in (State.WARNING, State.FAILURE)]
        right = sum(one.state is State.OK for one in of_host)
        unseen = sum(one.state is State.UNKNOWN for one in of_host) if not every and host != HERE else 0
        console.print(_title(host, len(shown) < len(of_host), right, unseen), soft_wrap=True)
        for result in shown:
            _print_result(result, console)
    console.print(_summary(report), soft_wrap=True)


def _title(host: str, shortened: bool, right: int, unseen: int) -> Text:
    text = Text(host, "bold")
    if shortened:
        text.append(f": {right} ok" + (f", {unseen} not checked" if unseen else ""), "not bold")
    return text


def _print_result(result: Result, console: Console) -> None:
    state = LABELS.get(result.state, result.state.value)
    lead = f"  {state:<{STATE_WIDTH}}  {result.name:<{NAME_WIDTH}} "
    value = f"not checked: {result.value}" if result.state is State.UNKNOWN else result.value
    room = max(30, console.width - len(lead) - 1) if console.is_terminal else WHOLE
    lines = textwrap.wrap(one_line(value, WHOLE), room, break_on_hyphens=False) or [""]
    cure = textwrap.wrap(f"> {one_line(result.cure, WHOLE)}", room, break_on_hyphens=False) if result.cure else []
    for number, line in enumerate([*lines, *cure]):
        text = Text(lead if number == 0 else " " * len(lead))
        if number == 0:
            text.stylize(STYLES[result.state], 2, 2 + STATE_WIDTH)
        text.append(line, "" if number < len(lines) else "bold")
        console.print(text, soft_wrap=True)


def _summary(report: Report) -> Text:
    counts = Counter(result.state for result in report.results)
    failed, warned = counts[State.FAILURE], counts[State.WARNING]
    parts = [f"{count_text(failed, 'failure')}", f"{count_text(warned, 'warning')}", f"{counts[State.OK]} ok"]
    parts += [f"{counts[State.UNKNOWN]} not checked"] if counts[State.UNKNOWN] else []
    style = STYLES[State.FAILURE if failed else State.WARNING if warned else State.OK]
    return Text(", ".join(parts), style)
