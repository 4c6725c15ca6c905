"""What was recorded is read back as it was, replayed to the same commands, and refused by name where it is damaged."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.build import make_core
from scheduler.core.machine import Core
from scheduler.core.slots import SlotTable
from scheduler.core.state import Demand
from scheduler.errors import ConfigError
from scheduler.eventlog import recording as module
from scheduler.eventlog.recording import FORMAT, VERSION, Recorder, Recording, read_recording
from scheduler.eventlog.replay import replay
from scheduler.files import write_whole
from scheduler.policies.system_config import CoreConfig, SystemConfig
from scheduler.simulation.recorded_routes import recorded_groups, recorded_workloads
from scheduler.simulation.requests import Arrival, random_arrivals
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import Outcome, simulate, simulate_requests
from scheduler.simulation.world import World
from scheduler.timing.profile import Profile
from support.scheduling.scenarios import core_config_of, scenario_of

PROFILE = Profile(
    name="small",
    layers=4,
    experts=4,
    top_k=2,
    hidden_bytes=100,
    kv_bytes=10,
    workers=4,
    group_size=2,
    main_layer_s=4e-3,
    expert_s=2e-3,
    expert_extra_s=1e-5,
    load_s=20e-3,
    hop_s=1e-3,
    link_bits_per_s=1e9,
    shadow_layer_s=2e-3,
)
SHAPE = t.ModelShape(layers=(1, 2, 5), experts=4, top_k=2, hidden=8, context=100, by_layer=(4, 3, 4))
CORE = CoreConfig(SHAPE, 2, Alignment(1, 2), 16)


def watched(recorder: Recorder, config: CoreConfig) -> Core:
    """A core that tells a recorder, as the engine does."""
    core = make_core(config)
    handle = core.handle

    def tell(event: t.Event, now: float) -> list[t.Command]:
        commands = handle(event, now)
        recorder.on_handled(event, now, commands)
        return commands

    core.handle = tell  # type: ignore[method-assign]
    return core


def recorded(scenario: Scenario, recall: float | None = 0.8) -> tuple[Recorder, Outcome]:
    """A simulated run, and its log."""
    recorder = Recorder({"model": "none"}, scenario.core_config)
    arrivals = random_arrivals(scenario, recall, 3)
    world = World(watched(recorder, scenario.core_config), scenario, arrivals)
    world.start()
    assert world.run(scenario.tokens * scenario.requests)
    world.drain()
    return recorder, simulate_requests(scenario, arrivals)


def read(tmp_path: Path, data: bytes) -> Recording:
    file = tmp_path / "log"
    file.write_bytes(data)
    return read_recording(file)


# --- the whole way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"alignment": Alignment(0, 0), "slots": 2},
        {"predictor": "random"},
        {"predictor": "none", "prefill": "in-turn", "mini_batch": 3},
        {"predictor": "none", "residency": "all", "slots": 4},
        {"residency": "lru", "slots": 3, "prefill": "pipelined"},
        {"predictor": "path", "residency": "arc", "slots": 2, "prefill": "pipelined"},
    ],
)
def test_a_log_replays_to_the_same_commands(tmp_path: Path, said: dict[str, Any]) -> None:
    recorder, _ = recorded(scenario_of(PROFILE, tokens=5, **said))
    found = read(tmp_path, recorder.take())
    done = replay(found, validate=True)
    assert done.difference is None
    assert done.events == len(found.events) > 90
    assert done.commands == sum(map(len, found.commands)) > 50
    assert str(done) == f"{done.events} events, {done.commands} commands: identical, in order"


def test_another_scheduler_is_told_apart(tmp_path: Path) -> None:
    """The first difference is named: an event, which of its commands, and both of them."""
    recorder, _ = recorded(Scenario(PROFILE, tokens=5))
    found = read(tmp_path, recorder.take())
    at = next(n for n, commands in enumerate(found.commands) if len(commands) > 1)
    for change in (
        lambda commands: commands[:-1],
        lambda commands: [*commands, t.Unfollow(1)],
        lambda commands: commands[::-1],
    ):
        changed = [change(c) if n == at else c for n, c in enumerate(found.commands)]
        done = replay(Recording(found.about, found.core_config, found.events, changed))
        assert done.difference is not None
        assert f"event {at + 1}, {type(found.events[at][1]).__name__}(" in done.difference
        assert done.commands == sum(map(len, found.commands[:at])) + min(
            n for n, (a, b) in enumerate(itertools.zip_longest(changed[at], found.commands[at])) if a != b
        )
    other = CoreConfig(found.core_config.shape, 3, found.core_config.alignment)
    assert replay(Recording(found.about, other, found.events, found.commands)).difference is not None


def test_books_that_contradict_each_other_are_told_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect that changes no command of this run: a worker's backlog is never counted down."""
    recorder, _ = recorded(Scenario(PROFILE, tokens=5))
    found = read(tmp_path, recorder.take())
    computed = SlotTable.on_computed

    def miscount(self: SlotTable, demand: Demand) -> None:
        worker = self._state.workers[demand.worker]
        computed(self, demand)
        worker.backlog += 1

    monkeypatch.setattr(SlotTable, "on_computed", miscount)
    assert replay(found).difference is None
    said = replay(found, validate=True).difference
    assert said is not None
    assert re.match(
        r"after event \d+, ComputeEnded\(.*\), the scheduler's books contradict each other: worker \d: ", said
    )


