"""Prints which method of which policy is called when, and what it answers.

odmoe simulate --policy-file docs/examples/print_hooks.py --system print-hooks --routes demo-moe \
    --profile rtx3090-pcie3 --slots 12
"""

import inspect

from scheduler.policies.baselines.mixtral_offloading import NextGate
from scheduler.policies.placement import DeviceOnly
from scheduler.policies.precision import Full
from scheduler.policies.registry import Choice
from scheduler.policies.residency.lru import LRU
from scheduler.policies.routers import TopK
from scheduler.policies.system_config import SystemConfig
from scheduler.policies.systems import Preset

OFTEN = ("on_paced", "full")
"""Called at nearly every event: not printed."""


class Printed:
    """Stands for a policy."""

    def __init__(self, kind, policy):
        self.kind, self.policy = kind, policy

    def __getattr__(self, name):
        found = getattr(self.policy, name)
        if not callable(found):
            return found
        parameters = inspect.signature(found).parameters

        def call(*args):
            answer = found(*args)
            if name not in OFTEN:
                shown = ", ".join(map(argument, parameters, args))
                print(f"{self.kind:<9}  {name}({shown})", *(("->", short(answer)) if answer else ()))
            return answer

        return call


def argument(name, value):
    return f"{name}={value}" if isinstance(value, int) else short(value)


def short(value):
    match type(value).__name__:
        case "Visit":
            return f"token {value.position}, layer {value.layer}"
        case "ExpertId":
            return f"expert {value.layer}.{value.expert}"
        case "Forecast":
            return f"{short(value.visit)}: {list(value.experts)}"
        case "Costs" | "Importance" | "ModelShape" as name:
            return name.lower()
        case "tuple" | "list" | "set" | "dict_keys":
            parts = [short(one) for one in value]
            few = parts if len(parts) <= 3 else [*parts[:2], f"{len(parts) - 2} more"]
            return "scores" if any("0." in one and "expert" not in one for one in parts) else f"[{', '.join(few)}]"
        case _:
            return repr(value)


class Router(TopK):
    exact, wants_scores = False, True


PARTS = {
    "predictor": lambda shape, c: NextGate(shape, 1),
    "residency": lambda shape, c: LRU(shape),
    "router": lambda shape, c: Router(),
    "placement": lambda shape, c: DeviceOnly(),
    "precision": lambda shape, c: Full(),
}


def choice(kind, make):
    return Choice(
        f"Prints the calls of a {kind}", lambda shape, c: Printed(kind, make(shape, c)), exact=kind != "router"
    )


POLICIES = {kind: {"print-hooks": choice(kind, make)} for kind, make in PARTS.items()}
SYSTEMS = {
    "print-hooks": Preset(
        "Prints every call of its five policies", SystemConfig(*["print-hooks"] * 5, prefill="pipelined")
    )
}
