"""Every `odmoe` command in the documents is one that the command line has, with flags that it has."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from odmoe.command_line import app
from support.paths import ROOT

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^ {4,}(?:.*\| )?(?:sudo )?(?:\.venv/bin/)?odmoe ([a-z].*)$", re.M)
INLINE = re.compile(r"`(?:sudo )?(?:\.venv/bin/)?odmoe ([a-z][^`]*)`")


def commands(text: str) -> Iterator[list[str]]:
    """Words after `odmoe`, of indented lines (a comment apart) and of code within a paragraph."""
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    for found in BLOCK.findall(joined):
        yield shlex.split(found, comments=True)
    for found in INLINE.findall(re.sub(r"\n(?! {4})", " ", joined)):
        yield found.split()


@cache
def command_group() -> Any:
    return typer.main.get_command(app)


def fault(words: list[str]) -> str | None:
    """What the command line does not have: the command, or one of the flags."""
    group = command_group()
    name, *rest = [word.rstrip(",;.") for word in words]
    command = group.commands.get(name)
    if command is None:
        return f"odmoe {name}"
    flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help", "-h"}
    unknown = [word for word in rest if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in flags]
    return f"odmoe {name} {unknown[0]}" if unknown else None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_its_commands_are_commands(document: Path) -> None:
    faults = [found for words in commands(document.read_text()) if (found := fault(words))]
    assert not faults, f"{document.name} names what there is not: {', '.join(faults)}"


def test_the_documents_have_commands_and_a_wrong_one_is_found() -> None:
    assert sum(len(list(commands(document.read_text()))) for document in DOCUMENTS) > 60
    text = '    odmoe generate --cluster x "A B"   # --nothing\n\nSee `odmoe\nplan --slot 2`, `odmoe fly`.\n'
    assert [fault(words) for words in commands(text)] == [None, "odmoe plan --slot", "odmoe fly"]


STEP = re.compile(r"^\d+\. (`[^:\n]*)", re.M)


def missing_names(text: str) -> tuple[int, list[str]]:
    """How many steps of walks there are, and the files and definitions that they name and the code does not have."""
    steps, missing = STEP.findall(text), []
    for step in steps:
        names = re.findall(r"`([^`]+)`", step)
        files = [ROOT / name for name in names if name.endswith(".py")]
        missing += [str(file) for file in files if not file.is_file()]
        source = "".join(file.read_text() for file in files if file.is_file())
        missing += [
            f"{names[0]} {name}"
            for name in names
            if not name.endswith(".py")
            and not re.search(rf"^ *(?:async )?(?:def|class) {re.escape(name)}\b", source, re.M)
        ]
    return len(steps), missing


def test_the_walks_name_what_is_there() -> None:
    steps, missing = missing_names((ROOT / "docs" / "architecture.md").read_text())
    assert steps > 50
    assert not missing
    assert missing_names("1. `odmoe/text.py`, `push`, `pull`: x\n2. `odmoe/no.py`, `do`\n") == (
        2,
        ["odmoe/text.py pull", str(ROOT / "odmoe/no.py"), "odmoe/no.py do"],
    )


LINK = re.compile(r"\]\(([^()\s#]*)(?:#([^()\s]*))?\)")
LINKED = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "docs" / "data" / "README.md", ROOT / "scripts" / "README.md"]


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\s-]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def broken_links(document: Path, text: str) -> list[str]:
    """Relative links to a file or a heading that is not there."""
    broken = []
    for place, anchor in LINK.findall(text):
        if "://" in place:
            continue
        target = (document.parent / place).resolve() if place else document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target.read_text())):
            broken.append(f"{place}#{anchor}")
    return broken


@pytest.mark.parametrize("document", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_its_links_lead_somewhere(document: Path) -> None:
    assert not broken_links(document, document.read_text())


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = "[a](docs/no.md) [b](docs/lan.md#no) [c](docs/running.md#answers) [d](#e) [f](https://example.org/no)"
    assert broken_links(ROOT / "README.md", text) == ["docs/no.md#", "docs/lan.md#no", "#e"]
