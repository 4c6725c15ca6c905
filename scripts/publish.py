"""Copies results to docs/data, and writes the tables of the docs that are drawn from them.

.venv/bin/python -m scripts.publish results/serve-load.json    # copies it, then writes every table
.venv/bin/python -m scripts.publish                            # writes every table again

A table stands in a page between `<!-- data: NAME -->` and `<!-- /data -->`; NAME is one of TABLES. Below it stand the
command, commit and date of its data.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.flags import script_parser
from scripts.lib.paths import ROOT
from scripts.lib.tables import Column, Row, markdown_across, markdown_down
from scripts.papers.predictors import shift
from scripts.service import evaluation
from scripts.service.tables import TABLES as SERVICE

DATA = ROOT / "docs" / "data"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FACTS = ("command", "machine", "commit", "when")
"""What every file of data must have."""
LOCAL = ("--out", "--python")
"""Flags with a path of one machine."""
_TABLE = re.compile(r"(<!-- data: (\S+) -->\n).*?(<!-- /data -->)", re.S)


@dataclass(frozen=True, slots=True)
class Table:
    data: str
    """A file of docs/data, without `.json`."""
    draw: Callable[[list[dict[str, Any]]], str]
    """Its rows -> the table in Markdown."""


def _of_part(part: str, draw: Callable[[list[dict[str, Any]]], str]) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rows: draw([row for row in rows if row["part"] == part])


def _across(columns: Sequence[Column], head: Callable[[Row], str]) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rows: markdown_across(columns, rows, [head(row) for row in rows])


def _down(columns: Sequence[Column]) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rows: markdown_down(columns, rows)


TABLES = {
    "serve-load": Table(
        "serve-load", _of_part("load", _across(SERVICE["load"][1:], lambda row: f"{row['share']:g} of what is served"))
    ),
    "serve-full-queue": Table("serve-load", _of_part("full queue", _down(SERVICE["full queue"]))),
    "serve-cost": Table("serve-cost", _of_part("cost", _down(SERVICE["cost"]))),
    "serve-vanish": Table("serve-vanish", _of_part("vanish", _across(SERVICE["vanish"][1:], lambda row: row["how"]))),
    "serve-faults": Table("serve-faults", _of_part("fault", _down(SERVICE["fault"]))),
    "shift": Table("shift", _down(shift.COLUMNS)),
    "evaluation": Table("evaluation", _down(evaluation.COLUMNS)),
}
"""Name -> table."""


def load(name: str) -> dict[str, Any]:
    """A file of docs/data."""
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def drawn(name: str) -> str:
    """The table of that name and where its data comes from."""
    table = TABLES[name]
    facts = load(table.data)
    source = f"[`{facts['command']}`](data/{table.data}.json), {facts['when']}, commit {facts['commit']}"
    return f"{table.draw(facts['rows'])}\n\n{source}\n"


def written(page: str) -> str:
    """The page with every table drawn again."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{drawn(found[2])}\n{found[3]}", page)


def copy(result: Path, name: str) -> Path:
    """Into docs/data. Paths of this machine are left out of the command."""
    facts = json.loads(result.read_text())
    if missing := [fact for fact in FACTS if not facts.get(fact)]:
        raise SystemExit(f"{result} has no {', '.join(missing)}; run its script again from a git checkout")
    facts["command"] = _anywhere(facts["command"])
    DATA.mkdir(exist_ok=True)
    path = DATA / f"{name}.json"
    path.write_text(json.dumps(facts, indent=1) + "\n")
    return path


def _anywhere(command: str) -> str:
    """Without what is of one machine only."""
    words = shlex.split(command)
    for flag in LOCAL:
        if flag in words:
            at = words.index(flag)
            del words[at : at + 2]
    return shlex.join(words)


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("results", nargs="*", type=Path, metavar="FILE", help="results to copy, NAME.json")
    parser.add_argument("--name", help="of the copy (the result's own)")
    args = parser.parse_args()
    if args.name and len(args.results) != 1:
        parser.error(f"--name is {args.name}, for one FILE; given: {len(args.results)}")
    for result in args.results:
        print(copy(result, args.name or result.stem))
    for page in PAGES:
        before = page.read_text()
        after = written(before)
        if after != before:
            page.write_text(after)
            print(page.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
