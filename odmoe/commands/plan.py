"""`odmoe plan`: speed and memory of a model on machines that need not exist yet."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from odmoe.commands.shared.flags import with_settings
from odmoe.commands.shared.options import Json, PanelDebug, PanelQuiet
from odmoe.settings.plan_settings import PlanSettings

if TYPE_CHECKING:
    from odmoe.api.planning import Status


@with_settings(PlanSettings)
def plan(
    flags: dict[str, Any],
    as_json: Json = False,
    quiet: PanelQuiet = False,
    debug: PanelDebug = False,
) -> None:
    """Plan a cluster for a model.

    Shows memory, then whether loads keep up and tokens/s, then which change would help most.

    With --machine: what to run on the machines that you have. The default --profile is then pc-nvme-2.5gbe.

    The exit code is 1 if it does not fit.
    """
    settings = PlanSettings(**flags)
    settings.check_together()
    from odmoe.api.planning import plan_from_settings, report_of
    from odmoe.clusters.process import prepare_process
    from odmoe.commands.texts.plan_text import estimate_text, memory_text, rest_text
    from odmoe.terminal import Terminal

    prepare_process(debug)
    status = Terminal(quiet, debug).status
    if settings.machine:
        _advise(settings, as_json, status)
    elif as_json:
        print(json.dumps(report_of(plan_from_settings(settings, status)).as_dict()))
    else:

        def say(text: str) -> None:
            print(text, flush=True)  # to a pipe at once, too

        found = plan_from_settings(
            settings, status, lambda setup: say(memory_text(setup)), lambda first: say(estimate_text(first))
        )
        say(rest_text(found))


def _advise(settings: PlanSettings, as_json: bool, status: Status) -> None:
    from odmoe.api.planning import advise_from_settings
    from odmoe.commands.texts.machine_text import advice_text, as_dict, improvements_text

    if as_json:
        print(json.dumps(as_dict(*advise_from_settings(settings, status))))
        return
    advice, changes = advise_from_settings(settings, status, lambda first: print(advice_text(first), flush=True))
    print(improvements_text(advice, changes))
