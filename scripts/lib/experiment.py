"""An experiment: cells that are computed once, progress, and what is written.

An experiment is a list of cells, each parameters and a result. A finished cell is a line of OUT/NAME.cells.jsonl from
that moment on, under a key of all that decides it: its parameters, the script's version, the model, the timings. So a
second run computes what is missing, and one that was interrupted or killed goes on where it was. A line says of which
code it is, too: cells of other code count, since most changes do not touch them and some take hours, but they are
told of, on the screen and in what is written. Beside it are written NAME.csv, NAME.json and NAME.png; with --quick
all of them are called NAME-quick.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from scripts.lib.ledger import PACKAGES, Ledger, digest, sources
from scripts.lib.plots import write_foot
from scripts.lib.provenance import command, commit, machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOLD_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Cell:
    """`params`: what JSON can say. `cost`: a guess of its seconds. `packages`: what it is computed by."""

    params: dict[str, Any]
    cost: float = 1.0
    packages: tuple[str, ...] = PACKAGES


def plural(count: int, what: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{count} {what}" + ("" if count == 1 else "s")


class Experiment:
    """One script's run. `version`: one more whenever cells of before no longer count. `depends`: what else decides
    every cell (model, timings); whatever JSON can say, or dataclasses. `note`: what must stand beside every figure,
    such as `emulated: rtx3090-1gbe`."""

    def __init__(
        self, name: str, args: argparse.Namespace, version: int, depends: dict[str, Any], note: str = ""
    ) -> None:
        self.name = f"{name}-quick" if args.quick else name
        self.folder = Path(args.out)
        self.note, self._model = note, str(args.model)
        self._version, self._depends = version, depends
        sources(*PACKAGES)  # now, before anybody changes them
        self._asked: dict[str, Cell] = {}
        self._ledger = Ledger(self.folder / f"{self.name}.cells.jsonl", args.fresh)
        self._console = Console(stderr=True)
        self._tidy()

    def __enter__(self) -> Experiment:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ledger.close()

    def _tidy(self) -> None:
        """A killed run leaves its scratch, and files of a cell that it did not finish; --fresh those of all cells."""
        for left in self.folder.glob(f".{self.name}.scratch-*"):
            shutil.rmtree(left, ignore_errors=True)
        finished = self._ledger.keys()
        for file in (self.folder / f"{self.name}.files").glob("*"):
            if file.name.split(".")[0] not in finished:
                file.unlink()

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        """A folder beside the results, for as long as a `with` holds it, or until the next run if one is killed."""
        return tempfile.TemporaryDirectory(prefix=f".{self.name}.scratch-", dir=self.folder)

    def key(self, params: dict[str, Any]) -> str:
        return digest({"params": params, "version": self._version, "depends": self._depends})

    def path(self, params: dict[str, Any], suffix: str) -> Path:
        """Where a cell may keep a file of its own."""
        folder = self.folder / f"{self.name}.files"
        folder.mkdir(exist_ok=True)
        return folder / f"{self.key(params)}{suffix}"

    def all(
        self,
        cells: Sequence[Cell],
        measure: Callable[[dict[str, Any]], dict[str, Any]],
        whole: Callable[[dict[str, Any]], bool] = lambda params: True,
    ) -> list[dict[str, Any]]:
        """Each cell's result, in the cells' order; `measure` is called for those that are missing, or not `whole` any
        more. Ctrl-C leaves what is finished: SystemExit 130."""
        keys = [self.key(cell.params) for cell in cells]
        self._asked |= zip(keys, cells, strict=True)
        missing = [
            (key, cell)
            for key, cell in dict(zip(keys, cells, strict=True)).items()
            if self._ledger.get(key) is None or not whole(cell.params)
        ]
        done = len(set(keys)) - len(missing)
        if done:
            self._console.print(f"{done} of {len(set(keys))} cells were finished before (--fresh forgets them)")
        if other := self._of_other_code():
            self._console.print(f"[yellow]{other}; --fresh computes all anew")
        if missing:
            guess = sum(cell.cost for _, cell in missing) / 60
            self._console.print(f"{plural(len(missing), 'cell')} to compute, at a guess {guess:.1f} min")
        try:
            with self._progress(missing) as advance:
                for key, cell in missing:
                    self._ledger.put(key, cell.params, measure(cell.params), sources(*cell.packages))
                    done += 1
                    advance(cell)
        except KeyboardInterrupt:
            self._console.print(f"interrupted: {done} of {len(set(keys))} cells are kept; the same command goes on")
            raise SystemExit(130) from None
        return [result for key in keys if (result := self._ledger.get(key)) is not None]

    def _of_other_code(self) -> str | None:
        """In words, how many of the cells that were asked for so far are of other code than this; None: none."""
        known = {key: cell for key, cell in self._asked.items() if self._ledger.get(key) is not None}
        other = sum(self._ledger.code(key) != sources(*cell.packages) for key, cell in known.items())
        return f"{other} of {plural(len(known), 'finished cell')} computed by other code than this" if other else None

    @contextlib.contextmanager
    def _progress(self, missing: list[tuple[str, Cell]]) -> Iterator[Callable[[Cell], None]]:
        """A bar by cost, with the time that is left; a line now and then if there is no terminal."""
        total, spent, count = sum(cell.cost for _, cell in missing), 0.0, 0
        began = told = time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("cells,"),
            TimeElapsedColumn(),
            TextColumn("gone,"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        terminal = self._console.is_terminal
        # Rich estimates from what happened within this period: over all, since cells are few and long.
        with Progress(*columns, console=self._console, disable=not terminal, speed_estimate_period=1e9) as bar:
            task = bar.add_task(self.name, total=len(missing))

            def advance(cell: Cell) -> None:
                nonlocal spent, count, told
                spent, count, now = spent + cell.cost, count + 1, time.monotonic()
                # Cells differ in cost: the bar goes by cost, counted in cells.
                bar.update(task, completed=len(missing) * spent / total)
                if not terminal and (now - told > TOLD_EVERY_S or count == len(missing)):
                    told, left = now, (now - began) / spent * (total - spent)
                    self._console.print(f"{self.name}: {count} of {len(missing)} cells, about {left / 60:.1f} min left")

            yield advance

    def write(self, rows: list[dict[str, Any]], **more: Any) -> None:
        """NAME.csv of the rows, NAME.json of rows and `more`; both with machine and command. Whole or not at all."""
        facts = self.facts()
        when = {"when": time.strftime("%Y-%m-%d %H:%M")}
        self._replace(".json", json.dumps({**facts, **when, **more, "rows": rows}, indent=1) + "\n")
        text = io.StringIO()
        text.writelines(f"# {name}: {value}\n" for name, value in facts.items())
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = csv.DictWriter(text, names, lineterminator="\n")
        table.writeheader()
        table.writerows(
            {name: json.dumps(v) if isinstance(v, list | dict) else v for name, v in r.items()} for r in rows
        )
        self._replace(".csv", text.getvalue())

    def facts(self) -> dict[str, str]:
        """What stands with every figure."""
        facts = {"machine": machine(), "command": command(), "commit": commit(), "model": self._model}
        note = "; ".join(filter(None, (self.note, self._of_other_code())))
        return facts | ({"note": note} if note else {})

    def _replace(self, suffix: str, text: str) -> None:
        partial = self.folder / f".{self.name}{suffix}.partial"
        partial.write_text(text)
        os.replace(partial, self.folder / f"{self.name}{suffix}")

    def save(self, figure: Figure, suffix: str = "") -> Path:
        """NAME+suffix.png, with machine and command in small print at its foot."""
        facts = self.facts()
        last = "; ".join(facts.pop(name) for name in ("model", "note") if name in facts)
        write_foot(figure, [*facts.values(), last])
        path = self.folder / f"{self.name}{suffix}.png"
        figure.savefig(path)
        return path

    def written(self, pictures: Iterable[Path] = ()) -> str:
        """The line that a script ends with."""
        return "; ".join([f"written: {self.folder / self.name}.csv, .json", *map(str, pictures)])
