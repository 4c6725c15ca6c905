"""What every experiment of the paper shares: flags, cells that are computed once, progress, and what is written.

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
import dataclasses
import fcntl
import functools
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from scripts.lib import common

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, AMBER, RED, DARK, PURPLE, PALE = "#3b6ea5", "#f0b429", "#d64545", "#222222", "#8d6bb3", "#9fb8cf"
DPI, FOOT_POINTS = 130, 5.5
PACKAGES = ("scheduler", "wire", "checkpoint", "main_node", "shadow_node", "worker_node", "odmoe")
"""What a real answer is made by."""
TOLD_EVERY_S, PREDICTED_S = 30.0, 60.0


@dataclass(frozen=True, slots=True)
class Cell:
    """`params`: what JSON can say. `cost`: a guess of its seconds. `packages`: what it is computed by."""

    params: dict[str, Any]
    cost: float = 1.0
    packages: tuple[str, ...] = PACKAGES


def flags(about: str, prompts: tuple[int, int], tokens: tuple[int, int], model: Path | None = common.DEEP) -> Any:
    """The flags of every experiment. `prompts`, `tokens`: how many unless said, and how many of them with --quick.
    `model`: None where the script has a flag of its own for several."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if model is not None:
        parser.add_argument("--model", default=str(model.relative_to(common.ROOT)), help="%(default)s unless said")
    parser.add_argument("--prompts", type=whole, help=f"how many; {prompts[0]} unless said")
    parser.add_argument("--tokens", type=whole, help=f"of each answer; {tokens[0]} unless said")
    parser.add_argument("--seed", type=int, default=0, help="of whatever is drawn")
    parser.add_argument("--quick", action="store_true", help="a minute's version, written beside the whole one")
    parser.add_argument("--fresh", action="store_true", help="forget the cells that were finished before")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="directory to write to; results/ unless said")
    parser.set_defaults(sizes={"prompts": prompts, "tokens": tokens})
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """As `parse_args`, with the sizes that --quick or nobody has said. A model's path is one beneath the project, or
    beneath where the script was started."""
    args = parser.parse_args(argv)
    for name, (usual, quick) in args.sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else usual)
    if "model" in args and not Path(args.model).exists() and (common.ROOT / args.model).exists():
        args.model = str(common.ROOT / args.model)
    return args


def whole(text: str) -> int:
    """A count on the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 1, 2, ...")
    return int(text)


def many(count: int, what: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{count} {what}" + ("" if count == 1 else "s")


def digest(value: Any) -> str:
    """Of anything that JSON can say; dataclasses as their fields."""
    text = json.dumps(value, sort_keys=True, default=lambda one: dataclasses.asdict(one))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sources(*packages: str) -> str:
    """A digest of these packages' Python and YAML files, as they were when the experiment began: what is changed later
    is not what runs. In the key of cells that are cheap and depend on every line of them."""
    return digest([_sources(package) for package in packages]) if len(packages) > 1 else _sources(*packages)


@functools.cache
def _sources(package: str) -> str:
    sums = hashlib.sha256()
    for path in sorted(p for p in (common.ROOT / package).rglob("*") if p.suffix in (".py", ".yaml")):
        sums.update(str(path.relative_to(common.ROOT)).encode() + b"\0" + path.read_bytes())
    return sums.hexdigest()[:16]


class Ledger:
    """Finished cells in a file, a line each. Held by one process at a time.

    A last line without its end is what a killed process left of a cell, and is cut off. Any other line that cannot be
    read is named and its cell computed again.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise SystemExit(f"{path} is being written by another run; wait for it, or give another --out") from None
        if fresh:
            os.ftruncate(self._file, 0)
        text = path.read_bytes()
        ended = text.rfind(b"\n") + 1
        if ended < len(text):
            os.ftruncate(self._file, ended)
        found = list(self._read(text[:ended]))
        self._found = {key: result for key, result, _ in found}
        self._code = {key: code for key, _, code in found}

    def _read(self, text: bytes) -> Iterator[tuple[str, dict[str, Any], str | None]]:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                fields = json.loads(line)
                yield str(fields["key"]), dict(fields["result"]), fields.get("code")
            except (ValueError, KeyError, TypeError):
                print(f"{self.path}, line {number}: no finished cell; it is computed again", file=sys.stderr)

    def get(self, key: str) -> dict[str, Any] | None:
        return self._found.get(key)

    def code(self, key: str) -> str | None:
        """Of which code a finished cell is, as far as it says."""
        return self._code.get(key)

    def put(self, key: str, params: dict[str, Any], result: dict[str, Any], code: str) -> None:
        """On the disk when this returns."""
        line = json.dumps({"key": key, "params": params, "code": code, "result": result}).encode() + b"\n"
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)
        self._found[key], self._code[key] = result, code

    def keys(self) -> set[str]:
        return set(self._found)

    def close(self) -> None:
        os.close(self._file)


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
        """A folder beside the results, for as long as a `with` holds it, or until the next run where one is killed."""
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
            self._console.print(f"{many(len(missing), 'cell')} to compute, at a guess {guess:.1f} min")
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
        return f"{other} of {many(len(known), 'finished cell')} computed by other code than this" if other else None

    @contextlib.contextmanager
    def _progress(self, missing: list[tuple[str, Cell]]) -> Iterator[Callable[[Cell], None]]:
        """A bar by cost, with the time that is left; a line now and then where there is no terminal."""
        total, spent, count = sum(cell.cost for _, cell in missing), 0.0, 0
        began = told = time.monotonic()
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("cells,"),
            TimeElapsedColumn(), TextColumn("gone,"), TimeRemainingColumn(), TextColumn("left"),
        )  # fmt: skip
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
        facts = {"machine": common.machine(), "command": common.command(), "model": self._model}
        note = "; ".join(filter(None, (self.note, self._of_other_code())))
        return facts | ({"note": note} if note else {})

    def _replace(self, suffix: str, text: str) -> None:
        partial = self.folder / f".{self.name}{suffix}.partial"
        partial.write_text(text)
        os.replace(partial, self.folder / f"{self.name}{suffix}")

    def save(self, figure: Figure, suffix: str = "") -> Path:
        """NAME+suffix.png, with machine and command in small print at its foot."""
        width, height = figure.get_size_inches()
        across = int(width * 72 / (FOOT_POINTS * 0.52))
        facts = self.facts()
        last = "; ".join(facts.pop(name) for name in ("model", "note") if name in facts)
        lines = [line for text in (*facts.values(), last) for line in textwrap.wrap(text, across)]
        foot = (len(lines) * 1.25 + 1) * FOOT_POINTS / 72 / height
        figure.get_layout_engine().set(rect=(0, foot, 1, 1 - foot))  # type: ignore[union-attr,call-arg]
        figure.text(0.008, 0.4 * FOOT_POINTS / 72 / height, "\n".join(lines), fontsize=FOOT_POINTS, color="#666666",
                    linespacing=1.2, va="bottom")  # fmt: skip
        path = self.folder / f"{self.name}{suffix}.png"
        figure.savefig(path)
        return path

    def written(self, pictures: Iterable[Path]) -> str:
        """The line that a script ends with."""
        return f"written: {self.folder / self.name}.csv, .json; {', '.join(map(str, pictures))}"


