"""A plan as text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

from odmoe.commands.texts.simulate_text import CAUSES, by_luck
from odmoe.terminal import count_text, megabytes
from scheduler.drafts.length import AUTO
from scheduler.planning.assumptions import list_assumptions
from scheduler.planning.plan import Estimate, Plan
from scheduler.planning.scaling import Change, Setup, Together, alignment_s, best, memory, workers_needed
from scheduler.planning.shadow_devices import shares_text
from scheduler.simulation.workload import SAME_TOKEN

_NOTHING = 0.01
_BOTTLENECKS = {
    "compute": "main node and experts together",
    "network": "messages",
    "load": "loads",
    "shadow": "predictions late or wrong",
}
_WIDEST = 100


def memory_text(setup: Setup) -> str:
    """What is known before anything is simulated: the model, and the memory of each role."""
    model, slots, given = setup.model, setup.policy.slots or 1, setup.hardware.device_bytes
    needs = memory(setup, slots)
    of = f" of the {megabytes(int(given))} given" if given else ""
    most = f"; {setup.hardware.slots(model)} fit" if given and setup.hardware.slots(model) > slots else ""
    least = "" if setup.policy.slots else ", the least,"
    over = f": {shares_text(setup)}" if setup.hardware.shadow_bytes else ""
    more = f"; an MTP layer, if the weights have one, takes {megabytes(model.head * model.item_bytes)} more"
    head = f"{more} (--draft-from mtp)" if model.head else ""
    rows = {
        "model": f"{model.name}: {model.layers} layers of {model.experts} experts, {model.top_k} a token, "
        f"{megabytes(model.expert_bytes)} each; {_many(model.dense + model.experts_all)} parameters",
        "main node": f"{megabytes(needs['main'])}: dense weights, and the cache of {model.context} tokens{head}",
        "shadow": f"{megabytes(needs['shadow'])} ({setup.policy.shadow})" + over if needs["shadow"] else "none",
        "a worker": f"{megabytes(needs['worker'])}{of}: {count_text(slots, 'slot')}{least} and room to compute{most}; "
        f"{megabytes(needs['store'])} of host memory or disk for all experts",
        "whole model": f"{megabytes(needs['whole'])} on one device"
        + f", {megabytes(needs['whole_dequantised'])} dequantised" * (model.native_bits > 0),
    }
    return "\n".join(["Device memory of each role:", "", *table(rows), ""])


def estimate_text(plan: Estimate) -> str:
    """The next part: the result in words, then the figures of one request."""
    return "\n".join([*wrap(_answer(plan)), "", *table(_figures(plan)), ""])


def rest_text(plan: Plan) -> str:
    """What follows: changes that would help, several requests, then assumptions."""
    taken = list_assumptions(plan.profile, plan.setup.hardware, plan.setup.policy)
    helps = best(plan.changes)
    last = (
        f"The best single change: {helps.what}, for {helps.tokens_per_s:.2f} tokens/s ({_gain(helps)})"
        if helps
        else "No single change would help"
    )
    lines = [*wrap(". ".join([last, *_idle_shadow(plan)]) + "."), "", *table(_further_figures(plan)), ""]
    lines += [*_helps(plan), "", "Assumed, because not given:"]
    return "\n".join([*lines, *(part for line in taken for part in wrap(line, "  ", "    "))])


def _answer(plan: Estimate) -> str:
    model, budget, policy = plan.setup.model, plan.budget, plan.setup.policy
    each = -(-model.top_k // plan.group_size)
    what = "an expert takes" if each == 1 else f"the {each} experts that a worker has to load take"
    allows = f"and equation (1) allows {_ms(budget.max_load_s)}"
    if policy.shadow == "none":
        first = f"Without a shadow no load is hidden: {what} {_ms(budget.load_s)} to load"
    elif budget.io_bound:
        first = f"Loads end {_ms(-budget.slack_s)} late: {what} {_ms(budget.load_s)} to load, {allows}"
    else:
        first = (
            f"The experts arrive in time, {_ms(budget.slack_s)} early: {what} {_ms(budget.load_s)} to load, {allows}"
        )
    lost = 1 - plan.tokens_per_s / plan.ideal_tokens_per_s
    speed = f"Expect {plan.tokens_per_s:.2f} tokens/s"
    speed += (
        f", {lost:.0%} less than the {plan.ideal_tokens_per_s:.2f} tokens/s without load times"
        if lost >= _NOTHING
        else ""
    )
    if lost >= _NOTHING and not budget.io_bound and policy.shadow != "none":
        speed += ": some predictions are wrong, and the first ones of each token come late"
    return ". ".join([first, speed, *_slow_alignment(plan), _memory(plan), *_large_shadow(plan)]) + "."


def _memory(plan: Estimate) -> str:
    needs, given = plan.memory, plan.setup.hardware.device_bytes
    share = needs["together"] / needs["whole"]
    of = f" of the {megabytes(int(given))} given" if given else ""
    if given and plan.slots < plan.setup.hardware.slots(plan.setup.model) and not plan.setup.policy.slots:
        of += ", because it evicts each expert after use and further slots gain nothing"
    return (
        f"It takes {plan.machines} machines: {_seats(plan)}. A worker uses {megabytes(needs['worker'])} of device "
        f"memory{of}; all nodes together use {megabytes(needs['together'])}, {share:.0%} of what one machine with all "
        "experts needs"
    )


def _seats(plan: Estimate) -> str:
    shadow = "" if plan.setup.policy.shadow == "none" else " one for the shadow,"
    workers = plan.setup.hardware.workers
    return f"one for the main node,{shadow} {workers} for worker{'s' * (workers > 1)}"


def _slow_alignment(plan: Estimate) -> list[str]:
    """That the link, rather than anything else, bounds the speed."""
    model = plan.setup.model
    takes = alignment_s(plan.profile, plan.setup.policy.alignment)
    if plan.setup.policy.shadow == "none" or takes * plan.tokens_per_s < 1 - _NOTHING:
        return []
    states = model.state * model.item_bytes
    every = plan.setup.policy.alignment.states_every(states)
    state = f", with its share of {megabytes(states)} of states every {every} tokens" if states else ""
    return [
        f"The link bounds it: what a token's alignment sends to the shadow{state}, takes {_ms(takes)}, and predictions "
        "are not as good without"
    ]


def _large_shadow(plan: Estimate) -> list[str]:
    """That a machine for the shadow could hold the model itself."""
    shadow, whole = plan.memory["shadow"], plan.memory["whole"]
    parts = len(plan.setup.hardware.shadow_bytes)
    if shadow < whole and parts > 1:
        return [f"The shadow needs {megabytes(shadow)} of device memory, of one machine or of {parts} together"]
    if shadow < whole:
        return [f"The shadow's machine needs {megabytes(shadow)} of device memory"] if shadow else []
    return [
        f"The shadow ({plan.setup.policy.shadow}) needs a machine with {megabytes(shadow)} of device memory, and the "
        f"whole model takes {megabytes(whole)}: such a machine holds every expert and needs no workers"
    ]


def _idle_shadow(plan: Plan) -> list[str]:
    """A hint if loads are so fast that predictions gain nothing."""
    alone = [change for change in plan.changes if change.alone and change.factor >= 1 - _NOTHING]
    return [f"The shadow gains nothing here. Without it: {alone[0].price}"] if alone else []


def _figures(plan: Estimate) -> dict[str, str]:
    budget = plan.budget
    main, worker = _ms(budget.main_s), _ms(budget.worker_s)
    groups = (
        f"{budget.groups} x {main} (main node) + {budget.groups - 1} x {worker} (worker) = {_ms(budget.max_load_s)}"
    )
    causes = CAUSES if plan.setup.policy.shadow != "none" else CAUSES | {"load": "loads"}
    times = "; ".join(f"{causes[name]} {_ms(seconds)}" for name, seconds in plan.where.items() if seconds)
    tried = "; ".join(f"--group-size {g} --slots {s}: {v:.2f} tokens/s" for (g, s), v in plan.tried.items())
    return {
        "equation (1)": f"a load may take {groups}; it takes {_ms(budget.load_s)}: "
        + (f"too long with fewer than {workers_needed(budget)} workers" if budget.io_bound else "in time"),
        "choose": f"--workers {budget.workers} --group-size {plan.group_size} --slots {plan.slots}",
        "tried": tried,
        "decode": f"{plan.tokens_per_s:.2f} tokens/s{by_luck(plan.luck)}",
        "a token": f"{times}; bottleneck, the largest part: {_BOTTLENECKS.get(plan.bound or '', 'none')}",
    }


def _further_figures(plan: Plan) -> dict[str, str]:
    fits = {"over fits": _over_fits(plan)} if _over_fits(plan) else {}
    return {
        "first token": ", ".join(f"{s:.2f} s for a prompt of {n} tokens" for n, s in plan.ttft_s.items()),
        **fits,
        "requests": "; ".join(_together(plan)),
        **_drafts(plan),
    }


def _together(plan: Plan) -> Iterator[str]:
    """Tokens/s of one request, and of several at once, with and without --batch-dense."""
    yield f"1 alone: {plan.tokens_per_s:.2f} tokens/s"
    for count in sorted({one.requests for one in plan.together}):
        own, batched = (plan.together[Together(count, way)] for way in (False, True))
        yield f"{count} at once: {own:.2f} tokens/s together, {batched:.2f} with --batch-dense"


def _drafts(plan: Plan) -> dict[str, str]:
    """Tokens/s of one request if the shadow drafts."""
    if not plan.drafted:
        return {}
    says = [f"tokens/s of 1 request if {SAME_TOKEN:.0%} of drafts are right"]
    for one, rate in plan.drafted.items():
        about = " in short answers (long ones gain more)" if one.draft == AUTO else ""
        says.append(f"{rate:.2f} with --draft {one.draft}{about}")
    return {"drafts": "; ".join(says)}


def _helps(plan: Plan) -> list[str]:
    idle = [change.what for change in plan.changes if change.idle]

    def lines(real: bool) -> list[str]:
        found: list[str] = []
        for change in plan.changes:
            if change.real is real and change.what not in idle:
                about = "; ".join(part for part in (change.price, _range(change)) if part)
                text = change.what + (f" ({about})" if about else "")
                found += wrap(text, f"  {change.tokens_per_s:>7.2f}  {_gain(change):>6}  ")
        return found

    found = ["Single changes, in tokens/s:", *(lines(True) or ["  no change makes a difference"])]
    if idle:
        found += wrap("; ".join(idle), f"  less than {_NOTHING:.0%} either way: ", "    ")
    return found + (["For comparison:", *lines(False)] if lines(False) else [])


def _range(change: Change) -> str:
    """Over the profile's fits, if it matters."""
    if change.factors is None:
        return ""
    least, most = (f"{factor - 1:+.0%}" for factor in change.factors)
    return f"{least} to {most} by fit" if least != most else ""


def _over_fits(plan: Plan) -> str:
    rates = [plan.tokens_per_s, *plan.fits]
    least, most = (f"{rate:.2f}" for rate in (min(rates), max(rates)))
    sets = f"{1 + len(plan.fits)} sets of times that give the measured speed"
    return f"{least} to {most} tokens/s by fit (over the {sets})" if least != most else ""


def _gain(change: Change) -> str:
    return f"{change.factor - 1:+.0%}"


def _many(count: int) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def table(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [line for name, text in rows.items() for line in wrap(text, f"  {name:<{width}}  ")]


def wrap(text: str, first: str = "", others: str | None = None) -> list[str]:
    """Lines as wide as the terminal (COLUMNS). Lines after the first are indented by `others`, or to the first's
    text."""
    width = min(max(shutil.get_terminal_size((_WIDEST, 24)).columns, 40), _WIDEST)
    indent = " " * len(first) if others is None else others
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
