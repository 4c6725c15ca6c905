"""Copies results to docs/data, and writes the tables of the docs that are drawn from them.

.venv/bin/python -m scripts.publish results/serve-load.json    # copies it, then writes every table
.venv/bin/python -m scripts.publish                            # writes every table again

A table stands in a page between `<!-- data: NAME -->` and `<!-- /data -->`; NAME is one of
`scripts.doc_tables.tables.TABLES`. Below it stand the command, commit and date of its data. docs/data/README.md has the
tables that no other page shows; it is written whole.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.doc_tables.tables import TABLES
from scripts.lib.flags import script_parser
from scripts.lib.paths import ROOT

DATA = ROOT / "docs" / "data"
DATA_PAGE = DATA / "README.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FACTS = ("command", "machine", "commit", "when")
"""What every file of data must have."""
PREFIX = ".venv/bin/python -m "
"""Of every command; pages say so once."""
LOCAL = ("--out", "--python")
"""Flags with a path of one machine."""
FRESH = "--fresh"
"""The flag that forgets what was measured before."""
HEAD = """\
# The data of the measurements

Written by `.venv/bin/python -m scripts.publish`; do not edit. Each file here has the rows that a script measured, with
its command, commit and machine; run a command with `.venv/bin/python -m`. [measurements.md](../measurements.md) shows
the tables that other documents cite. This page has the others; [papers.md](../papers.md) says what follows from them.
"""
_TABLE = re.compile(r"(<!-- data: (\S+) -->\n).*?(<!-- /data -->)", re.S)


def load(name: str) -> dict[str, Any]:
    """A file of docs/data."""
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def draw_table(name: str, folder: str = "data/") -> str:
    """The table of that name and where its data comes from. `folder`: of the data, from the page."""
    table = TABLES[name]
    found = [load(file) for file in table.files]
    if len(found) > 1:
        rows = [
            {"file": file, "of": facts.get("model", "").rpartition("/")[2], **row}
            for file, facts in zip(table.files, found, strict=True)
            for row in facts["rows"]
        ]
    else:
        rows = found[0]["rows"]
    return f"{table.draw(rows)}\n\n{'; '.join(_sources(table.files, found, folder))}\n"


def _sources(files: list[str], found: list[dict[str, Any]], folder: str) -> Iterator[str]:
    """The command, date, commit and processor of each file. A command is not repeated from one file to the next."""
    before = None
    for file, facts in zip(files, found, strict=True):
        said = "again" if facts["command"] == before else f"`{facts['command'].removeprefix(PREFIX)}`"
        before = facts["command"]
        yield f"[{said}]({folder}{file}.json), {facts['when']}, commit {facts['commit']}, {_processor(facts)}"


def _processor(facts: dict[str, Any]) -> str:
    """Of the machine, whose other facts are those of all: a name without its trade marks."""
    return re.sub(r"\((R|TM)\)", "", str(facts["machine"]).partition(",")[0])


def with_tables(page: str) -> str:
    """The page with every table drawn again."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{draw_table(found[2])}\n{found[3]}", page)


def shown_tables() -> list[str]:
    """The tables of the pages that people write."""
    return [found[2] for page in PAGES for found in _TABLE.finditer(page.read_text())]


def data_page() -> str:
    """The tables that no other page shows, each with its title."""
    elsewhere = set(shown_tables())
    rest = [name for name in TABLES if name not in elsewhere]
    return "\n".join([HEAD, *(f"## {TABLES[name].title}\n\n{draw_table(name, folder='')}" for name in rest)])


def write_tables() -> None:
    """Every table of every page again."""
    for page in PAGES:
        _write(page, with_tables(page.read_text()))
    _write(DATA_PAGE, data_page())


def _write(page: Path, text: str) -> None:
    if not page.exists() or page.read_text() != text:
        page.write_text(text)
        print(page.relative_to(ROOT))


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
    words = [word for word in shlex.split(command) if word != FRESH]
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
    write_tables()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
