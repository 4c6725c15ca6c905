"""Generate odmoe/settings/keywords.py from the tables of settings.

python scripts/generate_keywords.py            write it
python scripts/generate_keywords.py --check    exit 1 if the committed file is not what the tables give
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from odmoe.settings.plan_settings import PlanSettings  # noqa: E402
from odmoe.settings.settings import Settings  # noqa: E402
from odmoe.settings.simulate_settings import SimulateSettings  # noqa: E402
from odmoe.settings.system_settings import SystemSettings  # noqa: E402
from odmoe.settings.table import Table, declaration_of  # noqa: E402
from odmoe.settings.units import Bytes, BytesOrNone, Link, Memory, Rate  # noqa: E402

FILE = Path("odmoe/settings/keywords.py")
HEAD = '''"""The tables of settings as keywords of Python's functions, for type checkers: the tables check the values.

Made by scripts/generate_keywords.py. Not edited by hand.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, TypedDict

File = str | os.PathLike[str]
Size = int | str
"""Bytes, or a text such as `512MiB`; of `device_memory` and `memory` also a share such as `25%`."""
Rate = float | str
"""As a number, or a text such as `25GB/s` or `1Gbit`."""
'''
POLICIES = "PolicyKeywords"
CLASSES: tuple[tuple[str, type[Table], str], ...] = (
    (POLICIES, SystemSettings, "The preset of a system, and its policies."),
    ("LoadKeywords", Settings, "Of `odmoe.load`."),
    ("PlanKeywords", PlanSettings, "Of `odmoe.plan`."),
    ("SimulateKeywords", SimulateSettings, "Of `odmoe.simulate`."),
)
FILES = ("a file", "a path", "a directory", "a name or a file")
"""The allowed values of settings that also take a path object."""
WIDER: tuple[tuple[Any, str], ...] = (
    (Memory, "Size"),
    (Bytes, "Size"),
    (BytesOrNone, "Size"),
    (Rate, "Rate"),
    (Link, "Rate"),
)
"""Settings that take more than what they become."""


def generated() -> str:
    """The whole file."""
    return HEAD + "".join(map(_class, *zip(*CLASSES, strict=True)))


def _class(name: str, table: type[Table], about: str) -> str:
    inherits = table is not SystemSettings and issubclass(table, SystemSettings)
    inherited = set(SystemSettings.model_fields) if inherits else set()
    hints = get_type_hints(table, include_extras=True)
    names = [one for one in table.model_fields if one not in inherited and declaration_of(table, one).keyword]
    lines = [f"    {one}: {_type(hints[one], declaration_of(table, one).allowed)}" for one in names]
    base = POLICIES if inherits else "TypedDict"
    return "\n".join(["\n", f"class {name}({base}, total=False):", f'    """{about}"""', "", *lines, ""])


def _type(annotation: Any, allowed: str) -> str:
    """An annotation as source text, without validators."""
    for wider, text in WIDER:
        if annotation == wider:
            return text
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0], allowed)
    if origin in (Union, UnionType):
        return " | ".join(_type(part, allowed) for part in parts)
    if origin is Literal:
        return "Literal[" + ", ".join(f'"{part}"' for part in parts) + "]"
    if origin is tuple:
        return "str | Sequence[str]"
    if annotation is str and allowed in FILES:
        return "File"
    return "None" if annotation is NoneType else annotation.__name__


def check(root: Path = ROOT) -> int:
    """0 if the file under `root` is up to date, else 1, after a line that says so."""
    committed = root / FILE
    if committed.is_file() and committed.read_text(encoding="utf-8") == generated():
        return 0
    print(f"{FILE}: not what the tables of settings give; run `make stubs` and commit the result", file=sys.stderr)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    if parser.parse_args().check:
        return check()
    (ROOT / FILE).write_text(generated(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
