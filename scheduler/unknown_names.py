"""What to answer to a name that does not exist: the nearest one."""

from __future__ import annotations

import difflib
from collections.abc import Collection

FEW = 8
"""So many names are listed in a message; of more only the nearest ones."""


def nearest(name: object, names: Collection[str]) -> str:
    """`; did you mean fate or static?`, or nothing where none is near."""
    found = difflib.get_close_matches(name, names, 2) if isinstance(name, str) else []
    return f"; did you mean {' or '.join(found)}?" if found else ""


def unknown(label: str, value: object, names: Collection[str], listed_by: str) -> str:
    """A message that `value`, of the setting `label`, is none of `names`. `listed_by`: what lists all of them."""
    if len(names) <= FEW:
        return f"{label} is {value!r}; allowed: {', '.join(names)}"
    return f"{label} is {value!r}{nearest(value, names) or ';'} {listed_by} lists all {len(names)} names"
