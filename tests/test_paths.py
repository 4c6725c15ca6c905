"""Every path that the documents, the messages and the scripts name is there, and every module that they name."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

TOPS = (
    "checkpoint",
    "deploy",
    "docs",
    "main_node",
    "models",
    "odmoe",
    "proto",
    "scheduler",
    "scripts",
    "shadow_node",
    "tests",
    "wire",
    "worker_node",
)
TOP = "|".join(TOPS)
PATH = re.compile(rf"(?<![\w/.~:-])(?:{TOP})/[\w./*{{}},-]*[\w/*}}]")
MODULE = re.compile(rf"(?<![\w/.~:-])(?:{TOP})(?:\.[a-z_]\w*)+(?:\.[A-Z]\w*)?")
FILE = re.compile(r"`([\w-]+\.(?:py|md|yaml|sh|proto|png))`")
DOCUMENTS = ("*.md", "Makefile", ".ci/run", ".pre-commit-config.yaml", "cluster.yaml", "pyproject.toml", "deploy/*")
ELSEWHERE = {
    "proto/.*": "a pattern of pre-commit",
    "scripts/generate_stubs": "a pattern of pre-commit",
    "scripts/generate_keywords": "a pattern of pre-commit",
    "odmoe/settings/.*": "a pattern of pre-commit",
    "scheduler/policies/.*": "a pattern of pre-commit",
    "wire/odmoe.proto": "what protoc takes proto/odmoe.proto for",
    "odmoe/venv": "in the home directory of a cluster's host",
    "monitor.py": "Ray's own",
    "scheduler.py": "Ray's own",
}
TEST = re.compile(r"\b(tests/[\w/]+\.py)::(\w+)")
HISTORY = ("CHANGELOG.md",)


def tracked(*patterns: str) -> list[Path]:
    """Files that git has, or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]


def expanded(path: str) -> list[str]:
    """`a/{b,c}.py` -> a/b.py, a/c.py."""
    match = re.search(r"\{([^{}]*)\}", path)
    if match is None:
        return [path]
    return [one for part in match[1].split(",") for one in expanded(path[: match.start()] + part + path[match.end() :])]


def is_there(path: str) -> bool:
    return path in ELSEWHERE or all(any(ROOT.glob(one.rstrip("/"))) for one in expanded(path))


def is_module(name: str) -> bool:
    """A module, a package, or what a module defines."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:count])
        if base.with_suffix(".py").is_file() or (count == len(parts) and base.is_dir()):
            rest = parts[count:]
            return not rest or defines(base.with_suffix(".py"), rest[0])
        if (base / "__init__.py").is_file():
            return defines(base / "__init__.py", parts[count])  # what `import odmoe` offers
    return False


def defines(file: Path, name: str) -> bool:
    return re.search(rf"^\s*(?:def|class|import|from)?\b.*\b{re.escape(name)}\b", file.read_text(), re.M) is not None


def strings(file: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, messages and the constant parts of f-strings; comments. No imports, which Python itself checks."""
    text = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for number, line in enumerate(text.splitlines(), 1):
        if "#" in line:
            yield number, line.partition("#")[2]


def lines(file: Path) -> Iterator[tuple[int, str]]:
    if file.suffix == ".py":
        yield from strings(file)
    else:
        yield from enumerate(file.read_text(encoding="utf-8").splitlines(), 1)


def offences(files: list[Path]) -> list[str]:
    found = []
    for file in files:
        for number, text in lines(file):
            where = f"{file.relative_to(ROOT)}:{number}"
            found += [f"{where} names {path}" for path in PATH.findall(text) if not is_there(path)]
            found += [
                f"{where} names the module {name}"
                for name in MODULE.findall(text)
                if not is_module(name) and not name.endswith((".py", ".md", ".toml", ".yaml", ".proto", ".service"))
            ]
    return found


def test_documents_name_what_is_there() -> None:
    files = [path for path in tracked(*DOCUMENTS) if path.name not in HISTORY]
    assert len(files) > 10
    found = offences(files)
    assert not found, "\n".join(found)


def test_documents_name_tests_that_are_there() -> None:
    """`tests/.../test_x.py::test_y`. Every row of docs/promises.md that is about a fault and a client names one."""
    promises = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| fault \|.*\| test \|\n\|[ |-]+\n((?:\|.*\n)+)", promises, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 30
    unheld = [row for row in rows if not TEST.search(row.rpartition(" | ")[2])]
    assert not unheld, "\n".join(unheld)
    texts = [path.read_text(encoding="utf-8") for path in tracked("*.md")]
    named = {found for text in texts for found in TEST.findall(text)}
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in read_if_there(ROOT / file)]
    assert not missing, "\n".join(sorted(missing))


def read_if_there(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


@pytest.mark.parametrize("top", [top for top in TOPS if top not in ("deploy", "docs", "models", "proto", "tests")])
def test_messages_and_docstrings_name_what_is_there(top: str) -> None:
    files = [path for path in tracked(f"{top}/*.py") if not path.stem.endswith(("_pb2", "_pb2_grpc"))]
    assert files
    found = offences(files)
    assert not found, "\n".join(found)


def test_a_bare_file_name_is_some_files_name() -> None:
    """`slots.py` in a document is found by searching for it."""
    names = {path.name for path in tracked()}
    found = [
        f"{file.relative_to(ROOT)}:{number} names {name}"
        for file in tracked("*.md")
        if file.name not in HISTORY
        for number, text in enumerate(file.read_text().splitlines(), 1)
        for name in FILE.findall(text)
        if name not in names and name not in ELSEWHERE
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("scheduler/core/machine.py", True),
        ("scheduler/core/{machine,slots}.py", True),
        ("scheduler/core.py", False),
        ("scheduler/core/{machine,nobody}.py", False),
        ("tests/families/", True),
    ],
)
def test_a_path_that_is_not_there_is_found(text: str, there: bool) -> None:
    assert PATH.findall(f"see {text}, which") == [text]
    assert is_there(text) is there


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("scheduler.core.machine", True),
        ("scheduler.core.machine.Core", True),
        ("scheduler.core", True),
        ("scheduler.machine", False),
        ("scheduler.core.machine.Nobody", False),
    ],
)
def test_a_module_that_is_not_there_is_found(name: str, there: bool) -> None:
    assert MODULE.findall(f"see `{name}` for") == [name]
    assert is_module(name) is there
