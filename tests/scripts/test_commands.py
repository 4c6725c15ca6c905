"""Every script can be imported, says what it is for, and stands in scripts/README.md."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import scripts
from support.paths import ROOT

NAMES = sorted(found.name for found in pkgutil.walk_packages(scripts.__path__, "scripts.") if not found.ispkg)


def main_of(name: str) -> ModuleType | None:
    """The module, if it can be run."""
    module = importlib.import_module(name)
    return module if hasattr(module, "main") else None


def test_the_folders_are_all_walked() -> None:
    files = [path for path in (ROOT / "scripts").rglob("*.py") if path.stem != "__init__"]
    assert len(NAMES) == len(files)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_imported_and_its_help_is_its_docstring(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = main_of(name)
    if module is None:
        return
    assert module.__file__ is not None
    monkeypatch.setattr(sys, "argv", [module.__file__, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code in (0, None)
    told = " ".join(capsys.readouterr().out.split())
    assert told.lower().startswith("usage:")
    first = " ".join((module.__doc__ or "").strip().split("\n\n")[0].split())
    assert first.rstrip(".") in told


def test_the_readme_has_a_line_for_each_command_and_for_nothing_else() -> None:
    text = (ROOT / "scripts" / "README.md").read_text()
    named = re.findall(r"^\|.*`(?:sudo )?\.venv/bin/python (?:-m )?(scripts[\w./]+)", text, re.M)
    modules = [name.removesuffix(".py").replace("/", ".") for name in named]
    runnable = {name.removesuffix(".__main__") for name in NAMES if main_of(name)}
    assert sorted(modules) == sorted(runnable)


def test_a_commands_flags_in_the_readme_are_flags_of_that_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "scripts" / "README.md").read_text()
    for name, words in re.findall(r"`(?:sudo )?\.venv/bin/python -m (scripts[\w.]+)([^`]*)`", text):
        folder = ROOT / name.replace(".", "/")
        module = importlib.import_module(f"{name}.__main__" if folder.is_dir() else name)
        monkeypatch.setattr(sys, "argv", [str(Path(str(module.__file__))), "--help"])
        with pytest.raises(SystemExit):
            module.main()
        told = capsys.readouterr().out
        for flag in re.findall(r"(?<!\S)--[\w-]+", words):
            assert flag in told, f"{name} {flag}"
