"""Standard error as a person sees it: progress, and blocks of figures in aligned columns.

Parts of rich are imported when they are first needed, so that the help of a command appears at once.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.one_line import one_line

_TASKS = {
    "verify": "checking bytes",
    "resume": "checking what is there",
    "wait": "waiting for another process",
    "experts": "writing experts",
    "dense": "writing dense weights",
    "parts": "writing parts",
    "int4": "quantising to int4",
    "int2": "quantising to int2",
    "pull": "fetching",
}
"""How a bar is labelled, by the name of its task."""

_IN_BYTES = ("verify", "experts", "dense", "parts", "int4", "int2", "pull")
"""Tasks that count bytes: their bars show bytes and a rate."""
LONGEST = 1 << 16
"""Characters of a line."""
SECONDS_S = 3.0
"""From then on a spinner says how long it has been there."""
LINE_S = 10.0
"""Seconds between two lines about progress where there is no terminal for a bar or a spinner."""


@dataclass(frozen=True, slots=True)
class Output:
    """How a command prints."""

    json: bool = False
    """JSON on standard output, one object a line, in place of text."""
    quiet: bool = False
    """Nothing on standard error but errors."""
    debug: bool = False
    """Tracebacks, and the log messages of libraries."""


class Terminal:
    """Everything goes to standard error. Bars and spinners are shown only where that is a terminal; elsewhere what
    takes long prints a line now and then."""

    def __init__(self, quiet: bool = False, debug: bool = False) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.debug = debug

    def print_always(self, text: str) -> None:
        """A line that is shown with --quiet too."""
        print(one_line(text), file=self.console.file, flush=True)

    def notify(self, text: str) -> None:
        """A line about what happened, between the lines of an answer."""
        if self.console.is_terminal and sys.stdout.isatty():
            self._line("")  # the answer's line so far is on the same screen
        self._line(text)

    @contextlib.contextmanager
    def progress(self, text: str = "", lines: bool = True) -> Iterator[Callable[[str, int, int], None]]:
        """A callback `(task, done, total)` that moves a bar. `text` is shown until the first call.

        Without a terminal it prints a line for each task that lasts longer than `LINE_S`, and again after as long; not
        so without `lines`. Of `text` likewise.
        """
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description:<22}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeRemainingColumn(compact=True),
        )
        shown = self.console.is_terminal
        # Standard output is left alone: rich would send what is printed there to this console.
        bars = Progress(
            *columns, console=self.console, transient=True, disable=not shown, redirect_stdout=False, expand=True
        )
        with bars, contextlib.ExitStack() as waiting:
            if text and lines and not shown:
                waiting.enter_context(self._lines(text))
            tasks: dict[str, Any] = {}
            idle = [bars.add_task(one_line(text), total=None, amount="")] if text else []
            paces: dict[str, _Pace] = {}

            def move(task: str, done: int, total: int) -> None:
                while idle:
                    bars.remove_task(idle.pop())
                waiting.close()
                if task not in tasks:
                    tasks[task] = bars.add_task(one_line(_TASKS.get(task, task)), total=total, amount="")
                bars.update(tasks[task], completed=done, total=total)
                if shown:
                    rate = bars.tasks[bars.task_ids.index(tasks[task])].speed
                    bars.update(tasks[task], amount=_amount(done, total, rate, task in _IN_BYTES))
                elif lines:
                    line = paces.setdefault(task, _Pace(done)).line(done, total)
                    if line:
                        self._line(f"{_TASKS.get(task, task)}: {line}")

            yield move

    @contextlib.contextmanager
    def status(self, text: str = "starting") -> Iterator[Callable[[str], None]]:
        """A spinner with a text, and a callback that changes the text. Without a terminal, a line each `LINE_S`."""
        if not self.console.is_terminal:
            with self._lines(text) as say:
                yield say
            return
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        began, spinner = time.monotonic(), Spinner("dots", style="status.spinner")

        def drawn() -> Spinner:
            spent = time.monotonic() - began
            spinner.update(text=Text(one_line(text) + (f" ({spent:.0f} s)" if spent >= SECONDS_S else "")))  # no markup
            return spinner

        def change(new: str) -> None:
            nonlocal text
            text = new

        with Live(
            get_renderable=drawn,
            console=self.console,
            refresh_per_second=12.5,
            transient=True,
            redirect_stdout=False,
        ):
            yield change

    @contextlib.contextmanager
    def _lines(self, text: str) -> Iterator[Callable[[str], None]]:
        """The text and the seconds so far as a line each `LINE_S`; the callback changes the text."""
        began, ended = time.monotonic(), threading.Event()

        def say(new: str) -> None:
            nonlocal text
            text = new

        def run() -> None:
            while not ended.wait(LINE_S):
                self._line(f"{text} ({time.monotonic() - began:.0f} s so far)")

        lines = threading.Thread(target=run, name="progress-lines", daemon=True)
        lines.start()
        try:
            yield say
        finally:
            ended.set()
            lines.join()  # so that no line comes after what is printed next

    def facts(self, title: str, facts: dict[str, object]) -> None:
        """A title, then a line a fact."""
        texts = {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in facts.items()}
        self.block(title, list(texts.items()))

    def block(self, title: str, *groups: Sequence[tuple[str, str]]) -> None:
        """A title, then groups of `(label, text)` with an empty line between two. The labels share one column.

        A terminal gets long texts wrapped in their column; a pipe or a file gets whole lines.
        """
        column = max(len(label) for group in groups for label, _ in group)
        room = max(20, self.console.width - column - 4) if self.console.is_terminal else sys.maxsize
        self._line(title, style="bold")
        for number, group in enumerate(groups):
            if number:
                self._line("")
            for label, text in group:
                parts = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
                for part in parts or [""]:
                    self._line(f"  {label:<{column}}  {part}")
                    label = ""

    def table(self, title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A title, then columns aligned on the right."""
        self._line(title, style="bold")
        for line in aligned([header, *rows], right=range(len(header))):
            self._line(f"  {line}")

    def _line(self, text: str, style: str | None = None) -> None:
        self.console.print(one_line(text, LONGEST), style=style, markup=False, soft_wrap=True)


class _Pace:
    """A task's progress as lines of text, `LINE_S` apart. `done`: what was done when it began."""

    def __init__(self, done: int) -> None:
        self._first = done
        self._began = self._last = time.monotonic()

    def line(self, done: int, total: int) -> str | None:
        """`45%, about 20 s left`; None where it is too early for another line."""
        now = time.monotonic()
        if now - self._last < LINE_S or not self._first < done < total:
            return None
        self._last = now
        left = (now - self._began) / (done - self._first) * (total - done)
        return (
            f"{done / total:.0%}, about {left:.0f} s left"
            if left < 180
            else (f"{done / total:.0%}, about {left / 60:.0f} min left")
        )


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """A line for each row, its columns as wide as their longest cell. `right`: those that stand to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if column in right else "<" for column in range(len(widths))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def task_name(task: str) -> str:
    """A task as people read it: `experts` -> `writing experts`."""
    return _TASKS.get(task, task)


def _amount(done: int, total: int, rate: float | None, is_bytes: bool) -> str:
    """`1.2/4.7 GB 103.5 MB/s`, or `35%`."""
    if not is_bytes:
        return f"{done / max(1, total):>4.0%}"
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    speed = "" if rate is None else f" {rate / 1e6:.1f} MB/s"
    return f"{done / unit:.1f}/{total / unit:.1f} {name}{speed}"


def count_text(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def megabytes(count: object) -> str:
    """`12.3 MB`, `4.5 GB`."""
    value = float(count) if isinstance(count, int) else 0.0
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"