def test_a_log_that_cannot_have_happened_is_named() -> None:
    events: list[tuple[float, t.Event]] = [(0.0, t.TokenDecoded(1, 0)), (1.0, t.WorkerJoined(0, -1))]
    with pytest.raises(ConfigError, match=r"event 2 of the recording|-1 slots"):
        replay(Recording({}, CORE, events, [[], []]))


def test_a_load_that_takes_next_to_no_time_is_named_and_no_traceback() -> None:
    """As many loads a layer as no integer counts: Fate's budget."""
    config = core_config_of(t.ModelShape((0, 1), 4, 2), 2, predictor="cross-layer")
    facts: list[t.Event] = [t.WorkerJoined(0, 4, 1e-320), t.RequestOpened(1, 1)]
    facts += [t.StepStarted((t.Pass(1, 0, 1, True),)), t.TokenDecoded(1, 0), t.StepStarted((t.Pass(1, 1, 1, False),))]
    facts += [t.GateFired(t.Visit(1, 1, layer), ((0, 1),)) for layer in (0, 1)]
    facts += [t.TokenDecoded(1, 1), t.StepStarted((t.Pass(1, 2, 1, False),))]
    core = make_core(config)
    log = [(float(now), fact) for now, fact in enumerate(facts)]
    said = [core.handle(fact, now) for now, fact in log[:-1]]
    with pytest.raises(ConfigError, match=r"event 9 of the recording, StepStarted.* cannot have happened"):
        replay(Recording({}, config, log, [*said, []]))


@pytest.mark.parametrize("alignment", [Alignment(1, 1), Alignment(0, 0)])
def test_recorded_routes_simulate_to_the_same_times(tmp_path: Path, alignment: Alignment) -> None:
    """The simulator's own log, on the same profile: nothing may be lost on the way."""
    scenario = Scenario(PROFILE, tokens=6, alignment=alignment)
    recorder, outcome = recorded(scenario)
    [workload] = recorded_workloads(read(tmp_path, recorder.take()))
    again = simulate(scenario, workload)
    assert (again.ttft_s, again.token_s, again.where) == (outcome.ttft_s, outcome.token_s, outcome.where)
    assert (workload.number, workload.prompt_tokens, workload.tokens) == (1, 16, 6)
    assert workload.ttft_s == pytest.approx(outcome.ttft_s)
    assert workload.decode_tokens_per_s == pytest.approx(outcome.decode_tokens_per_s)


