"""A plan as people read it, and as one JSON object."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict
from typing import Any

from odmoe.commands.simulate_text import CAUSES, by_luck
from odmoe.terminal import megabytes
from scheduler.planning.plan import Plan
from scheduler.planning.scaling import RECALLS, Change, Hardware, Policy, best, workers_needed
from scheduler.timing.profile import Profile

_NOTHING = 0.01
_WIDEST = 100


def as_dict(plan: Plan) -> dict[str, Any]:
    """Seconds, bytes, tokens/s; `equation_1.slack_s` below 0: loads are too slow by that; `decode_luck`: the standard
    error of the simulated rate, as a share of it."""
    model, budget = plan.setup.model, plan.budget
    helps = best(plan.changes)
    return {
        "model": asdict(model) | {"expert_bytes": model.expert_bytes},
        "workers": budget.workers,
        "equation_1": asdict(budget) | {"holds": not budget.io_bound, "workers_needed": workers_needed(budget)},
        "group_size": plan.group_size,
        "slots": plan.slots,
        "tried": [{"group_size": g, "slots": s, "tokens_per_s": v} for (g, s), v in plan.tried.items()],
        "shadow": plan.setup.policy.shadow,
        "recall": plan.setup.policy.expected if plan.setup.policy.shadow != "none" else None,
        "prefill": plan.setup.policy.chosen.prefill,
        "decode_tokens_per_s": plan.tokens_per_s,
        "decode_luck": plan.luck,
        "decode_tokens_per_s_if_loads_took_no_time": plan.ideal_tokens_per_s,
        "ttft_s": {str(tokens): seconds for tokens, seconds in plan.ttft_s.items()},
        "bound": plan.bound,
        "where_s": plan.where,
        "memory_bytes": plan.memory,
        "context": model.context,
        "helps_most": asdict(helps) if helps else None,
        "changes": [asdict(change) for change in plan.changes],
        "assumed": assumed(plan.profile, plan.setup.hardware, plan.setup.policy),
    }


def as_text(plan: Plan) -> str:
    """The answer in words, then the figures, then what would help."""
    taken = assumed(plan.profile, plan.setup.hardware, plan.setup.policy)
    lines = [*_wrapped(_answer(plan)), "", *_table(_figures(plan)), "", *_helps(plan), ""]
    lines += ["Assumed, since nobody said:", *(part for line in taken for part in _wrapped(line, "  ", "    "))]
    return "\n".join(lines)


def _answer(plan: Plan) -> str:
    model, budget, policy = plan.setup.model, plan.budget, plan.setup.policy
    each = -(-model.top_k // plan.group_size)
    what = "an expert takes" if each == 1 else f"the {each} experts of a worker take"
    allows = f"and equation (1) allows {_ms(budget.max_load_s)}"
    if policy.shadow == "none":
        first = f"Without a shadow every load is waited for: {what} {_ms(budget.load_s)} to load"
    elif budget.io_bound:
        first = f"Loads are too slow by {_ms(-budget.slack_s)}: {what} {_ms(budget.load_s)} to load, {allows}"
    else:
        first = (
            f"The experts arrive in time, {_ms(budget.slack_s)} early: {what} {_ms(budget.load_s)} to load, {allows}"
        )
    lost = 1 - plan.tokens_per_s / plan.ideal_tokens_per_s
    speed = f"Expect {plan.tokens_per_s:.2f} tokens/s"
    speed += (
        f", {lost:.0%} below the {plan.ideal_tokens_per_s:.2f} that there would be if loading took no time"
        if lost >= _NOTHING
        else ""
    )
    if lost >= _NOTHING and not budget.io_bound and policy.shadow != "none":
        speed += ": predictions are wrong now and then, and a token's first ones come late"
    share = plan.memory["together"] / plan.memory["whole"]
    need = (
        f"A worker needs {megabytes(plan.memory['worker'])} of device memory; all nodes together "
        f"{megabytes(plan.memory['together'])}, {share:.0%} of what one machine with all experts would"
    )
    helps = best(plan.changes)
    last = (
        f"What would help most: {helps.what}, {helps.tokens_per_s:.2f} tokens/s ({_gain(helps)})"
        if helps
        else "No single change would help"
    )
    return ". ".join([first, speed, need, last, *_idle_shadow(plan)]) + "."


def _idle_shadow(plan: Plan) -> list[str]:
    """A hint where loads are so quick that nobody need foresee them."""
    alone = [change for change in plan.changes if change.alone and change.factor >= 1 - _NOTHING]
    return [f"The shadow brings nothing here: without it, {alone[0].price}"] if alone else []


def _figures(plan: Plan) -> dict[str, str]:
    model, budget, memory = plan.setup.model, plan.budget, plan.memory
    main, worker = _ms(budget.main_s), _ms(budget.worker_s)
    groups = f"{budget.groups} x {main} main node + {budget.groups - 1} x {worker} worker = {_ms(budget.max_load_s)}"
    causes = CAUSES if plan.setup.policy.shadow != "none" else CAUSES | {"load": "loads"}
    times = "; ".join(f"{causes[name]} {_ms(seconds)}" for name, seconds in plan.where.items() if seconds)
    tried = ", ".join(f"{g} and {s}: {v:.2f}" for (g, s), v in plan.tried.items())
    return {
        "model": f"{model.name}: {model.layers} layers of {model.experts} experts, {model.top_k} a token, "
        f"{megabytes(model.expert_bytes)} each; {_many(model.dense + model.experts_all)} parameters",
        "equation (1)": f"{groups}; a load {_ms(budget.load_s)}; it "
        + ("does not hold" if budget.io_bound else "holds")
        + (f" below {workers_needed(budget)} workers" if budget.io_bound else ""),
        "choose": f"--workers {budget.workers} --group-size {plan.group_size} --slots {plan.slots}",
        "tried": f"group size and slots, tokens/s: {tried}",
        "decode": f"{plan.tokens_per_s:.2f} tokens/s{by_luck(plan.luck)}; {plan.bound}-bound",
        "a token": times,
        "first token": ", ".join(f"{s:.2f} s after {n} tokens of prompt" for n, s in plan.ttft_s.items()),
        "main node": f"{megabytes(memory['main'])}: dense weights, and the cache of {model.context} tokens",
        "shadow": f"{megabytes(memory['shadow'])} ({plan.setup.policy.shadow})" if memory["shadow"] else "none",
        "a worker": f"{megabytes(memory['worker'])} on its device: {plan.slots} slot{'s' * (plan.slots > 1)} and room "
        f"to compute; {megabytes(memory['store'])} of host memory or disk for all experts",
        "together": f"{megabytes(memory['together'])} on devices; the whole model on one: {megabytes(memory['whole'])}",
    }  # fmt: skip


def _helps(plan: Plan) -> list[str]:
    idle = [change.what for change in plan.changes if abs(change.factor - 1) < _NOTHING]

    def lines(real: bool) -> list[str]:
        found: list[str] = []
        for change in plan.changes:
            if change.real is real and change.what not in idle:
                text = change.what + (f" ({change.price})" if change.price else "")
                found += _wrapped(text, f"  {change.tokens_per_s:>7.2f}  {_gain(change):>6}  ")
        return found

    found = ["One thing done differently, tokens/s:", *(lines(True) or ["  nothing brings or costs anything"])]
    if idle:
        found += _wrapped("; ".join(idle), f"  less than {_NOTHING:.0%} either way: ", "    ")
    return found + (["For comparison:", *lines(False)] if lines(False) else [])


def _gain(change: Change) -> str:
    return f"{change.factor - 1:+.0%}"


def _many(count: int) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def _table(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [line for name, text in rows.items() for line in _wrapped(text, f"  {name:<{width}}  ")]


def _wrapped(text: str, first: str = "", others: str | None = None) -> list[str]:
    """As wide as the terminal (COLUMNS), a line that is not `first` under its text, or after `others`."""
    width = min(max(shutil.get_terminal_size((_WIDEST, 24)).columns, 40), _WIDEST)
    indent = " " * len(first) if others is None else others
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def assumed(profile: Profile, hardware: Hardware, policy: Policy) -> list[str]:
    """What nobody said, and where it was taken from."""
    base = hardware.base
    found = [f"times of main node, workers and shadow: {base.name}'s, scaled by bytes; launches and packing as there"]
    if hardware.device_bytes is None:
        found.append("device memory of a worker: for one expert")
    if hardware.load_bytes_per_s is None and base.model_sizes and base.load_s:
        found.append(f"load bandwidth: {base.model_sizes[0] / base.load_s / 1e9:.1f} GB/s, {base.name}'s")
    if hardware.link_bits_per_s is None:
        found.append(f"links: {profile.link_bits_per_s / 1e9:g} Gbit/s, {base.name}'s")
    if policy.recall is None and policy.shadow in RECALLS:
        found.append(
            f"recall: {RECALLS[policy.shadow]:.2%}, what the paper measured for {policy.shadow}, aligned every token"
        )
    if policy.shadow != "none":
        found.append("the shadow runs on a GPU (on a CPU what is not quantised takes twice the bytes)")
    return found
