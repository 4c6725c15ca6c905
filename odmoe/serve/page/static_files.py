"""The files of the page. They are read once, and need no key: what they show is asked for with one."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

STATIC = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""An answer may hold anything. It is never made into HTML, and if it were, nothing of it would run or be fetched."""


class StaticFile(NamedTuple):
    content: bytes
    kind: str
    """Its media type."""
    tag: str
    """Its ETag."""


@cache
def static_files() -> dict[str, StaticFile]:
    """By path, beginning with `/`. The page itself is `/`."""
    found = {}
    for file in sorted(STATIC.iterdir()):
        if file.suffix in KINDS:
            content = file.read_bytes()
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            found[path] = StaticFile(content, KINDS[file.suffix], tag)
    return found
