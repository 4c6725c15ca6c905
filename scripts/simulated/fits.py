"""What sets of times that fit OD-MoE's speed equally well say of its other figures, and of changes: simulated.

    .venv/bin/python -m scripts.simulated.fits                       # two minutes
    .venv/bin/python -m scripts.simulated.fits --tokens 32 --seeds 1

The OD-MoE paper does not say how long a load or a layer of its shadow takes, and several pairs give its decode speed
(`fits` of scheduler/timing/profiles/rtx3090-1gbe.yaml). For each pair: speed with the paper's policy and with ours, the
time to the first token, the cases of Fig 8 without a shadow, what changes would gain, and what Figs 9 and 10 would
need: aligning KV rows every fourth token is as good as every token if it costs so much recall (*break-even*), with
RTX 3090 workers and with RTX 3080s. Means over seeds of random routes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

from scheduler.alignment import AT_ONCE, LATE, Alignment
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.scenario import RECALL, Scenario
from scheduler.simulation.simulate import Outcome, simulate_requests
from scheduler.timing.profile import Profile, find_profile
from scripts.lib.flags import positive, script_parser
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table

PROFILE, OTHER_CARD = "rtx3090-1gbe", "rtx3080-1gbe"
KV_PERIOD = 4
"""Fig 10's best, where Fig 9's is 1."""
LOSS = 0.02
"""Of recall, between which speed is taken for linear."""


def fits() -> Iterator[tuple[Profile, Profile]]:
    """The profile with each pair of times, the one in use first, and the same with the workers of the other card."""
    base, other = find_profile(PROFILE), find_profile(OTHER_CARD)
    for one in (base, *base.other_fits()):
        times = {"load_s": one.load_s, "load_piece_s": one.load_piece_s, "shadow_layer_s": one.shadow_layer_s}
        yield one, replace(other, **times)


class Simulated:
    """Decoding of one request, a mean over seeds."""

    def __init__(self, tokens: int, seeds: int) -> None:
        self._tokens, self._seeds = tokens, range(seeds)

    def rate(self, profile: Profile, departure: str = LATE, recall: float = RECALL, **scenario: Any) -> float:
        """Tokens/s."""
        system = scenario.pop("system", SystemConfig(departure=departure))
        outcomes = self._outcomes(Scenario(profile, tokens=self._tokens, system=system, **scenario), recall)
        return fmean(one.decode_tokens_per_s or 0.0 for one in outcomes)

    def ttft_s(self, profile: Profile, prompt_tokens: int) -> float:
        """With the paper's order of a prompt."""
        system = SystemConfig(departure=LATE, prefill="in-turn")
        of = Scenario(profile, prompt_tokens=prompt_tokens, tokens=1, system=system)
        return fmean(one.ttft_s for one in self._outcomes(of, RECALL))

    def break_even(self, profile: Profile) -> float:
        """The loss of recall at which KV rows every `KV_PERIOD` tokens are as good as every token."""
        rare = Alignment(1, KV_PERIOD)
        every = self.rate(profile)
        full, less = (self.rate(profile, recall=RECALL - loss, alignment=rare) for loss in (0.0, LOSS))
        return LOSS * (full - every) / (full - less)

    def _outcomes(self, scenario: Scenario, recall: float) -> Iterator[Outcome]:
        return (simulate_requests(scenario, random_arrivals(scenario, recall, seed)) for seed in self._seeds)


def row(simulated: Simulated, profile: Profile, other_card: Profile) -> dict[str, Any]:
    """Of one pair of times."""
    rate = simulated.rate
    late = rate(profile)
    whole = replace(profile, cancellable=False, load_piece_s=0.0)
    changed = {
        "second_slot": rate(profile, slots=2),
        "fast_loads": rate(replace(profile, load_s=profile.load_s / 2, load_piece_s=profile.load_piece_s / 2)),
        "fast_shadow": rate(replace(profile, shadow_layer_s=profile.shadow_layer_s / 2)),
        "ten_workers": rate(profile, workers=10),
    }
    return {
        "load_s": profile.load_s,
        "shadow_layer_s": profile.shadow_layer_s,
        "late": late,
        "at_once": rate(profile, AT_ONCE),
        "ttft_16_s": simulated.ttft_s(profile, 16),
        "ttft_128_s": simulated.ttft_s(profile, 128),
        "random": rate(profile, system=SystemConfig("random")),
        "on_demand": rate(profile, system=SystemConfig("none")),
        **{name: value / late - 1 for name, value in changed.items()},
        "second_slot_whole_loads": rate(whole, slots=2) / rate(whole) - 1,
        "break_even": simulated.break_even(profile),
        "break_even_other_card": simulated.break_even(other_card),
    }


COLUMNS = (
    Column("load, ms", "load_s", "g", 1e3),
    Column("layer of the shadow, ms", "shadow_layer_s", "g", 1e3),
    Column("tokens/s, `--departure late`", "late", ".2f"),
    Column("`at-once`", "at_once", ".2f"),
    Column("first token of 16, s", "ttft_16_s", ".2f"),
    Column("of 128", "ttft_128_s", ".2f"),
    Column("Fig 8: case 5", "random", ".2f"),
    Column("case 6", "on_demand", ".2f"),
    Column("second slot", "second_slot", "+.1%"),
    Column("loads not cancellable", "second_slot_whole_loads", "+.1%"),
    Column("loads twice as fast", "fast_loads", "+.0%"),
    Column("shadow twice as fast", "fast_shadow", "+.0%"),
    Column("ten workers", "ten_workers", "+.1%"),
    Column("break-even, RTX 3090", "break_even", ".2%"),
    Column("RTX 3080", "break_even_other_card", ".2%"),
)
"""What is gained is gained over `--departure late`; *loads not cancellable* is of a second slot."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--tokens", type=positive, default=128, help="of each answer (%(default)s)")
    parser.add_argument("--seeds", type=positive, default=3, help="of random routes (%(default)s)")
    args = parser.parse_args(argv)
    if args.tokens < 2:
        parser.error(f"--tokens is {args.tokens}; allowed: 2, 3, ...")
    return args


def main() -> int:
    args = parse()
    header(f"Sets of times that fit the paper's speed, simulated: {PROFILE}")
    simulated = Simulated(args.tokens, args.seeds)
    rows = []
    for one, other_card in fits():
        rows.append(row(simulated, one, other_card))
        print(f"load {1e3 * one.load_s:g} ms: {rows[-1]['late']:.2f} tokens/s", file=sys.stderr, flush=True)
    print(text_table(COLUMNS, rows))
    print(save_rows("fits", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
