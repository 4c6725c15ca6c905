"""The speed of a layout: the scheduler decodes on a few of the model's layers, on a virtual clock."""

from __future__ import annotations

import math
from dataclasses import replace

from scheduler.planning.machines import ALL, Layout, Machine, Place, Seat
from scheduler.planning.scaling import Hardware, Policy, Setup, scale_profile
from scheduler.simulation.route_model import ROUTE_MODELS
from scheduler.simulation.scenario import OwnTimes, Scenario
from scheduler.simulation.simulate import simulate
from scheduler.simulation.workload import random_workload
from scheduler.timing.profile import Profile
from scheduler.types import ModelSize

_LAYERS, _EXPERTS = 2, 128
"""Least layers, and experts of all of them, that are simulated: each layer's experts are drawn alike."""
_SHADOWED_LAYERS = 16
"""With a shadow, whose lead ends with a token, more of them."""
_MEASURED, _MOST_WARMING = 16, 96
"""Tokens whose time counts, and the most before them, in which caches fill."""
_SEED = 1
_SKEW = 3.25
"""Of `guess`: that of the route model deep-moe."""


def speed(base: Profile, layout: Layout, routes: str) -> float:
    """Simulated decode tokens/s of one request. `base`: whose times are scaled. `routes`: a route model's name."""
    model = layout.model
    kept_all = layout.keeps == ALL
    profile, seats = profile_of(base, layout), _own_times(base, layout)
    count = min(model.layers, _SHADOWED_LAYERS if layout.shadow else max(_LAYERS, _EXPERTS // model.experts))
    warming = 0 if kept_all else min(math.ceil(2 * model.experts / model.top_k), _MOST_WARMING)
    part = count / model.layers
    seats = tuple(_scaled(one, part) for one in seats)
    if kept_all:
        seats = tuple(one._replace(load_s=0.0, host_slots=None) for one in seats)
    scenario = Scenario(
        replace(profile, layers=count, load_s=0.0 if kept_all else profile.load_s, load_piece_s=0.0),
        prompt_tokens=1,
        prompt_s=count * (profile.main_layer_s + profile.load_s),
        tokens=1 + warming + _MEASURED,
        workers=len(seats),
        uneven=seats,
        replicas=layout.replicas,
        group_size=min(model.top_k, len(seats)),
        system=layout.system,
        route_model=ROUTE_MODELS[routes],
    )
    recall = Policy(layout.scheme).expected_recall if layout.shadow else None
    found = simulate(scenario, random_workload(scenario, recall, _SEED)).answer.ends_s
    return _MEASURED / (found[-1] - found[-1 - _MEASURED]) * part


def _scaled(own: OwnTimes, part: float) -> OwnTimes:
    """With that part of its slots, and of what it holds."""
    on_disk = None if own.part is None else math.ceil(own.part * part)
    held = None if own.host_slots is None else int(own.host_slots * part + 0.5)
    return own._replace(slots=max(1, int(own.slots * part + 0.5)), host_slots=held, part=on_disk)


def guess(base: Profile, layout: Layout) -> float:
    """Tokens/s by arithmetic, to order layouts before they are simulated: the most popular experts are cached, a
    layer's loads are spread evenly, and a shadow hides half of them."""
    profile, seats, top_k = profile_of(base, layout), _own_times(base, layout), layout.model.top_k
    cached = min(1.0, layout.slots / layout.experts)
    hits = (1 - math.exp(-_SKEW * cached)) / (1 - math.exp(-_SKEW)) if layout.keeps != "none" else 0.0
    missing = (1 - hits) * top_k * (0.5 if layout.shadow else 1.0)
    in_memory = min(1.0, sum(seat.host_slots or 0 for seat in seats) / layout.experts)
    loads = [seat.load_s + (1 - in_memory) * seat.disk_load_s for seat in seats]
    load_s = 1 / sum(1 / one for one in loads)
    compute_s = 1 / sum(1 / seat.expert_s for seat in seats)
    slowest = max(loads)
    way_s = max(profile.hop_s, top_k * profile.hidden_bytes * 8 / profile.link_bits_per_s)
    layer_s = profile.main_layer_s + 2 * way_s + max(min(s.expert_s for s in seats), top_k * compute_s)
    return 1 / (layout.model.layers * (layer_s + max(missing * load_s, min(missing, 1.0) * slowest)))


def profile_of(base: Profile, layout: Layout) -> Profile:
    """The base profile's times for this model, with the main node, the shadow and the first worker of the layout."""
    model, main, first = layout.model, layout.main, layout.seats[0]
    shadow_rate = layout.shadow.machine.rate(layout.shadow.on_gpu) if layout.shadow else main.machine.memory
    known = _at_rates(base, main.machine.rate(main.on_gpu), first.place.machine.rate(first.place.on_gpu), shadow_rate)
    alone = len(layout.machines) == 1
    link = min(one.link for one in layout.machines)
    hardware = Hardware(known, len(layout.seats), None, first.load_rate, link)
    found = scale_profile(Setup(model, hardware, Policy(layout.scheme)))
    read_less = 0 if main.on_gpu else model.dense_saved  # on a processor --kernel fast reads the numbers as they are
    main_s = found.main_layer_s - read_less / model.layers / main.machine.memory
    found = replace(found, main_layer_s=max(main_s, 0.0), expert_s=_expert_s(found.expert_s, model, first.place))
    return replace(found, hop_s=0.0, link_bits_per_s=math.inf) if alone else found


def _own_times(base: Profile, layout: Layout) -> tuple[OwnTimes, ...]:
    times: dict[tuple[Machine, bool, float], OwnTimes] = {}
    found = []
    for seat in layout.seats:
        kind = (replace(seat.place.machine, name=""), seat.place.on_gpu, seat.load_rate)
        if kind not in times:
            one = profile_of(base, replace(layout, seats=(seat,)))
            times[kind] = OwnTimes(seat.slots, one.load_s, one.expert_s)
        found.append(_of_seat(times[kind], seat, layout))
    return tuple(found)


def _of_seat(times: OwnTimes, seat: Seat, layout: Layout) -> OwnTimes:
    """With its slots. An expert for a GPU that is not in host memory is read to there first."""
    part = layout.parts.get(seat.place.machine.name)
    times = times._replace(slots=seat.slots, part=part)
    if not seat.place.on_gpu or seat.host_slots >= (layout.experts if part is None else part):
        return times
    disk_s = layout.model.expert_bytes / seat.place.machine.disk
    return times._replace(host_slots=seat.host_slots, disk_load_s=disk_s)


def _expert_s(scaled_s: float, model: ModelSize, place: Place) -> float:
    """On a processor `--kernel fast` multiplies the numbers as they are: nothing is restored."""
    return scaled_s if place.on_gpu else scaled_s - 2 * model.restored_bytes / place.machine.memory


def _at_rates(base: Profile, main: float, worker: float, shadow: float) -> Profile:
    """The base profile with memories of other rates; what does not move bytes takes as long."""
    if base.model_sizes is None or base.device_rates is None:
        return base  # `scale_profile` says what it lacks
    expert, _, dense, copy = base.model_sizes
    was = base.device_rates

    def at(seconds: float, nbytes: int, before: float, now: float) -> float:
        return max(0.0, seconds - nbytes / before) + nbytes / now

    return replace(
        base,
        device_rates=(main, worker, shadow),
        main_layer_s=at(base.main_layer_s, dense, was[0], main),
        expert_s=at(base.expert_s, expert, was[1], worker),
        shadow_layer_s=at(base.shadow_layer_s, copy, was[2], shadow),
    )
