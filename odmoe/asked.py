"""`odmoe generate` on the main host, for someone at the launching machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from odmoe.cli import outcome
from odmoe.settings import Settings


def generate(request: dict[str, Any], settings: Callable[[dict[str, Any]], Settings]) -> int:
    """`request`: settings, prompts and how to print, as `odmoe.asking` writes them. The exit code."""

    def work() -> int:
        from odmoe.generate import run_generate
        from odmoe.terminal import Terminal

        said = request["settings"]
        said |= {name: os.path.expanduser(said[name]) for name in ("trace", "record") if name in said}
        wanted = settings({**said, "cluster": "auto"})
        terminal = Terminal(request["quiet"], request["debug"])
        prompts, named = request["prompts"], request.get("named")
        run_generate(wanted, prompts, request["json"], terminal, request["parallel"], request["many"], named)
        return 0

    return outcome(work)
