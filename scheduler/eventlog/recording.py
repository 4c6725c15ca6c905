"""A recording of the scheduler's events, their times, and its commands. `scheduler.eventlog.replay` feeds the events to
a new scheduler and compares; `scheduler.simulation.recorded_routes` simulates the routes and predictions of the run.

The file is msgpack, one object after another: a head {format, version, about, core}; for each event an array
[now, event, [command, ...]], with events and commands as [name, field, ...] in the order of `scheduler.types`; and at
the end the number of events, without which the file is truncated. `now`: seconds on the main node's clock, never
falling.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgpack

from scheduler import types as t
from scheduler.alignment import ALL_ROWS, Alignment
from scheduler.build import make_core
from scheduler.errors import ConfigError
from scheduler.limits import MAX_COUNT, MAX_EXPERTS
from scheduler.one_line import one_line
from scheduler.policies.precision import FORMS
from scheduler.policies.registry import CHOICES
from scheduler.policies.system_config import CoreConfig, SystemConfig

FORMAT, VERSION = "odmoe recording", 9
LIMIT_BYTES = 256 << 20
"""Largest recording. Beyond this size no more events are kept, and `Recorder.take` raises an error."""
_MAX_ITEMS, _MAX_TEXT = 1 << 20, 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """`about`: a description of the run, for people. `events`: (now, event). `commands`: those that followed each
    event. `foreign`: what the run's system had and this odmoe has not, such as `--residency mine`: routes can be read
    without it, decisions not replayed."""

    about: dict[str, Any]
    core_config: CoreConfig
    events: list[tuple[float, t.Event]]
    commands: list[list[t.Command]]
    foreign: tuple[str, ...] = ()


class Recorder:
    """Keeps every event and its commands, from a scheduler's first event on. `on_handled` is for one thread at a time,
    `take` for any thread."""

    def __init__(self, about: dict[str, Any], core_config: CoreConfig) -> None:
        core = dataclasses.asdict(core_config)
        self._head = msgpack.packb({"format": FORMAT, "version": VERSION, "about": about, "core": core})
        self._parts: list[bytes] = []
        self._bytes = 0

    def on_handled(self, event: t.Event, now: float, commands: list[t.Command]) -> None:
        """An event, its time, and the commands that followed."""
        if self._bytes <= LIMIT_BYTES:
            self._parts.append(msgpack.packb((now, _row(event), [_row(command) for command in commands])))
            self._bytes += len(self._parts[-1])

    def take(self) -> bytes:
        """The file's bytes so far; events are kept. Raises ConfigError if the recording became too large."""
        if self._bytes > LIMIT_BYTES:
            raise ConfigError(
                f"the recording has outgrown {LIMIT_BYTES >> 20} MiB after {len(self._parts)} events and is "
                f"incomplete; "
                "record fewer tokens, on nodes that were started for it"
            )
        parts = self._parts.copy()
        return b"".join((self._head, *parts, msgpack.packb(len(parts))))


