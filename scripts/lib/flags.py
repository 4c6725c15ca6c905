"""How scripts take their flags, and the flags of every experiment."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.lib.paths import DEEP, RESULTS, ROOT
from scripts.lib.provenance import program

SHADOWS = ("fp16", "int8", "nf4")


def positive(text: str) -> int:
    """A count on the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 1, 2, ...")
    return int(text)


COMMON: dict[str, dict[str, Any]] = {
    "profile": {"default": "rtx3090-1gbe", "help": "a name or a file (%(default)s)"},
    "shadow": {"default": "int8", "choices": SHADOWS, "help": "its precision (%(default)s)"},
    "prompt-tokens": {"type": positive, "default": 16, "help": "of each prompt (%(default)s)"},
    "dtype": {"default": "float32", "help": "the main node's (%(default)s)"},
}


def script_parser(about: str | None) -> argparse.ArgumentParser:
    """`about`: the script's docstring, shown as it is."""
    usage = " ".join(["python", *program()])
    return argparse.ArgumentParser(usage, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def experiment_flags(
    about: str, prompts: tuple[int, int], tokens: tuple[int, int], model: Path | None = DEEP
) -> argparse.ArgumentParser:
    """The flags of every experiment. `prompts`, `tokens`: how many unless said, and how many of them with --quick.
    `model`: None if the script has a flag of its own for several."""
    parser = script_parser(about)
    if model is not None:
        parser.add_argument("--model", default=str(model.relative_to(ROOT)), help="%(default)s unless said")
    parser.add_argument("--prompts", type=positive, help=f"how many; {prompts[0]} unless said")
    parser.add_argument("--tokens", type=positive, help=f"of each answer; {tokens[0]} unless said")
    parser.add_argument("--seed", type=int, default=0, help="of whatever is drawn")
    parser.add_argument("--quick", action="store_true", help="a minute's version, written beside the whole one")
    parser.add_argument("--fresh", action="store_true", help="forget the cells that were finished before")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory to write to; results/ unless said")
    parser.set_defaults(sizes={"prompts": prompts, "tokens": tokens})
    return parser


def common_flags(parser: argparse.ArgumentParser, *names: str, **defaults: str) -> None:
    """Flags that several experiments have, by their names in `COMMON`. `defaults`: those that are another one here."""
    for name in names:
        parser.add_argument(f"--{name}", **(COMMON[name] | ({"default": defaults[name]} if name in defaults else {})))


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """As `parse_args`, with the sizes that --quick or nobody has said. A model's path is one beneath the project, or
    beneath where the script was started."""
    args = parser.parse_args(argv)
    for name, (usual, quick) in args.sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else usual)
    if "model" in args and not Path(args.model).exists() and (ROOT / args.model).exists():
        args.model = str(ROOT / args.model)
    return args