@pytest.mark.parametrize("said", [{}, {"arrivals": (0.0, 0.0, 0.3)}, {"prefill_chunk": 20}, {"batch_dense": True}])
def test_recorded_requests_are_simulated_together_as_they_were(tmp_path: Path, said: dict[str, Any]) -> None:
    """The simulator's own log of requests that shared steps: they join the same steps again, with the same chunks."""
    scenario = scenario_of(PROFILE, tokens=5, requests=3, prompt_tokens=30, predictor="none", **said)
    recorder, outcome = recorded(scenario, None)
    recording = read(tmp_path, recorder.take())
    assert replay(recording).difference is None
    [group] = recorded_groups(recorded_workloads(recording))
    arrivals = [Arrival(one, one.prompt_tokens, one.tokens, step=one.step) for one in group]
    again = simulate_requests(scenario, arrivals)
    assert [one.token_s[-1] - one.ttft_s for one in again.answers] == pytest.approx(
        [one.token_s[-1] - one.ttft_s for one in outcome.answers]
    )
    assert (again.where, again.union) == (pytest.approx(outcome.where), outcome.union)


def test_requests_that_shared_no_step_are_apart(tmp_path: Path) -> None:
    recorder, _ = recorded(Scenario(PROFILE, tokens=3, requests=3, arrivals=(0.0, 0.0, 500.0)))
    groups = recorded_groups(recorded_workloads(read(tmp_path, recorder.take())))
    assert [[one.number for one in group] for group in groups] == [[1, 2], [3]]
    assert [[one.step for one in group] for group in groups] == [[0, 0], [0]]


def test_requests_that_were_open_at_once_are_told_apart(tmp_path: Path) -> None:
    """Two, of which the second is cut short in its second decode pass, and a third that never began."""
    core, recorder = make_core(CORE), Recorder({}, CORE)
    clock = itertools.count()

    def post(event: t.Event) -> None:
        """Whatever is asked for is done at once."""
        todo = [event]
        while todo:
            now, one = float(next(clock)), todo.pop(0)
            commands = list(core.handle(one, now))
            recorder.on_handled(one, now, commands)
            todo += [t.LoadEnded(c.load_id) for c in commands if isinstance(c, t.Load)]
            todo += [t.ComputeEnded(c.call_id) for c in commands if isinstance(c, t.Compute)]

    def gate(request: int, position: int, layer: int, rows: tuple[tuple[int, int], ...]) -> None:
        post(t.GateFired(t.Visit(request, position, layer), rows))

    for worker in range(2):
        post(t.WorkerJoined(worker, 1))
    for request in (1, 2, 3):
        post(t.RequestOpened(request, 10 * request))
    for request in (1, 2):
        post(t.StepStarted((t.Pass(request, 0, 10 * request, prefill=True),)))
        for layer in SHAPE.layers:
            gate(request, 0, layer, ((request, 10 * request),))
        post(t.TokenDecoded(request, 0))
    for position in (0, 1):
        for request in (1, 2):
            post(t.StepStarted((t.Pass(request, 10 * request + position, 1, prefill=False),)))
            post(t.Predicted(request, 10 * request + position, 2, (2, 1)))
            for layer in SHAPE.layers[: 2 if (request, position) == (2, 1) else 3]:
                gate(request, 10 * request + position, layer, ((request - 1, 1), (2, 1)))
    first, second = recorded_workloads(read(tmp_path, recorder.take()))
    assert (first.prompt_tokens, first.tokens, second.prompt_tokens, second.tokens) == (10, 3, 20, 2)
    assert [second.prompt(layer) for layer in range(3)] == [((2, 20),)] * 3
    assert (first.routes(1, 2), second.routes(0, 0)) == ((0, 2), (1, 2))
    assert (first.predict(1, 1), first.predict(1, 0), second.predict(1, 1)) == ((2, 1), None, None)


def test_audits_are_read_back_and_replayed(tmp_path: Path) -> None:
    core, recorder, expert = make_core(CORE), Recorder({}, CORE), t.ExpertId(5, 2)
    happened: list[t.Event] = [t.WorkerJoined(0, 1), t.WorkerJoined(1, 1)]
    happened += [t.AuditRequested(7, expert, 3, (0,)), t.AuditRequested(8, expert, 3, (0,))]
    happened += [t.LoadEnded(1), t.ComputeEnded(2)]
    for now, event in enumerate(happened):
        recorder.on_handled(event, float(now), core.handle(event, now))
    found = read(tmp_path, recorder.take())
    assert [event for _, event in found.events] == happened
    call = t.Compute(1, 0, expert, 2, t.Visit(-7, 0, 5), 0, 3, True)
    assert found.commands == [[], [], [t.Load(1, 0, expert, 1), call], [t.AuditDropped(8)], [], []]
    assert replay(found).difference is None


