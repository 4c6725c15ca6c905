"""The command line. Answers go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from odmoe.settings import DTYPES, LOADERS, SHADOWS, Settings
from scheduler.errors import ODMoEError, PromptError

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


@app.callback()
def _root() -> None:
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
        threads=threads, mini_batch=mini_batch, max_new_tokens=max_new_tokens,
    )  # fmt: skip
    if not model:
        raise typer.BadParameter("give a model directory, e.g. -m models/demo-moe", param_hint="--model")
    if prompt is None:
        if sys.stdin.isatty():
            raise PromptError("no prompt; give it as an argument or on standard input")
        prompt = sys.stdin.read()
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


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    debug = "--debug" in sys.argv
    try:
        app(standalone_mode=False)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except ODMoEError as error:
        if debug:
            raise
        sys.stderr.write(f"odmoe: {type(error).__name__}: {error}\n")
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        usage = getattr(error, "exit_code", None)  # a usage error of the command line library
        if usage is None or not hasattr(error, "format_message"):
            raise
        sys.stderr.write(f"odmoe: {error.format_message()} (odmoe --help)\n")
        sys.exit(usage)


if __name__ == "__main__":
    main()
