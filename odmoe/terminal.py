"""What a person sees on standard error: progress, a last block of figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from main_node.report import Report

_WHAT = {
    "verify": "checking bytes",
    "resume": "checking what is there",
    "wait": "waiting for another",
    "experts": "writing experts",
    "dense": "writing dense weights",
}


_NAMES = {
    "written_s": "written in seconds",
    "layers_resumed": "layers taken over",
    "verified_gb_per_s": "verified, GB/s",
    "moe_layers": "MoE layers",
}


class Terminal:
    """Everything goes to standard error; bars and spinners only where that is a terminal."""

    def __init__(self, quiet: bool = False, debug: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.debug = debug

    def complain(self, text: str) -> None:
        """A line that is shown with --quiet too."""
        print(text, file=self.console.file, flush=True)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[str, int, int], None]]:
        """A callback `(what, done, total)` that moves a bar."""
        columns = (TextColumn("{task.description:<22}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bars:
            tasks: dict[str, Any] = {}

            def move(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = bars.add_task(_WHAT.get(what, what), total=total)
                bars.update(tasks[what], completed=done, total=total)

            yield move

    @contextlib.contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        """A callback that says what is being waited for."""
        if not self.console.is_terminal:
            yield lambda text: None
            return
        with self.console.status("starting") as spinner:
            yield lambda text: spinner.update(text)

    def facts(self, title: str, facts: dict[str, object]) -> None:
        """A short block, a line a fact; plain where nobody draws it, so that a log has no broken lines."""
        facts = {_NAMES.get(name, name.replace("_", " ")): value for name, value in facts.items()}
        texts = {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in facts.items()}
        if not self.console.is_terminal:
            lines = (f"  {name:<{max(map(len, texts))}}  {text}" for name, text in texts.items())
            self.console.print("\n".join((title, *lines)), markup=False, soft_wrap=True)
            return
        table = Table(
            title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2)
        )
        for name, text in texts.items():
            table.add_row(name, text)
        self.console.print(table)

    def report(self, report: Report, cluster: str, system: str = "od-moe") -> None:
        """The last block of an answer. `system`: its name, and what was chosen otherwise."""
        memory = report.memory_bytes
        of_each = memory["workers"] if isinstance(memory["workers"], list) else []
        workers = [held for held in of_each if held]  # a host place holds nothing on the device
        rate = f"{report.decode_tokens_per_s:.1f}" if report.decode_tokens_per_s else "-"
        recall = (
            "nobody predicts"
            if report.recall is None
            else f"{report.recall:.2%} of activated experts predicted, {report.recall_in_time or 0:.2%} before the gate"
        )
        if report.unpredicted:
            recall = "nothing was predicted" if report.recall is None else recall
            recall += f"; {report.unpredicted:,} experts not counted, in layers that nobody predicted"
        share = report.memory_of_whole
        whole = "not every node said what it holds" if share is None else f"{share:.0%} of the model with all experts"
        rows = {
            "tokens": f"{report.prompt_tokens} in, {report.new_tokens} out",
            "speed": f"{rate} tokens/s decoding, first token after {report.ttft_s:.2f} s"
            + (f", shadow ready {report.shadow_wait_s:.2f} s after that" if report.shadow_wait_s > 0.05 else ""),
            "recall": recall,
            "hits": f"{report.hits / max(1, report.named):.2%} of experts were in a slot when their gate named them",
            "loads": f"{report.loads} experts, {megabytes(report.bytes_loaded)}; "
            f"{report.reloads} of them after the gate (reloads), "
            f"{report.unused_loads} unused, {report.stall_s:.2f} s stalled",
            "memory": f"main {megabytes(memory['main'])}, shadow {megabytes(memory['shadow'])}, "
            f"{_counted(len(workers), 'worker')} {megabytes(max(workers, default=0))}"
            f"{' each' if len(workers) > 1 else ''}: " + whole,
            "residents": f"at most {_counted(max(report.resident_experts_max, default=0), 'expert')} on any worker",
        }
        if report.host_computed:
            rows["host"] = f"computed {report.host_computed} of {report.named} experts beside the device"
        if report.finish == "context":
            rows["ended"] = "the context is full: fewer tokens than asked for"
        if report.lost:
            rows["lost"] = ", ".join(report.lost)
        if report.rejoined:
            rows["came back"] = ", ".join(report.rejoined)
        if report.finish == "stop_text":
            rows["ended"] = "at a stop text"
        if report.seed is not None:
            rows["drawn"] = f"with --seed {report.seed}"
        if report.ignored:
            rows["ignored"] = ", ".join(report.ignored) + " of generation_config.json: not built yet"
        if report.emulated:
            for timed in ("speed", "loads"):
                rows[timed] += f" (emulated: {report.emulated})"
        exact = "exact" if report.exact else "approximate"
        title = f"{system}, {cluster}, {exact}" + (f", emulated: {report.emulated}" if report.emulated else "")
        self.console.print()
        self.facts(title, dict(rows))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def megabytes(count: object) -> str:
    """`12.3 MB`, `4.5 GB`."""
    value = float(count) if isinstance(count, int) else 0.0
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"