@pytest.mark.parametrize(
    ("audit", "says"),
    [
        (t.AuditRequested(1, t.ExpertId(5, 9), 3, ()), "names a layer or an expert that the model does not have"),
        (t.AuditRequested(1, t.ExpertId(3, 0), 3, ()), "names a layer or an expert that the model does not have"),
        (t.AuditRequested(1, t.ExpertId(5, 0), -1, ()), "has a number out of range"),
    ],
)
def test_an_audit_that_cannot_be_is_refused(tmp_path: Path, audit: t.AuditRequested, says: str) -> None:
    recorder = Recorder({}, CORE)
    recorder.on_handled(audit, 0.0, [])
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, recorder.take())


# --- the file ---------------------------------------------------------------------------------------------------

WORDS = st.text(max_size=8)
INTS = st.integers(0, module.MAX_COUNT)
FLOATS = st.floats(0, 1e6)
LAYERS, EXPERTS = st.sampled_from(SHAPE.layers), st.integers(0, SHAPE.experts - 1)
OF_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: INTS,
    str: WORDS,
    bool: st.booleans(),
    int | None: st.none() | INTS,
    bool | None: st.none() | st.booleans(),
    t.Visit: st.builds(t.Visit, INTS, INTS, LAYERS),
    t.ExpertId: st.builds(t.ExpertId, LAYERS, EXPERTS),
    tuple[int, ...]: st.lists(EXPERTS, max_size=4).map(tuple),
    tuple[t.Pass, ...]: st.lists(st.builds(t.Pass, INTS, INTS, INTS, st.booleans()), max_size=3).map(tuple),
    tuple[t.HeldRange, ...] | None: st.none()
    | st.lists(st.builds(t.HeldRange, LAYERS, EXPERTS, EXPERTS), max_size=3).map(tuple),
    tuple[t.FormCost, ...]: st.lists(
        st.builds(t.FormCost, st.sampled_from(["", "int4", "int2"]), FLOATS, FLOATS, st.booleans()), max_size=3
    ).map(tuple),
    tuple[tuple[int, int], ...]: st.lists(st.tuples(EXPERTS, INTS), max_size=4).map(tuple),
    float: FLOATS,
    tuple[tuple[int, ...], ...]: st.lists(st.lists(EXPERTS, max_size=3).map(tuple), max_size=3).map(tuple),
    tuple[tuple[float, ...], ...]: st.lists(st.lists(FLOATS, max_size=3).map(tuple), max_size=3).map(tuple),
}


def facts(union: Any) -> st.SearchStrategy[Any]:
    """Any of them, with any fields that this model can have."""
    made = []
    for cls in get_args(union):
        fields = {name: OF_TYPE[kind] for name, kind in get_type_hints(cls).items()}
        made.append(st.builds(cls, **(fields | ({"layer": LAYERS} if "layer" in fields else {}))))
    return st.one_of(made)


