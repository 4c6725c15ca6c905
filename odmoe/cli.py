"""The command line. Answers go to standard output, everything else to standard error."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from odmoe.cluster_cli import add_commands
from odmoe.config import dump, effective
from odmoe.flags import with_settings
from odmoe.plan import add_plan
from odmoe.settings import DTYPES, MAX_PARALLEL
from odmoe.simulate import add_simulate
from scheduler.errors import ConfigError, ODMoEError, PromptError

AGAIN_S = 3.0
IMPORT_S = 5.0  # how long an import may hold up Ctrl-C
LOOK_S = 0.05
app = typer.Typer(
    help="Run a Mixture-of-Experts model on a handful of weak machines.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

Debug = Annotated[bool, typer.Option("--debug", help="Show where an error came from, and what the libraries say.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing but the answer.")]
Config = Annotated[
    str | None,
    typer.Option("--config", help="Settings as YAML; else ODMOE_CONFIG, else ~/.config/odmoe/config.yaml."),
]


def _version(asked: bool) -> None:
    if asked:
        print(f"odmoe {version('odmoe')}")
        raise typer.Exit


@app.callback()
def _root(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Run a Mixture-of-Experts model on a handful of weak machines."""


@app.command()
@with_settings
def generate(
    flags: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="The prompt; standard input when not given.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts, one a line; text, or JSON strings.", show_default=False)
    ] = None,
    parallel: Annotated[int, typer.Option(help="With --prompts: how many are answered at once.")] = 4,
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object (one a line) instead of text.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Answer a prompt; the text streams as it comes."""
    settings = effective(flags, config).settings
    if not settings.model and not settings.joined:
        raise ConfigError("--model is not given; give a model directory, e.g. -m models/demo-moe")
    if not 1 <= parallel <= MAX_PARALLEL:
        raise ConfigError(f"--parallel is {parallel}; allowed: 1 to {MAX_PARALLEL}")
    asked = _prompts(prompt, prompts)
    how = {"json": as_json, "quiet": quiet, "debug": debug, "parallel": parallel, "many": prompts is not None}
    if settings.cluster_file:
        from odmoe.asking import ask

        raise typer.Exit(ask(settings, asked, how))
    from odmoe.generate import run_generate
    from odmoe.terminal import Terminal

    run_generate(settings, asked, as_json, Terminal(quiet, debug), parallel, many=prompts is not None)


@app.command()
@with_settings
def config(flags: dict[str, Any], config: Config = None) -> None:
    """Print the settings that hold and where each was said: flags, then ODMOE_*, then the file, then defaults."""
    print(dump(effective(flags, config)), end="")


@app.command()
def shard(
    model: Annotated[str, typer.Argument(help="Model directory, or org/name on the Hub.")],
    store: Annotated[str, typer.Argument(help="Where to write the expert store.")],
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)}; as stored unless said.", show_default=False)
    ] = None,
    forms: Annotated[
        str | None,
        typer.Option(help="Add smaller forms of every expert: int4, int2, or int4,int2.", show_default=False),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every expert back and compare its checksum.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object about the store.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Split a model into dense weights and an expert store; takes up where one that was interrupted stopped."""
    from odmoe.sharding import run_shard
    from odmoe.terminal import Terminal

    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    named = [name.strip() for name in forms.split(",")] if forms else []
    run_shard(model, store, dtype, verify, as_json, Terminal(quiet, debug), named)


add_commands(app)
add_plan(app)
add_simulate(app)


def _prompts(prompt: str | None, file: Path | None) -> list[str]:
    """What was asked, one way or the other. Raises PromptError, ConfigError."""
    if file is None:
        asked = [_standard_input() if prompt is None else prompt]
    elif prompt is not None:
        raise ConfigError(f"a prompt and --prompts {file} are both given; give one of them")
    else:
        try:
            lines = [line for line in file.read_text().split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"--prompts {file} cannot be read: {error}") from error
        asked = [_unquoted(line) for line in lines]
    if not asked or not all(asked):
        raise PromptError("the prompt is empty; give it as an argument, in --prompts or on standard input")
    return asked


def _unquoted(line: str) -> str:
    if line.startswith('"'):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            return found if isinstance(found, str) else line
    return line


def _standard_input() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise PromptError("no prompt; give it as an argument or on standard input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"the prompt is not {error.encoding} text (byte {error.start}); convert it") from error


def run() -> int:
    """Do what the command line says; the exit code."""
    return outcome(lambda: app(standalone_mode=False))  # gives what an Exit says, in which it also hides Ctrl-C


def outcome(work: Callable[[], object]) -> int:
    """Do it, and explain what goes wrong. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        code = work()
    except SystemExit as stop:  # how it ends when whoever read the answer has gone
        code = stop.code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except ODMoEError as error:
        _explain(type(error).__name__, str(error))
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        _explain(type(error).__name__, f"{error}; is the disk full, or a file not ours to write?")
        return 1
    except Exception as error:
        usage = getattr(error, "exit_code", None)  # a usage error of the command line library
        if usage is None or not hasattr(error, "format_message"):
            raise
        if message := error.format_message():
            _explain("ConfigError", f"{message.rstrip('.')}; see odmoe --help")
        return int(usage)
    if code == 130:
        _say("interrupted")
    return code if isinstance(code, int) else 0


def _explain(name: str, message: str) -> None:
    """One line; before it the traceback where --debug was given."""
    if "--debug" in sys.argv:
        traceback.print_exc()
    _say(f"odmoe: {name}: {' '.join(message.split())}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")


def _one_interrupt() -> None:
    """Ctrl-C pressed several times is one: the others would land in the middle of tidying up. While a library is being
    imported it waits: within torch's import it would be swallowed, or become another error."""
    last = float("-inf")

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if signal.getsignal(signal.SIGINT) is not interrupt or (number == signal.SIGINT and now - last <= AGAIN_S):
            return
        last = now if number == signal.SIGINT else last
        if _importing(frame) and now - last < IMPORT_S:
            signal.setitimer(signal.ITIMER_REAL, LOOK_S)
        else:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell said to ignore it
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGALRM, interrupt)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def main() -> NoReturn:
    """Ends the process without waiting for threads that are deep in a library: the interpreter's own way out would
    wait for such a one, or abort because of it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    _one_interrupt()
    code = 1
    try:
        code = run()
    except Exception:  # noqa: BLE001 - a fault of ours: all that is known of it
        traceback.print_exc()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends already
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    main()
