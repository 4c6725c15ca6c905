"""A small experiment, whose cells are squares: a function, and a program that can be killed and interrupted."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.lib.experiment import Cell, Experiment
from scripts.lib.flags import experiment_flags, parse_flags
from scripts.lib.plots import canvas


def squares(argv: Sequence[str] | None = None) -> None:
    """Each number that is computed is a line of OUT/calls, which the code under test knows nothing of."""
    parser = experiment_flags("Squares of the first numbers.", prompts=(4, 2), tokens=(8, 4))
    parser.add_argument("--depends", default="a", help="what decides every cell")
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--killed-at", type=int)
    parser.add_argument("--sleeps-at", type=int)
    parser.add_argument("--drawn", action="store_true")
    args = parse_flags(parser, argv)
    with Experiment("squares", args, args.version, {"weights": args.depends}, "emulated: none") as run:

        def measure(params: dict[str, Any]) -> dict[str, Any]:
            with Path(args.out, "calls").open("a") as file:
                file.write(f"{params['x']}\n")
            run.path(params, ".part").write_text("so far")
            with run.scratch():
                if params["x"] == args.killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if params["x"] == args.sleeps_at:
                    time.sleep(60)
            return {"square": params["x"] ** 2, "by_token": [0.5, params["x"]]}

        wanted = [Cell({"x": x, "tokens": args.tokens}, cost=x + 1.0) for x in range(args.prompts)]
        found = run.all(wanted, measure)
        run.write([{**cell.params, **one} for cell, one in zip(wanted, found, strict=True)], mean=1.5)
        if args.drawn:
            figure, (panel,) = canvas(5, 3)
            panel.plot([one["square"] for one in found])
            print(run.save(figure))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has put the tests behind
    sys.exit(squares())