LOGS = st.lists(st.tuples(st.floats(0, 1e6), facts(t.Event), st.lists(facts(t.Command), max_size=3)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(log=LOGS)
def test_every_event_and_command_is_read_back(tmp_path_factory: pytest.TempPathFactory, log: list[Any]) -> None:
    log.sort(key=lambda row: row[0])
    recorder = Recorder({"model": "m", "workers": 2}, CORE)
    for now, event, commands in log:
        recorder.on_handled(event, now, commands)
    found = read(tmp_path_factory.mktemp("log"), recorder.take())
    assert found.about == {"model": "m", "workers": 2}
    assert found.core_config == CORE
    assert found.events == [(now, event) for now, event, _ in log]
    assert found.commands == [commands for _, _, commands in log]


@pytest.fixture(scope="module")
def log() -> bytes:
    return recorded(Scenario(PROFILE, tokens=2))[0].take()


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_log_that_is_cut_off_is_named(tmp_path_factory: pytest.TempPathFactory, log: bytes, data: Any) -> None:
    cut = data.draw(st.integers(0, len(log) - 1))
    with pytest.raises(ConfigError, match=r"is not a recording: .*(truncated|empty)"):
        read(tmp_path_factory.mktemp("log"), log[:cut])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_log_is_named_or_is_another(tmp_path_factory: pytest.TempPathFactory, log: bytes, data: Any) -> None:
    """Nothing but ConfigError comes out, from reading as from replaying and from taking its routes."""
    at, byte = data.draw(st.integers(0, len(log) - 1)), data.draw(st.integers(0, 255))
    try:
        found = read(tmp_path_factory.mktemp("log"), log[:at] + bytes([byte]) + log[at + 1 :])
        recorded_workloads(found)
        replay(found)
    except ConfigError:
        pass


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200))
def test_garbage_is_named(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    with pytest.raises(ConfigError, match="is not a recording"):
        read(tmp_path_factory.mktemp("log"), data)


def objects(log: bytes) -> list[Any]:
    unpacker = msgpack.Unpacker()
    unpacker.feed(log)
    return list(unpacker)


def packed(rows: list[Any]) -> bytes:
    return b"".join(msgpack.packb(row) for row in rows)


def changed(rows: list[Any], where: tuple[Any, ...], value: Any) -> list[Any]:
    part: Any = rows
    for step in where[:-1]:
        part = part[step]
    part[where[-1]] = value
    return rows


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        ((0, "format"), "odmoe trace", "its head is not that of a recording"),
        ((0, "version"), 2, "has version 2, but this odmoe reads version 9; record the run again: odmoe generate"),
        ((0, "about"), [], "does not describe the run"),
        ((0, "core", "group_size"), 0, "does not describe a valid scheduler .*group-size is 0"),
        ((0, "core", "system", "predictor"), 7, "does not describe a valid scheduler"),
        ((0, "core", "system"), [], "does not describe a valid scheduler"),
        ((0, "core", "alignment", "kv_period"), "1", "does not describe a valid scheduler"),
        ((0, "core", "shape", "layers"), [3, 1], "no model has the shape"),
        ((0, "core", "shape", "experts"), 1 << 40, "no model has the shape"),
        ((0, "core", "shape", "layers"), list(range(1 << 19)), "no model has the shape"),
        ((1, 0), "now", "event 0 of it: its time is 'now'"),
        ((1, 0), float("nan"), "event 0 of it: its time is nan"),
        ((3, 0), -5.0, "event 2 of it: its time is -5.0"),
        ((1, 1, 0), "WorkerBored", "'WorkerBored' is not an event or a command; known: WorkerJoined"),
        ((1, 1, 2), True, "True where int is expected"),
        ((1, 1), ["WorkerJoined", 0], "9 values are expected"),
        ((1, 1), ["WorkerJoined", 0, 1, float("inf"), 0.0, 0.0, []], "inf where a number is expected"),
        ((1, 1), ["WorkerJoined", 0, 1, 0.0, 0.0, 0.0, [["int3", 0.0, 0.0, True]]], "'int3' where one of '', 'int4'"),
        (
            (1, 1),
            ["WorkerJoined", 0, 1, 0.0, 0.0, 0.0, [], 0, 0.0, [[0, 0, 77]]],
            "a layer or an expert that the model does not",
        ),
        ((1, 2), [["Load", 0, 0, [77, 0], 1, ""]], "names a layer or an expert that the model does not have"),
        ((1, 2), {"a": 1}, "where an array is expected"),
        ((1,), 7, "declares 7 events but has 0"),
        ((-1,), 3, "declares 3 events"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, log: bytes, where: tuple[Any, ...], value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, packed(changed(objects(log), where, value)))


def test_a_recording_from_before_parts_is_read(tmp_path: Path, log: bytes) -> None:
    rows = objects(log)
    assert rows[1][1][0] == "WorkerJoined"
    assert rows[1][1].pop() is None
    assert read(tmp_path, packed(rows)).events == read(tmp_path, log).events


OLD_HEAD = bytes.fromhex("84a6666f726d6174af6f646d6f65207265636f7264696e67a776657273696f6e02a561626f757480a4636f726580")
"""{"format": "odmoe recording", "version": 2, "about": {}, "core": {}}"""


def test_a_recording_of_an_older_version_is_refused_by_name(tmp_path: Path) -> None:
    says = (
        f"recording {tmp_path / 'log'} has version 2, but this odmoe reads version 9; record the run again: "
        "odmoe generate --record FILE"
    )
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, OLD_HEAD)
    assert str(caught.value) == says


