"""The command line. Answers go to standard output, everything else to standard error."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from odmoe.cli.bench import add_bench
from odmoe.cli.exit import ENDINGS, given, one_interrupt, outcome, print_error
from odmoe.cli.flags import SettingsCommand, with_settings
from odmoe.cli.machines import add_commands
from odmoe.cli.options import Json, LibrariesDebug
from odmoe.cli.plan import add_plan
from odmoe.cli.prompts import read_prompts
from odmoe.cli.serve import add_serve
from odmoe.cli.simulate import add_simulate
from odmoe.cli.systems import add_systems
from odmoe.cli.train_predictor import add_train_predictor
from odmoe.cli.verify import add_verify
from odmoe.settings.settings import DTYPES, EXPERTS, Settings
from odmoe.settings.sources import dump, effective, merged
from odmoe.settings.table import declared, flag
from scheduler.errors import ConfigError

app = typer.Typer(
    help="Run Mixture-of-Experts models too large for any of your machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print the result only", metavar="")]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="YAML file of settings (default: ODMOE_CONFIG, or ~/.config/odmoe/config.yaml)",
        rich_help_panel="Cluster",
        metavar="PATH",
    ),
]


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        print(f"odmoe {version('odmoe')}")
        raise typer.Exit


@app.callback()
def _root(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version", metavar="")
    ] = False,
) -> None:
    """Run Mixture-of-Experts models too large for any of your machines."""


@app.command(cls=SettingsCommand)
@with_settings(Settings)
def generate(
    flags: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="Prompt (default: standard input)")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts, one per line", show_default=False, metavar="PATH"),
    ] = None,
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per answer", metavar="")] = False,
    quiet: Quiet = False,
    debug: LibrariesDebug = False,
) -> None:
    """Answer a prompt, or a file of prompts.

    --cluster is embedded (in this process), local (a process for each node),
    auto or host:port (a running Ray cluster), or a cluster FILE.yaml.
    odmoe systems lists systems and policies. odmoe config shows the settings.
    """
    settings = effective(flags, config).settings
    from odmoe.api.checks import check_start
    from odmoe.terminal import Output

    check_start(settings, flag, "command")
    prompt_texts = read_prompts(prompt, prompts)
    output, listed = Output(as_json, quiet, debug), prompts is not None
    if settings.cluster_file:
        from odmoe.commands.generate_remote import ask

        raise typer.Exit(ask(settings, prompt_texts, output, listed))
    from odmoe.commands.generate import run_generate

    run_generate(settings, prompt_texts, output, listed)


@app.command(cls=SettingsCommand)
@with_settings(Settings)
def config(flags: dict[str, Any], config: Config = None) -> None:
    """Show the effective settings and where each comes from.

    Flags override ODMOE_* variables, these the configuration file, and the file the defaults.
    """
    print(dump(merged(flags, config)), end="")


@app.command()
def shard(
    model: Annotated[str, typer.Argument(help="Model directory, GGUF file or org/name on the Hub")],
    store: Annotated[str, typer.Argument(help="Directory of the new expert store")],
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Data type of the weights: {', '.join(DTYPES)} (default: the checkpoint's)",
            show_default=False,
            metavar="TEXT",
        ),
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(
            help=f"{declared(Settings, 'experts').about}: {', '.join(EXPERTS)}", show_default=False, metavar="TEXT"
        ),
    ] = None,
    forms: Annotated[
        str | None,
        typer.Option(
            help="Also store every expert in fewer bits: int4, int2 or int4,int2", show_default=False, metavar="TEXT"
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every expert back and compare its checksum", metavar="")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: LibrariesDebug = False,
) -> None:
    """Split a model into dense weights and an expert store.

    An interrupted run resumes where it stopped.
    """
    from odmoe.commands.shard import run_shard
    from odmoe.terminal import Output

    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    if experts is not None and experts not in EXPERTS:
        raise ConfigError(f"--experts is {experts!r}; allowed: {', '.join(EXPERTS)}")
    form_names = [name.strip() for name in forms.split(",")] if forms else []
    run_shard(model, store, Output(as_json, quiet, debug), dtype, form_names, verify, experts)


@app.command()
def stores(
    remove: Annotated[
        str | None, typer.Option(help="Remove this store instead", show_default=False, metavar="STORE")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the expert stores in this machine's cache: model, format, size, last use.

    A store that is removed is made again when its model is used.
    """
    from odmoe.commands.stores import run_stores
    from odmoe.terminal import Output

    run_stores(remove, Output(as_json, False, False))


add_commands(app)
add_bench(app)
add_plan(app)
add_serve(app)
add_simulate(app)
add_systems(app)
add_train_predictor(app)
add_verify(app)


def run() -> int:
    """Run the command line. Returns the exit code."""
    # A typer.Exit gives its code, which may stand for Ctrl-C.
    return outcome(lambda: app(prog_name="odmoe", standalone_mode=False), given("--json"))


def main() -> NoReturn:
    """Run the command line and end the process, without waiting for threads that are inside a library. The
    interpreter's normal exit would wait for such a thread, or abort because of it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    one_interrupt()
    code = 1
    try:
        code = run()
    except Exception as error:  # noqa: BLE001 - a bug: show all that is known about it
        traceback.print_exc()
        if given("--json"):
            print_error(type(error).__name__, str(error))
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)  # the process is ending already
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    main()
