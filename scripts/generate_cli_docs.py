"""Generate docs/cli.md from the commands.

python scripts/generate_cli_docs.py            write it
python scripts/generate_cli_docs.py --check    exit 1 if the committed file is not what the commands give
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import typer  # noqa: E402

from odmoe.command_line import app  # noqa: E402

FILE = Path("docs/cli.md")
HEAD = """# Commands

Made by `make stubs` from the commands themselves. `odmoe COMMAND --help` shows the same. Exit codes: 0 done, 1 failed,
2 wrong usage, 130 interrupted, 143 terminated. `odmoe --install-completion` makes the shell complete commands and
flags. [running.md](running.md) explains the settings.
"""
WIDTH = 118
LEAST, MOST = 16, 34
"""Characters of the column of flags."""
COMMON = "Options"


def generated() -> str:
    """The whole file."""
    group: Any = typer.main.get_command(app)
    commands = [(name, group.commands[name]) for name in group.commands]
    listed = "\n".join(f"- [{name}](#odmoe-{name}): {_first_line(command)}" for name, command in commands)
    return "\n".join([HEAD, listed, *(_section(name, command) for name, command in commands)]) + "\n"


def _help(command: Any) -> str:
    return inspect.cleandoc(command.help or "")


def _first_line(command: Any) -> str:
    return " ".join(_help(command).partition("\n\n")[0].split())


def _section(name: str, command: Any) -> str:
    shown = [param for param in command.params if not getattr(param, "hidden", False)]
    arguments = [_usage(param) for param in shown if param.param_type_name == "argument"]
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in shown:
        panel = getattr(param, "rich_help_panel", None) or COMMON
        panels.setdefault("Arguments" if param.param_type_name == "argument" else panel, []).append(_row(param))
    blocks = "".join(_block(title, rows) for title, rows in panels.items())
    usage = " ".join(["odmoe", name, *arguments, "[OPTIONS]"])
    return f"\n## odmoe {name}\n\n{_help(command)}\n\n```text\n{usage}\n{blocks}```"


def _usage(param: Any) -> str:
    text = param.metavar or str(param.name).upper()
    return text if param.required else f"[{text.strip('[]')}]"


def _row(param: Any) -> tuple[str, str]:
    if param.param_type_name == "argument":
        return _usage(param), param.help or ""
    flags = ", ".join([*param.opts, *param.secondary_opts])
    typed = "" if param.is_flag else param.metavar or param.type.name.upper()
    return f"{flags} {typed}".strip(), param.help or ""


def _block(title: str, rows: list[tuple[str, str]]) -> str:
    """Flags, and what they do in a column beside them."""
    column = min(MOST, max(LEAST, *(len(flags) for flags, _ in rows)))
    lines = [f"\n{title}:"]
    for flags, about in rows:
        texts = textwrap.wrap(" ".join(about.split()), WIDTH - column - 4, break_on_hyphens=False) or [""]
        if len(flags) > column:
            lines.append(f"  {flags}")
            flags = ""
        for text in texts:
            lines.append(f"  {flags:<{column}}  {text}".rstrip())
            flags = ""
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = generated()
    if not parser.parse_args().check:
        (ROOT / FILE).write_text(text)
    elif not (ROOT / FILE).is_file() or (ROOT / FILE).read_text() != text:
        print(f"{FILE} is not what the commands give; run make stubs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