def read_recording(path: Path) -> Recording:
    """Raises ConfigError naming the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            unpacker = msgpack.Unpacker(
                file,
                use_list=False,
                max_buffer_size=64 << 20,
                max_array_len=_MAX_ITEMS,
                max_str_len=_MAX_TEXT,
                max_map_len=1024,
                max_bin_len=0,
                max_ext_len=0,
            )
            return _read(_objects(unpacker))
    except OSError as error:
        raise ConfigError(f"recording {path} cannot be read: {error.strerror or error}; check the path") from error
    except _VersionError as error:
        raise ConfigError(f"recording {path} {error}; record the run again: odmoe generate --record FILE") from error
    except _WrongError as error:
        made = "make one with odmoe generate --record FILE"
        raise ConfigError(f"{path} is not a recording: {error}; {made}") from error


class _WrongError(Exception):
    """What is wrong with a file."""


class _VersionError(Exception):
    """A recording of another version of the format."""


def _objects(unpacker: Any) -> Iterator[Any]:
    """Every complete object, one after another. Raises _WrongError for bytes that are not msgpack."""
    while True:
        try:
            yield unpacker.unpack()
        except msgpack.OutOfData:
            return
        except (msgpack.UnpackException, ValueError, TypeError) as error:
            raise _WrongError(f"it is not msgpack, or damaged ({error or type(error).__name__})") from error


def _read(objects: Iterator[Any]) -> Recording:
    about, core_config, foreign = _read_head(next(objects, None))
    events: list[tuple[float, t.Event]] = []
    commands: list[list[t.Command]] = []
    for row in objects:
        if type(row) is int:
            _check_end(row, len(events), next(objects, None))
            return Recording(about, core_config, events, commands, foreign)
        try:
            now, event, followed = row
            if type(now) is not float or not math.isfinite(now) or (events and now < events[-1][0]):
                raise _WrongError(f"its time is {now!r}, after {events[-1][0] if events else 'nothing'}")
            events.append((now, _fact(event, _EVENTS, core_config.shape)))
            commands.append([_fact(command, _COMMANDS, core_config.shape) for command in _tuple(followed)])
        except (_WrongError, TypeError, ValueError) as error:
            raise _WrongError(f"event {len(events)} of it: {error}") from error
    raise _WrongError(f"it is truncated after {len(events)} events")


def _check_end(declared: int, found: int, beyond: Any) -> None:
    if declared != found:
        raise _WrongError(f"it declares {declared} events but has {found}")
    if beyond is not None:
        raise _WrongError("there is data after its end")


def _read_head(head: Any) -> tuple[dict[str, Any], CoreConfig, tuple[str, ...]]:
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise _WrongError("its head is not that of a recording" if head is not None else "it is empty or truncated")
    if head.get("version") != VERSION:
        raise _VersionError(f"has version {head.get('version')!r}, but this odmoe reads version {VERSION}")
    about, core = head.get("about"), head.get("core")
    if not isinstance(about, dict) or not isinstance(core, dict):
        raise _WrongError("its head does not describe the run")
    try:
        shape = _build(t.ModelShape, core["shape"])
        if not _possible(shape):  # before a scheduler allocates state for it
            raise _WrongError(f"no model has the shape {shape!r:.200}")
        alignment = _build(Alignment, {"kv_rows": ALL_ROWS, "state_period": None} | core["alignment"])
        system, foreign = _system(core["system"])
        core_config = _build(CoreConfig, core | {"shape": shape, "alignment": alignment, "system": system})
        make_core(dataclasses.replace(core_config, system=SystemConfig()) if foreign else core_config)
    except (_WrongError, KeyError, TypeError, ValueError, ConfigError) as error:
        raise _WrongError(f"its head does not describe a valid scheduler ({error})") from error
    return about, core_config, foreign


def _system(recorded: Any) -> tuple[SystemConfig, tuple[str, ...]]:
    """The system, and what of it this odmoe does not have: policies and numbers come and go. What was not recorded has
    its default. Raises _WrongError."""
    if not isinstance(recorded, dict) or not all(isinstance(name, str) for name in recorded):
        raise _WrongError(f"its system is {recorded!r:.200}")
    defaults = dataclasses.asdict(SystemConfig())
    known = {name: recorded.get(name, default) for name, default in defaults.items()}
    system = _build(SystemConfig, known)
    foreign = [f"--{name} {known[name]}" for name, names in CHOICES.items() if known[name] not in names]
    foreign += [f"{name} {value}" for name, value in recorded.items() if name not in known and value is not None]
    return system, tuple(one_line(one) for one in foreign)


def _possible(shape: t.ModelShape) -> bool:
    layers, counts = shape.layers, shape.by_layer or (shape.experts,)
    return (
        0 < len(layers)
        and list(layers) == sorted(set(layers))
        and len(counts) in (1, len(layers))
        and 1 <= min(counts)
        and max(counts) <= shape.experts <= MAX_EXPERTS
        and 1 <= shape.top_k <= shape.experts
        and len(layers) * shape.experts <= _MAX_ITEMS
    )


# --- values -----------------------------------------------------------------------------------------------------


def _type_check(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise _WrongError(f"{value!r} where {kind.__name__} is expected")
        return value

    return check


def _tuple(value: Any) -> tuple[Any, ...]:
    if type(value) is not tuple:
        raise _WrongError(f"{value!r} where an array is expected")
    return value


def _several(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: tuple([check(item) for item in _tuple(value)])


def _tuple_check(kind: Callable[..., Any], *checks: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if len(_tuple(value)) != len(checks):
            raise _WrongError(f"{value!r} where {len(checks)} values are expected")
        return kind(*[one(item) for one, item in zip(checks, value, strict=True)])

    return check


def _or_none(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _finite(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise _WrongError(f"{value!r} where a number is expected")
    return value


def _form(value: Any) -> str:
    if value not in FORMS:
        raise _WrongError(f"{value!r} where one of {', '.join(map(repr, FORMS))} is expected")
    return str(value)


_int = _type_check(int)
_OF_TYPE: dict[Any, Callable[[Any], Any]] = {
    int: _int,
    int | None: _or_none(_int),
    float: _finite,
    str: _type_check(str),
    bool: _type_check(bool),
    bool | None: _or_none(_type_check(bool)),
    t.Visit: _tuple_check(t.Visit, _int, _int, _int),
    t.ExpertId: _tuple_check(t.ExpertId, _int, _int),
    tuple[int, ...]: _several(_int),
    tuple[t.Pass, ...]: _several(_tuple_check(t.Pass, _int, _int, _int, _type_check(bool))),
    tuple[t.HeldRange, ...] | None: _or_none(_several(_tuple_check(t.HeldRange, _int, _int, _int))),
    tuple[t.FormCost, ...]: _several(_tuple_check(t.FormCost, _form, _finite, _finite, _type_check(bool))),
    Alignment: _type_check(Alignment),
    t.ModelShape: _type_check(t.ModelShape),
    float | None: _or_none(_finite),
    SystemConfig: _type_check(SystemConfig),
    tuple[tuple[int, int], ...]: _several(_tuple_check(lambda *pair: pair, _int, _int)),
    tuple[tuple[int, ...], ...]: _several(_several(_int)),
    tuple[tuple[float, ...], ...]: _several(_several(_finite)),
}


def _build(cls: Any, fields: dict[str, Any]) -> Any:
    """A dataclass from the values of all its fields, each checked for its type. Raises _WrongError, KeyError,
    TypeError, ConfigError."""
    hints = get_type_hints(cls)
    if not isinstance(fields, dict) or fields.keys() != hints.keys():
        raise _WrongError(f"{cls.__name__} has {', '.join(hints)}, and this is {fields!r:.200}")
    return cls(**{name: _OF_TYPE[hints[name]](value) for name, value in fields.items()})


def _forms(union: Any) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """name -> (class, function that makes an instance from its fields). Fields that were added since a recording was
    made are not in its rows, and have their defaults."""
    found = {}
    for cls in get_args(union):
        checks = [_OF_TYPE[kind] for kind in get_type_hints(cls).values()]
        defaults = [one.default for one in dataclasses.fields(cls) if one.default is not dataclasses.MISSING]
        found[cls.__name__] = (cls, _fact_check(cls, checks, defaults))
    return found


def _fact_check(cls: Any, checks: list[Callable[[Any], Any]], defaults: list[Any]) -> Callable[[Any], Any]:
    whole = _tuple_check(cls, *checks)

    def check(values: Any) -> Any:
        missing = len(checks) - len(_tuple(values))
        return whole((*values, *defaults[-missing:]) if 0 < missing <= len(defaults) else values)

    return check


_EVENTS, _COMMANDS = _forms(t.Event), _forms(t.Command)
_FIELDS = {
    cls: [attrgetter(field.name) for field in dataclasses.fields(cls)] for cls, _ in (_EVENTS | _COMMANDS).values()
}


def _row(fact: t.Event | t.Command) -> list[Any]:
    kind = type(fact)
    return [kind.__name__, *[read(fact) for read in _FIELDS[kind]]]


def _fact(row: Any, forms: dict[str, tuple[Any, Callable[[Any], Any]]], shape: t.ModelShape) -> Any:
    """The event or command of a row. Raises _WrongError."""
    name, *fields = _tuple(row) or (None,)
    if name not in forms:
        raise _WrongError(f"{name!r} is not an event or a command; known: {', '.join(forms)}")
    fact = forms[name][1](tuple(fields))
    layers, experts = _layers_and_experts(fact)
    if not set(layers) <= set(shape.layers) or not all(0 <= expert < shape.experts for expert in experts):
        raise _WrongError(f"{fact} names a layer or an expert that the model does not have")
    if not all(0 <= count <= MAX_COUNT for count in _counts(fact)):
        raise _WrongError(f"{fact} has a number out of range")
    return fact


def _layers_and_experts(fact: Any) -> tuple[list[int], list[int]]:
    """Layers and experts that an event or a command names."""
    if isinstance(fact, t.Predicted):
        return [fact.layer], list(fact.experts)
    if isinstance(fact, t.GateFired):
        return [fact.visit.layer], [*(expert for expert, _ in fact.rows), *(e for row in fact.chosen for e in row)]
    if isinstance(fact, t.Foreseen):
        return [fact.layer], []
    if isinstance(fact, t.Route):
        return [fact.visit.layer], [*(expert for row in fact.experts for expert in row), *fact.resident]
    if isinstance(fact, t.WorkerJoined | t.HoldingsChanged):
        held = fact.held or ()
        return [one.layer for one in held], [end for one in held for end in (one.first, one.last)]
    if isinstance(fact, t.Load | t.Evict | t.Compute | t.AuditRequested):
        return [fact.expert.layer], [fact.expert.expert]
    return [], []


def _counts(fact: Any) -> list[int]:
    """The numbers of an event or a command that must not be huge: tokens, rows, slots."""
    counts = [
        getattr(fact, name, 0)
        for name in ("slots", "host_slots", "prompt_tokens", "position", "tokens", "index", "step")
    ]
    if isinstance(fact, t.GateFired):
        counts += [fact.visit.position, *(rows for _, rows in fact.rows)]
    if isinstance(fact, t.AuditRequested):
        counts.append(fact.rows)
    if isinstance(fact, t.StepStarted):
        counts += [number for one in fact.passes for number in (one.position, one.tokens)]
    return counts
