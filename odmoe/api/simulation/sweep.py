"""Several systems over memories, load times, host times and batches: a simulation for each point."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from odmoe.api.simulation.figures import MissShares, figures_of
from odmoe.api.simulation.scenarios import Run, runs_of
from odmoe.settings.simulate_settings import SimulateSettings
from odmoe.settings.sweep_settings import SweepSettings
from odmoe.settings.system_settings import CHOSEN
from odmoe.settings.units import parse_memory
from scheduler.errors import ConfigError
from scheduler.files import write_whole
from scheduler.planning.scaling import Each
from scheduler.policies.registry import RESIDENCIES, bounds, is_exact, keeps_all
from scheduler.policies.systems import SYSTEMS
from scheduler.simulation.simulate import simulate_requests
from scheduler.timing.profile import Profile, find_profile
from scheduler.unknown_names import unknown

VERSION = 1
"""Of the file."""
PROFILE = "rtx3090-pcie3"
"""One machine with a host, unless --profile says otherwise."""
_PERFECT = {"predictor": "perfect", "residency": "belady"}
PERFECT = {"perfect": _PERFECT, "perfect-host": _PERFECT | {"placement": "balance"}}
"""Names in comparisons: perfect prefetch with Belady's eviction, without a host that computes and with one."""
COMPARED = (
    *("on-demand", "lrfu", "lrfu-prefetch", "importance+alpha=0", "smoe", "fate+precision=full", "hybrimoe"),
    *("ktransformers", "static"),
)
"""Of a map: in their exact forms."""
MEMORIES = ("10%", "25%", "50%")
TIMES, BATCHES = (0.25, 1.0, 4.0), (1, 4)
"""Of a map: multiples of the profile's load and host, and requests at once."""
MAX_POINTS = 4096
"""A point takes about a second."""


