"""`odmoe plan`: what a model would do on machines that need not be there yet."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from odmoe.settings.settings import DTYPES, SHADOWS
from scheduler.errors import ConfigError
from scheduler.policies.choices import PREFILLS

if TYPE_CHECKING:
    from scheduler.planning.scaling import Hardware, Policy

CONTEXT = 4096


def add_plan(app: typer.Typer) -> None:
    """`odmoe plan`."""
    app.command()(plan)


def _option(about: str) -> typer.models.OptionInfo:
    return typer.Option(help=about, show_default=False)


def plan(
    model: Annotated[str, typer.Option("-m", "--model", help="A model directory, config.json, store or org/name.")],
    workers: Annotated[int | None, _option("How many worker nodes; the profile's when not given.")] = None,
    device_memory: Annotated[
        str | None, _option("Of a worker: 1GB, 512MiB; as much as one expert needs when not given.")
    ] = None,
    load_bandwidth: Annotated[
        str | None, _option("From a worker's host memory or disk to its device: 25GB/s; else the profile's.")
    ] = None,
    link: Annotated[str | None, _option("Of every node: 1Gbit, 2.5Gbit; the profile's when not given.")] = None,
    profile: Annotated[str, typer.Option(help="Whose timings are scaled: a name or a file.")] = "rtx3090-1gbe",
    dtype: Annotated[str | None, _option(f"{', '.join(DTYPES)}; as config.json says when not given.")] = None,
    shadow: Annotated[str, typer.Option(help=f"The shadow's precision: {', '.join(SHADOWS)}.")] = "int8",
    recall: Annotated[float | None, _option("Of its predictions, 0 to 1; the paper's when not given.")] = None,
    group_size: Annotated[int | None, _option("Workers that serve a layer together; else the best.")] = None,
    slots: Annotated[int | None, _option("Experts that a worker holds at once; else the best that fits.")] = None,
    prefill: Annotated[str, typer.Option(help=f"As for generate: {', '.join(PREFILLS)}.")] = "ahead",
    context: Annotated[
        int | None, _option(f"Tokens that the KV caches have room for; {CONTEXT}, or the model's limit.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Say whether loads keep up, how fast a model would answer, what each node needs, and what would help most.

    The exit code is 1 where --device-memory has no room for what is asked.
    """
    from odmoe.settings.units import parse_bytes, parse_link, parse_rate
    from scheduler.planning.scaling import Hardware, Policy
    from scheduler.timing.profile import find_profile

    base = find_profile(profile)
    for name, value, allowed in (("shadow", shadow, SHADOWS), ("prefill", prefill, PREFILLS), ("dtype", dtype, DTYPES)):
        if value is not None and value not in allowed:
            raise ConfigError(f"--{name} is {value!r}; allowed: {', '.join(allowed)}")
    for label, count in (("workers", workers), ("group-size", group_size), ("slots", slots)):
        if count is not None and count < 1:
            raise ConfigError(f"--{label} is {count}; allowed: 1, 2, ...")
    if recall is not None and not 0 <= recall <= 1:
        raise ConfigError(f"--recall is {recall:g}; allowed: a number from 0 to 1")
    if recall is not None and shadow == "none":
        raise ConfigError("--recall is given with --shadow none; it is about the shadow's predictions")
    if context is not None and context < 1:
        raise ConfigError(f"--context is {context}; allowed: 1, 2, ...")
    hardware = Hardware(
        base,
        workers or base.workers,
        None if device_memory is None else parse_bytes(device_memory, "--device-memory"),
        None if load_bandwidth is None else parse_rate(load_bandwidth, "--load-bandwidth"),
        None if link is None else parse_link(link, "--link"),
    )
    if group_size and group_size > hardware.workers:
        raise ConfigError(f"--group-size is {group_size}; allowed: 1 to --workers ({hardware.workers})")
    policy = Policy(shadow, recall, prefill, group_size=group_size, slots=slots)
    _run(model, dtype, context, hardware, policy, as_json, quiet, debug)


def _run(
    name: str, dtype: str | None, context: int | None, hardware: Hardware, policy: Policy, as_json: bool, quiet: bool,
    debug: bool,
) -> None:  # fmt: skip
    from odmoe.clusters.process import prepare_process
    from odmoe.commands.plan_model import model_of, read_config
    from odmoe.commands.plan_text import as_dict, as_text
    from odmoe.terminal import Terminal
    from scheduler.planning.plan import make_plan
    from scheduler.planning.scaling import Setup

    prepare_process(debug)
    fields, stored = read_config(name)  # before torch is imported: a wrong path is answered at once
    with Terminal(quiet, debug).status() as say:
        say("counting the model's parameters")
        model = model_of(name, fields, dtype or stored, context or CONTEXT)
        if context is not None and model.context < context:
            raise ConfigError(f"--context is {context}; allowed: 1 to {model.context}, the model's limit")
        setup = Setup(model, hardware, policy)
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            say(f"simulation {done}")

        result = make_plan(setup, step)
    print(json.dumps(as_dict(result)) if as_json else as_text(result))