def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Figure, list[Any]]:
    """A figure of so many inches for `Experiment.save`, and its panels."""
    from matplotlib.figure import Figure

    figure = Figure((width, height), dpi=DPI, layout="constrained")
    found = list(figure.subplots(rows, columns, squeeze=False, **more).flat)
    for panel in found:
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure, found


class Kept:
    """A cluster that stays up for as long as its settings are asked for. Closed with the `with` that holds it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._settings: Any = None
        self._cluster: Any = None

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Of no cluster: nothing."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()

    def cluster(self, settings: Any, warm: list[int] | None = None) -> Any:
        """Started with `settings`, an odmoe.settings.settings.Settings; another one is closed first. A new one answers
        the prompt `warm` before anything is measured, if there is one."""
        from odmoe.start import start_cluster

        if self._cluster is None or settings != self._settings:
            self.close()
            self._cluster, self._settings = start_cluster(settings, self._store), settings
            if warm is not None:
                answer(self._cluster, warm, 4)
        return self._cluster


def open_model(args: argparse.Namespace, dtype: str) -> tuple[Any, Any]:
    """The model's store and tokenizer, of a process made ready for both."""
    from odmoe.clusters.process import prepare_libraries, prepare_process
    from odmoe.settings.settings import Settings
    from odmoe.stores import prepare_store
    from odmoe.text import load_tokenizer

    prepare_process()
    prepare_libraries(Settings(model=args.model).threads_a_node)
    store = prepare_store(args.model, None, dtype)
    return store, load_tokenizer(store.dense)


def answer(cluster: Any, prompt: list[int], tokens: int, **how: Any) -> Any:
    """The report of one answer; end of sequence is heeded only if `ignore_eos=False`."""
    *_, last = cluster.generate(prompt, tokens, **{"ignore_eos": True, **how})
    return last.report


def predicted(cluster: Any, prompt: list[int], tokens: int, **how: Any) -> Any:
    """As `answer`, of a cluster in this process, whose main node waits for the shadow after each token: without that a
    shadow that is slower than the main node, as on two cores, is left behind, and what it says too late is lost."""
    steps = cluster.generate(prompt, tokens, **{"ignore_eos": True, **how})
    for step in steps:
        if step.report is None and not cluster.main.engine.wait_for_predictions(steps.number, PREDICTED_S):
            raise SystemExit(f"the shadow's predictions of a token did not come within {PREDICTED_S:.0f} s")
    if step.report.unpredicted:
        raise SystemExit("the shadow's predictions of the last token did not come in time; the same command goes on")
    return step.report
