"""`odmoe serve` in a process of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from support.machines.processes import Running

if TYPE_CHECKING:
    from openai import OpenAI

SERVED_SMALL = ("--shadow", "none", "--workers", "2", "--threads", "1", "--bind", "127.0.0.1:0")


def address_of(running: Running) -> str:
    """What it says when it serves. Raises AssertionError where it ends before."""
    assert running.process.stderr is not None
    for line in running.process.stderr:
        if found := re.fullmatch(rb"serving demo-moe at (http://127\.0\.0\.1:\d+/v1)\n", line):
            return found[1].decode()
    raise AssertionError(f"it ended with {running.process.wait()}")


def client_of(url: str) -> OpenAI:
    """The official client, which sends a request once."""
    from openai import OpenAI

    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