def test_a_recording_holds_its_system_in_one_place(log: bytes) -> None:
    head = objects(log)[0]
    assert (head["format"], head["version"]) == ("odmoe recording", 9)
    assert set(head["core"]) == {"shape", "group_size", "alignment", "mini_batch", "system"}
    assert SystemConfig(**head["core"]["system"]) == SystemConfig()


def test_a_recording_of_other_policies_is_read_and_not_replayed(tmp_path: Path, log: bytes) -> None:
    """A policy, and a number, of somebody's own; and a number that came since."""
    rows = objects(log)
    rows[0]["core"]["system"] |= {"residency": "mine", "threshold": 0.5, "unset": None}
    del rows[0]["core"]["system"]["prefetch"]
    own, foreign = read(tmp_path, log), read(tmp_path, packed(rows))
    assert own.foreign == ()
    assert foreign.foreign == ("--residency mine", "threshold 0.5")
    assert (foreign.events, foreign.commands) == (own.events, own.commands)
    (workload,), (same,) = recorded_workloads(foreign), recorded_workloads(own)
    assert (workload.prefill, workload.passes, workload.predictions) == (same.prefill, same.passes, same.predictions)
    with pytest.raises(ConfigError, match=r"with --residency mine, threshold 0.5, which is not here"):
        replay(foreign)


def test_a_whole_number_is_recorded_as_a_float(tmp_path: Path) -> None:
    """From Python, alpha may be 1."""
    core = CoreConfig(t.ModelShape((0,), 2, 1), 1, system=SystemConfig(router="skip", alpha=1))
    assert read(tmp_path, Recorder({}, core).take()).core_config.system.alpha == 1.0


def test_what_follows_the_end_is_refused(tmp_path: Path, log: bytes) -> None:
    with pytest.raises(ConfigError, match="there is data after its end"):
        read(tmp_path, log + b"\x01")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recording .*none cannot be read"):
        read_recording(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"recording [^ ]* cannot be read: Is a directory; check the path$"):
        read_recording(tmp_path)


def test_a_log_that_outgrows_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder({}, CORE)
    head = len(recorder.take())
    recorder.on_handled(t.RequestOpened(0, 10), 0.0, [])
    event_bytes = len(recorder.take()) - head
    monkeypatch.setattr(module, "LIMIT_BYTES", 1000)
    for number in range(1, 1000):
        recorder.on_handled(t.RequestOpened(number, 10), 0.0, [])
    with pytest.raises(ConfigError, match=r"outgrown 0 MiB after \d+ events") as caught:
        recorder.take()
    kept = int(str(caught.value).split(" events")[0].split()[-1])
    assert 1000 < kept * event_bytes < 2000


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "log"
    write_whole(file, b"old")
    with pytest.raises(TypeError):
        write_whole(file, "text")  # type: ignore[arg-type]
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (b"old", [file])
    with pytest.raises(OSError, match="none"):
        write_whole(tmp_path / "none" / "log", b"")


def test_rows_from_before_a_field_was_added_are_read_with_its_default(tmp_path: Path) -> None:
    head = {"format": FORMAT, "version": VERSION, "about": {}, "core": dataclasses.asdict(CORE)}
    rows = (0.0, ["WorkerJoined", 0, 2, 0.1, 0.0, 0.0, []], [["Load", 0, 1, [1, 0], 7, ""]])
    recording = read(tmp_path, b"".join(map(msgpack.packb, (head, rows, 1))))
    assert recording.events == [(0.0, t.WorkerJoined(0, 2, 0.1))]
    assert recording.commands == [[t.Load(0, 1, t.ExpertId(1, 0), 7)]]
