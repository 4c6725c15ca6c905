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
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from odmoe.settings import DTYPES, LOADERS, SHADOWS, Settings
from scheduler.errors import ConfigError, ODMoEError, PromptError

AGAIN_S = 3.0
app = typer.Typer(
    help="Run a Mixture-of-Experts model on a handful of weak machines.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

Debug = Annotated[bool, typer.Option("--debug", help="Show where an error came from, and what the libraries say.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing but the answer.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help=f"{', '.join(DTYPES)}; as stored unless said.", show_default=False)
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
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; standard input when not given.")] = None,
    model: Annotated[str, typer.Option("-m", "--model", help="Model directory, or org/name on the Hub.")] = "",
    store: Annotated[str | None, typer.Option(help="Expert store; found or made by itself when not given.")] = None,
    cluster: Annotated[str, typer.Option(help="embedded, local, auto or the address of a Ray cluster.")] = "embedded",
    workers: Annotated[int, typer.Option(help="How many worker nodes.")] = 8,
    group_size: Annotated[
        int | None, typer.Option(help="Workers that serve a layer together; the model's top-k when not given.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Experts that a worker has room for.")] = 1,
    shadow: Annotated[str, typer.Option(help=f"The shadow's precision: {', '.join(SHADOWS)}.")] = "int8",
    align_token: Annotated[int, typer.Option(help="Align the shadow's token every N tokens; 0: never.")] = 1,
    align_kv: Annotated[int, typer.Option(help="Align the shadow's KV cache every N tokens; 0: never.")] = 1,
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens", help="Most tokens of the answer.")] = 128,
    dtype: Dtype = None,
    loader: Annotated[str, typer.Option(help=f"Where experts are loaded from: {', '.join(LOADERS)}.")] = "disk",
    threads: Annotated[
        int | None, typer.Option(help="Threads a node computes with; all cores, or half where nodes share a machine.")
    ] = None,
    launch_s: Annotated[float, typer.Option("--launch-timeout", help="Most seconds until a node is ready.")] = 600.0,
    mini_batch: Annotated[int, typer.Option(help="Most rows that an expert computes at once in prefill.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Answer a prompt; the text streams as it comes."""
    from odmoe.generate import run_generate
    from odmoe.terminal import Terminal

    settings = Settings(
        model=model, store=store, cluster=cluster, workers=workers, group_size=group_size, slots=slots,
        shadow=shadow, align_token=align_token, align_kv=align_kv, dtype=dtype, loader=loader,
        threads=threads, launch_s=launch_s, mini_batch=mini_batch, max_new_tokens=max_new_tokens,
    )  # fmt: skip
    if not model:
        raise typer.BadParameter("give a model directory, e.g. -m models/demo-moe", param_hint="--model")
    if prompt is None:
        prompt = _standard_input()
    if not prompt:
        raise PromptError("the prompt is empty; give it as an argument or on standard input")
    run_generate(settings, prompt, as_json, Terminal(quiet, debug))


@app.command()
def shard(
    model: Annotated[str, typer.Argument(help="Model directory, or org/name on the Hub.")],
    store: Annotated[str, typer.Argument(help="Where to write the expert store.")],
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object about the store.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Split a model into dense weights and an expert store, which is checked byte by byte."""
    from odmoe.process import prepare_process
    from odmoe.stores import prepare_store
    from odmoe.terminal import Terminal

    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r}; allowed: {', '.join(DTYPES)}", param_hint="--dtype")
    prepare_process(debug)
    terminal = Terminal(quiet, debug)
    with terminal.progress() as progress:
        made = prepare_store(model, store, dtype, progress)
    facts = {
        "store": str(made.path), "family": made.manifest.family, "dtype": made.manifest.dtype,
        "moe_layers": len(made.manifest.layers), "experts": made.manifest.experts,
        "expert_bytes": made.manifest.blob_bytes, "all_expert_bytes": made.manifest.expert_bytes,
    }  # fmt: skip
    if as_json:
        print(json.dumps(facts))
    else:
        terminal.facts("expert store", facts)


def _standard_input() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise PromptError("no prompt; give it as an argument or on standard input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"the prompt is not {error.encoding} text (byte {error.start}); convert it") from error


def run() -> int:
    """Do what the command line says. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        code = app(standalone_mode=False)  # what an Exit says, in which the library also hides Ctrl-C
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
    """Ctrl-C pressed several times is one: the others would land in the middle of tidying up."""
    last = float("-inf")

    def interrupt(number: int, frame: object) -> None:
        nonlocal last
        if time.monotonic() - last > AGAIN_S:
            last = time.monotonic()
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell said to ignore it
        signal.signal(signal.SIGINT, interrupt)


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