class Axes(NamedTuple):
    """All values. Times in seconds."""

    systems: tuple[str, ...]
    memories: tuple[str, ...]
    loads: tuple[float, ...]
    hosts: tuple[float | None, ...]
    batches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation, and its figures. Times in milliseconds, figures of decoding."""

    system: str
    device_memory: str
    slots: int
    """Of all workers, as simulated."""
    load_ms: float
    host_ms: float | None
    batch: int
    tokens_per_s: float
    ttft_s: float
    loads_a_token: float
    misses_a_token: float | None
    working_set_misses_a_token: float | None
    policy_misses_a_token: float | None
    bound: bool
    """It knows the routes to come, so nobody can build it."""
    exact: bool


class Place(NamedTuple):
    """One value of each axis."""

    system: str
    memory: str
    load_s: float
    host_s: float | None
    batch: int


class Task(NamedTuple):
    """One simulation: settings of `odmoe simulate`, times of the profile, and requests at once."""

    flags: tuple[tuple[str, Any], ...]
    load_s: float
    host_s: float | None
    batch: int


class _Figures(NamedTuple):
    slots: int
    tokens_per_s: float
    ttft_s: float
    loads_a_token: float
    misses: MissShares | None
    is_bound: bool
    exact: bool


def axes_of(given: SimulateSettings, asked: SweepSettings) -> tuple[Profile, Axes]:
    """The profile too. Raises ConfigError for an unknown system, and for too many points."""
    profile = find_profile(given.profile if given.is_given("profile") else PROFILE)
    if given.tokens < 2:
        raise ConfigError(f"--tokens is {given.tokens}; a comparison is of decoding; allowed: 2 or more")
    usual = COMPARED if asked.map else (given.system,)
    systems = tuple(dict.fromkeys(asked.compare or usual))
    for name in systems:
        _settings_named(name)
    if asked.host_ms and profile.host_s is None:
        raise ConfigError(f"--host-ms is given, and profile {profile.name} has no host; give --profile {PROFILE}")
    times = TIMES if asked.map else (1.0,)
    hosts: tuple[float | None, ...] = tuple(one / 1e3 for one in asked.host_ms)
    if not hosts:
        hosts = tuple(profile.host_s * one for one in times) if profile.host_s is not None else (None,)
    loads = tuple(one / 1e3 for one in asked.load_ms) or tuple(profile.load_s * one for one in times)
    axes = Axes(systems, asked.device_memory or MEMORIES, loads, hosts, asked.batch or (BATCHES if asked.map else (1,)))
    count = len(list(itertools.product(*axes)))
    if count > MAX_POINTS:
        raise ConfigError(f"the sweep has {count} points; allowed: {MAX_POINTS}; give fewer values")
    return profile, axes


def sweep(
    given: SimulateSettings,
    asked: SweepSettings,
    each: Each = map,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Point]:
    """`each`: applies a function to the tasks. Points that a system does not tell apart are simulated once.
    `progress`: how many simulations of all are done. Raises ConfigError."""
    profile, axes = axes_of(given, asked)
    places = [Place(*values) for values in itertools.product(*axes)]
    experts = _experts(given, profile)
    tasks = [_task(given, profile, experts, place) for place in places]
    different = list(dict.fromkeys(tasks))
    found: dict[Task, _Figures] = {}
    for task, figures in zip(different, each(_simulate, different), strict=True):
        found[task] = figures
        progress(len(found), len(different))
    return [_point(place, found[task]) for place, task in zip(places, tasks, strict=True)]


def _experts(given: SimulateSettings, profile: Profile) -> int:
    """Of all layers together."""
    if given.routes is None:
        return (given.layers or profile.layers) * (given.experts or profile.experts)
    shape = runs_of(SimulateSettings(routes=given.routes, profile=profile.name))[0].scenario.shape
    return len(shape.layers) * shape.experts


def _settings_named(name: str) -> dict[str, Any]:
    """The settings that a name of a comparison stands for: a preset, or on-demand loading with a residency, and
    changes to it: `importance+alpha=0`. Raises ConfigError."""
    base, *changes = name.split("+")
    if base in SYSTEMS:
        found = {"system": base}
    elif base in PERFECT:
        found = {"system": "on-demand"} | PERFECT[base]
    elif base in RESIDENCIES:
        found = {"system": "on-demand", "residency": base}
    else:
        raise ConfigError(unknown("--compare", base, [*SYSTEMS, *RESIDENCIES, *PERFECT], "odmoe systems"))
    for change in changes:
        field, equals, value = change.partition("=")
        if field not in CHOSEN or not equals:
            raise ConfigError(f"--compare is {name}; allowed after +: FIELD=VALUE, with {', '.join(CHOSEN)}")
        found[field] = value
    return found


def _slots(memory: str, experts: int) -> int:
    """Raises ConfigError for bytes: a simulation knows no size of an expert."""
    if not memory.strip().endswith("%"):
        raise ConfigError(f"--device-memory is {memory}; allowed in simulations: shares of all experts, such as 25%")
    return max(1, parse_memory(memory, experts))


def _task(given: SimulateSettings, profile: Profile, experts: int, place: Place) -> Task:
    """What a system does not read is left as it is, so that its points are one task. Raises ConfigError for one that
    keeps all experts, in less memory."""
    named = {name: getattr(given, name) for name in given.model_fields_set}
    flags = {"workers": 1} | named | {"profile": profile.name} | _settings_named(place.system)
    chosen = replace(
        SYSTEMS[flags["system"]].config,
        **{name: getattr(SimulateSettings(**flags), name) for name in flags if name in CHOSEN},
    )
    if given.routes is None:
        flags["requests"] = place.batch
    elif place.batch > 1:
        flags["parallel"] = place.batch
    slots = _slots(place.memory, experts)
    if keeps_all(chosen):
        if slots < experts:
            raise ConfigError(
                f"--compare names {place.system}, which keeps every expert in a slot, and --device-memory is "
                f"{place.memory}; give --device-memory 100%, or leave {place.system} out"
            )
        flags.pop("slots", None)
    else:
        flags["slots"] = max(1, slots // int(flags["workers"])) if chosen.placement != "host" else 1
    return Task(
        tuple(sorted(flags.items())),
        profile.load_s if chosen.placement == "host" else place.load_s,
        profile.host_s if chosen.placement == "device" else place.host_s,
        place.batch,
    )


def _simulate(task: Task) -> _Figures:
    """In a process of its own."""
    given = SimulateSettings(**dict(task.flags))
    runs = [_retime(run, task.load_s, task.host_s) for run in _groups(runs_of(given), task.batch)]
    outcomes = [simulate_requests(run.scenario, run.arrivals, count_misses=True) for run in runs]
    found = figures_of(runs, outcomes, 1.0, given)
    if found.decode_tokens_per_s is None:
        raise ConfigError("a comparison is of decoding, and these answers have one token; give longer ones")
    return _Figures(
        found.slots * found.workers,
        found.decode_tokens_per_s,
        found.ttft_s,
        found.loads_a_token or 0.0,
        found.misses_a_token,
        bool(bounds(found.system_config)),
        is_exact(found.system_config),
    )


def _groups(runs: list[Run], batch: int) -> list[Run]:
    """Of recorded requests that are all to be answered together: as many at a time. Raises ConfigError."""
    if batch == 1 or len(runs[0].arrivals) == batch:
        return runs
    (run,) = runs
    if len(run.arrivals) < batch:
        raise ConfigError(f"--batch is {batch}; allowed: 1 to {len(run.arrivals)}, as --routes has so many requests")
    starts = range(0, len(run.arrivals) - batch + 1, batch)
    return [replace(run, arrivals=run.arrivals[start : start + batch], measured=None) for start in starts]


def _retime(run: Run, load_s: float, host_s: float | None) -> Run:
    """With other times of a load, in as many pieces, and of an expert on the host."""
    profile = run.scenario.profile
    piece_s = profile.load_piece_s * load_s / profile.load_s if profile.load_s else 0.0
    return replace(
        run,
        scenario=replace(
            run.scenario, profile=replace(profile, load_s=load_s, load_piece_s=piece_s, host_s=host_s, fits=())
        ),
    )


def _point(place: Place, figures: _Figures) -> Point:
    total, working_set, policy = figures.misses or (None, None, None)
    return Point(
        place.system,
        place.memory,
        figures.slots,
        place.load_s * 1e3,
        None if place.host_s is None else place.host_s * 1e3,
        place.batch,
        figures.tokens_per_s,
        figures.ttft_s,
        figures.loads_a_token,
        total,
        working_set,
        policy,
        figures.is_bound,
        figures.exact,
    )


def as_json(points: Iterable[Point], given: SimulateSettings) -> dict[str, Any]:
    """What --json prints, and FILE.json has."""
    settings = {name: getattr(given, name) for name in sorted(given.model_fields_set)}
    return {"version": VERSION, "settings": settings, "points": [asdict(one) for one in points]}


def write(file: Path, points: Sequence[Point], given: SimulateSettings) -> None:
    """FILE.csv, or FILE.json. Raises ConfigError if it cannot be written."""
    if file.suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(Point)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(one) for one in points)
        data = text.getvalue()
    else:
        data = json.dumps(as_json(points, given), indent=1) + "\n"
    try:
        write_whole(file, data.encode())
    except OSError as error:
        raise ConfigError(f"--output {file} cannot be written: {error.strerror or error}") from error
