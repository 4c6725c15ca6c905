"""Do the tests find faults? Each fault of tests/mutations.yaml is put into a copy of the tree, and the tests run there.

    python -m scripts.measure.mutations            every fault: its own tests first, then the whole fast suite
    python -m scripts.measure.mutations --quick    its own tests only
    python -m scripts.measure.mutations --only ID ...
    python -m scripts.measure.mutations --resume   goes on after an interrupt
    python -m scripts.measure.mutations --list
    python -m scripts.measure.mutations --check    does every entry still fit the code?

A fault is killed when a test fails that passes without it, and has survived when all pass. One pytest process runs at a
time, under a deadline; every process that it leaves behind is ended. Ends with 0 when all were killed, with 1 when some
survived, with 2 when the list or the suite is at fault.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT / "tests" / "mutations.yaml"
RESULTS = ROOT / "results" / "mutations.jsonl"

TEST_S = 120
"""Seconds that one test may take: a fault may make it wait for ever."""

OWN_S, SUITE_S = 900.0, 1800.0
"""Seconds that a fault's own tests, and the whole fast suite, may take."""

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", f"--timeout={TEST_S}")
_NO_TESTS = 5


class ListError(Exception):
    """The list of faults, or the suite without any fault, is wrong."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`old`, which `file` has exactly once, becomes `new`. `breaks`: what goes wrong then. `tests`: the folders or
    files most likely to notice."""

    id: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`by`: the test that failed, or what else ended the run; of a survivor, what passed."""

    id: str
    digest: str
    killed: bool
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"{'killed' if self.killed else 'SURVIVED':8}  {self.id:32} {self.seconds:6.1f} s  {self.by}"


# --- the list ----------------------------------------------------------------------------------------------------


def read_faults(path: Path) -> list[Fault]:
    """Raises ListError where an entry lacks a key, has one too many, or shares its id."""
    names = {field.name for field in fields(Fault)}
    faults: list[Fault] = []
    for number, entry in enumerate(yaml.safe_load(path.read_text()), 1):
        if not isinstance(entry, dict) or set(entry) != names:
            raise ListError(f"{path.name}: entry {number} must have {', '.join(sorted(names))} and no more")
        faults.append(Fault(**(entry | {"tests": tuple(entry["tests"])})))
    ids = [fault.id for fault in faults]
    if double := sorted({one for one in ids if ids.count(one) > 1}):
        raise ListError(f"{path.name}: {', '.join(double)}: the id stands there more than once")
    return faults


def check(faults: Sequence[Fault], root: Path) -> None:
    """Raises ListError naming every entry that does not fit the tree at `root`, and why."""
    wrong = [f"{fault.id}: {why}" for fault in faults if (why := _wrong(fault, root))]
    if wrong:
        raise ListError("\n".join(wrong))


def _wrong(fault: Fault, root: Path) -> str:
    if not (root / fault.file).is_file():
        return f"there is no file {fault.file}"
    if missing := [one for one in fault.tests if not (root / one).exists()]:
        return f"there are no tests {', '.join(missing)}"
    text = (root / fault.file).read_text()
    if (count := text.count(fault.old)) != 1:
        return f"`old` stands {count} times in {fault.file}, and must stand there once"
    try:
        if ast.dump(ast.parse(mutated(fault, text))) == ast.dump(ast.parse(text)):
            return "`new` means the same as `old`"
    except SyntaxError as error:
        return f"`new` is no Python: {error}"
    return "" if fault.tests else "it names no tests"


def mutated(fault: Fault, text: str) -> str:
    return text.replace(fault.old, fault.new, 1)


# --- the copy ----------------------------------------------------------------------------------------------------


class Tree:
    """A copy of the working tree's files (those that git does not ignore), and pytest in it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "tree"
        self._temporary = folder / "tmp"
        self._log = folder / "log"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=True,
            timeout=60,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (root / name).is_file():  # else it was removed, and git was not told
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.root / name)

    @contextlib.contextmanager
    def having(self, fault: Fault) -> Iterator[None]:
        path = self.root / fault.file
        text = path.read_text()
        self._write(path, mutated(fault, text))
        try:
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # What was compiled counts as fresh where the file's size and second are the same.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def check_imports(self, faults: Sequence[Fault]) -> None:
        """Raises ListError unless the copy's modules are the ones imported, from whatever folder."""
        modules = sorted({fault.file.removesuffix(".py").replace("/", ".") for fault in faults})
        code = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
        status = self._run(("-c", code, *modules), 300.0, Path("/"))
        found = self._log.read_text().splitlines()
        if status != 0 or len(found) != len(modules):
            raise ListError(f"the copy's modules cannot be imported:\n{self.tail()}")
        if strangers := [one for one in found if not Path(one).is_relative_to(self.root)]:
            raise ListError(f"tests would import {', '.join(strangers)}, which are not the copy's")

    def tail(self) -> str:
        """The last lines of what ran last."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])

    def pytest(self, tests: Sequence[str], limit_s: float, more: Sequence[str] = ()) -> str:
        """What failed: a test, a file that could not be collected, or how pytest itself ended; empty: all passed."""
        status = self._run((*_PYTEST, *more, *tests), limit_s, self.root)
        if status == 0:
            return ""
        if status is None:
            return f"no end within {limit_s:.0f} s"
        for line in self._log.read_text(errors="replace").splitlines():
            for word in ("FAILED ", "ERROR "):
                if line.startswith(f"{word}tests/"):
                    return line.removeprefix(word).split(" - ")[0]
        if status == _NO_TESTS:
            raise ListError(f"no tests were collected from {' '.join(tests) or 'the whole suite'}")
        return f"pytest ended by signal {-status}" if status < 0 else f"pytest ended with status {status}"

    def _run(self, arguments: Sequence[str], limit_s: float, where: Path) -> int | None:
        """Its exit status; None where it was ended at the limit."""
        self._temporary.mkdir()
        # Before everything else, an installed package of ours included, and in every process that a test starts.
        env = os.environ | {"PYTHONPATH": str(self.root), "TMPDIR": str(self._temporary)}
        try:
            with self._log.open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, *arguments],
                    cwd=where,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                try:
                    return process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    return None
        finally:
            end_descendants()
            for left in (self._temporary, self.root / ".hypothesis"):  # a found example would help the next fault
                shutil.rmtree(left, ignore_errors=True)


def end_descendants() -> None:
    """Ends every process that was started from here, orphans included: `adopt_orphans` makes them our children."""
    for _ in range(20):
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


# --- the verdicts ------------------------------------------------------------------------------------------------


class Judge:
    """`sick`: tests that fail without any fault; they are left out."""

    def __init__(self, tree: Tree, quick: bool) -> None:
        self.sick: list[str] = []
        self._tree = tree
        self._quick = quick
        self._healthy: set[str] = set()

    def judge(self, fault: Fault) -> Verdict:
        began = time.monotonic()
        by = self._killer(fault, fault.tests, OWN_S)
        passed = ", ".join(fault.tests)
        if not by and not self._quick:
            by = self._killer(fault, (), SUITE_S)
            passed = "the whole fast suite"
        seconds = time.monotonic() - began
        return Verdict(
            fault.id, digest(fault, self._tree.root, self._quick), bool(by), by or f"{passed} passed", seconds
        )

    def _killer(self, fault: Fault, tests: Sequence[str], limit_s: float) -> str:
        """What fails with the fault and not without; empty: nothing."""
        while True:
            with self._tree.having(fault):
                by = self._tree.pytest(tests, limit_s, self._left_out())
            if not by or self._is_healthy(by, tests):
                return by
            self.sick.append(by)
            print(f"fails without any fault, too, and is left out: {by}", flush=True)

    def _is_healthy(self, by: str, tests: Sequence[str]) -> bool:
        if by in self._healthy:
            return True
        if by.startswith("tests/"):
            failed = self._tree.pytest([by], OWN_S)
        elif by.startswith("pytest ended"):  # by a fault while tests were collected, most often
            failed = self._tree.pytest(tests, OWN_S, ["--collect-only"])
            if failed:
                raise ListError(f"without any fault, too, {failed}:\n{self._tree.tail()}")
        else:
            return True
        if not failed:
            self._healthy.add(by)
        return not failed

    def _left_out(self) -> list[str]:
        return [f"--{'deselect' if '::' in one else 'ignore'}={one}" for one in self.sick]


def digest(fault: Fault, root: Path, quick: bool) -> str:
    """Of all that a verdict depends on, but for the tests."""
    text = (root / fault.file).read_text()
    return hashlib.sha256(json.dumps([asdict(fault), text, quick]).encode()).hexdigest()[:16]


def read_verdicts(path: Path) -> dict[str, Verdict]:
    """By digest. A line that an interrupt has torn is passed over."""
    found: dict[str, Verdict] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError, TypeError):
                verdict = Verdict(**json.loads(line))
                found[verdict.digest] = verdict
    return found


def run(faults: Sequence[Fault], quick: bool, resume: bool, results: Path) -> int:
    known = read_verdicts(results) if resume else {}
    results.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="mut-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # some tests become another user, who must find the code
        tree = Tree(ROOT, Path(folder).resolve())
        check(faults, tree.root)  # once more: the working tree may have changed
        tree.check_imports(faults)
        judge = Judge(tree, quick)
        with results.open("a" if resume else "w") as stream:
            for number, fault in enumerate(faults, 1):
                verdict = known.get(digest(fault, tree.root, quick))
                if verdict is None:
                    verdict = judge.judge(fault)
                    stream.write(json.dumps(asdict(verdict)) + "\n")
                    stream.flush()
                verdicts.append(verdict)
                print(f"{number:3}/{len(faults)}  {verdict}", flush=True)
    survivors = {verdict.id for verdict in verdicts if not verdict.killed}
    print(f"\n{len(faults) - len(survivors)} of {len(faults)} killed, in {time.monotonic() - began:.0f} s")
    for fault in faults:
        if fault.id in survivors:
            print(f"  {fault.id} ({fault.file}): {fault.breaks}")
    if judge.sick:
        print(f"{len(judge.sick)} tests fail without any fault: {', '.join(judge.sick)}")
        return 2
    return 1 if survivors else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.measure.mutations", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="these faults")
    parser.add_argument("--quick", action="store_true", help="each fault's own tests only")
    parser.add_argument("--resume", action="store_true", help="take over what an earlier run has found")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a line of JSON a fault (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print the faults")
    parser.add_argument("--check", action="store_true", help="look only whether every fault fits the code")
    return parser.parse_args()


def _chosen(faults: Sequence[Fault], only: Sequence[str] | None) -> list[Fault]:
    if unknown := sorted(set(only or ()) - {fault.id for fault in faults}):
        raise ListError(f"there is no fault {', '.join(unknown)}; --list prints them")
    return [fault for fault in faults if not only or fault.id in only]


def _stop(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def main() -> int:
    arguments = _arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)  # so that the copy and what runs in it go, too
    try:
        every = read_faults(FAULTS)
        faults = _chosen(every, arguments.only)
        if arguments.list:
            for fault in faults:
                print(f"{fault.id:32} {fault.file}\n    {fault.breaks}")
            return 0
        check(faults if arguments.only else every, ROOT)
        if arguments.check:
            print(f"{len(faults)} faults fit the code")
            return 0
        adopt_orphans()
        return run(faults, arguments.quick, arguments.resume, arguments.results)
    except ListError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; --resume goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
