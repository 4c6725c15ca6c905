"""Writes requirements.runtime.lock: of requirements.lock, what running needs. Hosts of a cluster and containers install
it. `--check` fails if the file is not current."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK, RUNTIME = ROOT / "requirements.lock", ROOT / "requirements.runtime.lock"
HEAD = "# Made by `make lock`: the packages of requirements.lock that running odmoe needs. Not edited by hand."


def runtime_names() -> set[str]:
    """What pyproject.toml depends on, with what that depends on, as installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    todo = [Requirement(line) for line in project["project"]["dependencies"]]
    todo += [Requirement(line) for line in project["build-system"]["requires"]]  # hqq is built from source
    found: set[tuple[str, str]] = set()
    while todo:
        asked = todo.pop()
        name = canonicalize_name(asked.name)
        for extra in ("", *asked.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            try:
                more = [Requirement(line) for line in requires(name) or []]
            except PackageNotFoundError:  # of another platform
                continue
            todo += [one for one in more if one.marker is None or one.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def runtime_lock() -> str:
    names = runtime_names()
    pins = re.findall(r"^([A-Za-z0-9._-]+)==.*$", LOCK.read_text(), re.MULTILINE)
    kept = {name for name in pins if canonicalize_name(name) in names}
    lines = [line for line in LOCK.read_text().splitlines() if line.partition("==")[0] in kept]
    return "\n".join([HEAD, *lines]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the file is not current")
    args = parser.parse_args()
    made = runtime_lock()
    if not args.check:
        RUNTIME.write_text(made)
    elif not RUNTIME.is_file() or RUNTIME.read_text() != made:
        print(f"{RUNTIME.name} is not current; write it with scripts/runtime_lock.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
