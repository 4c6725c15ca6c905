"""`odmoe plan`: speed and memory of a model on machines that need not exist yet."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from odmoe.cli.flags import SettingsCommand, with_settings
from odmoe.cli.options import Json, PanelDebug, PanelQuiet
from odmoe.settings.bounds import check_slots
from odmoe.settings.plan_settings import CONTEXT, PlanSettings
from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from odmoe.terminal import Terminal
    from scheduler.planning.plan import Plan
    from scheduler.planning.scaling import Hardware, Policy


def add_plan(app: typer.Typer) -> None:
    """`odmoe plan`."""
    app.command(cls=SettingsCommand)(with_settings(PlanSettings)(plan))


def plan(
    flags: dict[str, Any],
    as_json: Json = False,
    quiet: PanelQuiet = False,
    debug: PanelDebug = False,
) -> None:
    """Plan a cluster for a model.

    Shows whether loads keep up, tokens/s, memory, and which change would help most.

    The exit code is 1 if --worker-memory is too small.
    """
    settings = PlanSettings(**flags)
    settings.check_together()
    from odmoe.clusters.process import prepare_process
    from odmoe.commands.plan_text import as_dict, as_text
    from odmoe.terminal import Terminal
    from scheduler.planning.scaling import Hardware, Policy
    from scheduler.policies.system_config import SystemConfig
    from scheduler.timing.profile import find_profile

    base = find_profile(settings.profile)
    workers = settings.workers or base.workers
    if settings.group_size is not None and settings.group_size > workers:
        raise ConfigError(f"--group-size is {settings.group_size}; allowed: 1 to --workers ({workers})")
    if settings.slots is not None:
        check_slots(workers, settings.slots)
    hardware = Hardware(base, workers, settings.worker_memory, settings.load_bandwidth, settings.link)
    policy = Policy(
        settings.shadow,
        settings.recall,
        SystemConfig(prefill=settings.prefill),
        group_size=settings.group_size,
        slots=settings.slots,
    )
    prepare_process(debug)
    result = _planned(settings, hardware, policy, Terminal(quiet, debug))
    print(json.dumps(as_dict(result)) if as_json else as_text(result))


def _planned(settings: PlanSettings, hardware: Hardware, policy: Policy, terminal: Terminal) -> Plan:
    from odmoe.commands.plan_model import model_of, read_config
    from odmoe.simulation_pool import simulation_pool
    from scheduler.planning.plan import make_plan
    from scheduler.planning.scaling import Setup

    name, context = settings.model, settings.context
    found = read_config(name)  # before torch is imported, so that a wrong path is rejected at once
    with simulation_pool() as each, terminal.status() as say:
        say("counting the model's parameters")
        dtype, experts = settings.dtype or found.dtype, found.experts or settings.experts
        model = model_of(name, found.fields, dtype, context or CONTEXT, experts)
        if context is not None and model.context < context:
            raise ConfigError(f"--context is {context}; allowed: 1 to {model.context}, the model's limit")
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            say(f"simulation {done}")

        return make_plan(Setup(model, hardware, policy), step, each)
