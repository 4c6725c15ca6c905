"""Routing traces: what a simulated run of one records is the same trace; files of other engines; damaged files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.build import make_core
from scheduler.errors import ConfigError
from scheduler.eventlog.recording import Recorder, read_recording
from scheduler.policies.registry import strategy_of
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.requests import Arrival
from scheduler.simulation.routing_trace import (
    KINDS,
    SHIPPED,
    Foretold,
    RoutingTrace,
    find_trace,
    is_trace,
    read_trace,
    traced_workloads,
    write_trace,
)
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.trace_sources import imported, trace_of
from scheduler.simulation.world import World
from scheduler.timing.profile import find_profile

LAYERS, EXPERTS, TOP_K = 3, 8, 2
AHEAD = {"gate": 1, "gates": 2, "attention": 1, "token": 0}
"""How many layers ahead each kind looks here; `token`: at the same layer, a token ahead."""


def drawn(seed: int, lengths: list[tuple[int, int]], kind: str | None) -> RoutingTrace:
    """Requests of (prompt, answer) tokens with random routes, scores and foresight."""
    draw = np.random.default_rng(seed)
    tokens = sum(prompt + answer for prompt, answer in lengths)
    scores = draw.random((tokens, LAYERS, EXPERTS), dtype=np.float32)
    experts = np.argsort(-scores, axis=2)[:, :, :TOP_K]
    places: list[tuple[int, int, int, int]] = []
    first = 0
    for prompt, answer in lengths:
        for token in range(first, first + prompt + answer):
            if kind == "token" and token >= first + prompt - 1:
                places += [(token, layer, 1, layer) for layer in range(LAYERS)]
            elif kind not in (None, "token") and (kind != "attention" or token >= first + prompt):
                places += [
                    (token, layer, 0, of)
                    for layer in range(LAYERS)
                    for of in range(layer + 1, min(LAYERS, layer + 1 + AHEAD[str(kind)]))
                ]
        first += prompt + answer
    foresight = {kind: Foretold(np.array(places), draw.random((len(places), EXPERTS), np.float32))} if kind else {}
    request = np.repeat(np.arange(len(lengths)), [sum(one) for one in lengths])
    return RoutingTrace(
        experts, EXPERTS, request, np.array([prompt for prompt, _ in lengths]), scores, foresight, {"model": "drawn"}
    )


def same(one: RoutingTrace, other: RoutingTrace) -> bool:
    """Foresight in whatever order."""

    def sorted_rows(foretold: Foretold) -> list[Any]:
        return sorted(zip(foretold.place.tolist(), foretold.scores.tolist(), strict=True))

    return (
        np.array_equal(one.experts, other.experts)
        and np.array_equal(one.request, other.request)
        and np.array_equal(one.prompt_tokens, other.prompt_tokens)
        and np.array_equal(one.scores, other.scores)
        and one.num_experts == other.num_experts
        and {kind: sorted_rows(found) for kind, found in one.foresight.items()}
        == {kind: sorted_rows(found) for kind, found in other.foresight.items()}
    )


SYSTEMS = {
    "gate": SystemConfig("next-gate", "mrs"),
    "gates": SystemConfig("impact", "mrs"),
    "attention": SystemConfig("next-layer", "mrs"),
    "token": SystemConfig("token-wise", "mrs"),
}


def recorded(trace: RoutingTrace, kind: str, file: Path) -> Path:
    """A recording of the trace's requests, simulated one after the other with a predictor of this kind."""
    profile = replace(find_profile("rtx3090-pcie3"), layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    arrivals = [Arrival(one, one.prompt_tokens, one.tokens) for one in traced_workloads(trace, kind)]
    scenario = Scenario(profile, workers=1, slots=4, system=SYSTEMS[kind], parallel=1)
    core, recorder = make_core(scenario.core_config), Recorder({"model": "drawn"}, scenario.core_config)
    decide = core.handle

    def on_event(event: Any, now: float) -> Any:
        commands = list(decide(event, now))
        recorder.on_handled(event, now, commands)
        return commands

    core.handle = on_event  # type: ignore[method-assign]
    world = World(core, scenario, arrivals)
    world.start()
    assert world.run(sum(one.tokens for one in arrivals))
    world.drain()
    file.write_bytes(recorder.take())
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_of_a_trace_records_is_the_trace(kind: str, tmp_path: Path) -> None:
    trace = drawn(1, [(3, 4), (1, 2), (5, 1)], kind)
    exported = trace_of([("run", read_recording(recorded(trace, kind, tmp_path / "run")))])
    assert same(trace, exported)
    write_trace(tmp_path / "trace.npz", exported)
    assert same(trace, read_trace(tmp_path / "trace.npz"))


def test_recordings_of_the_same_routes_join_their_foresight(tmp_path: Path) -> None:
    traces = {kind: drawn(2, [(3, 4)], kind) for kind in ("gates", "token")}
    runs = [(kind, read_recording(recorded(one, kind, tmp_path / kind))) for kind, one in traces.items()]
    joined = trace_of(runs)
    assert sorted(joined.foresight) == ["gates", "token"]
    one_ahead = traced_workloads(joined, "gate")[0]
    assert one_ahead.foresight == "gate", "the first layer of several"
    assert [of for _, of, _ in one_ahead.gates[0, 0].foreseen] == [1]
    other = recorded(drawn(3, [(3, 4)], "token"), "token", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"other has other routes than gates; record the same prompts"):
        trace_of([runs[0], ("other", read_recording(other))])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4), st.integers(0, 99))
def test_a_workload_counts_what_the_tokens_chose(lengths: list[tuple[int, int]], seed: int) -> None:
    trace, first = drawn(seed, lengths, None), 0
    for one, (prompt, answer) in zip(traced_workloads(trace), lengths, strict=True):
        assert (one.prompt_tokens, len(one.passes)) == (prompt, answer)
        for layer in range(LAYERS):
            chosen = trace.experts[first : first + prompt, layer]
            counts = np.bincount(chosen.ravel(), minlength=EXPERTS)
            assert dict(one.prompt(layer)) == {e: int(n) for e, n in enumerate(counts) if n}
            for index in range(answer):
                assert set(one.routes(index, layer)) == set(trace.experts[first + prompt + index, layer].tolist())
        first += prompt + answer


# --- files of others --------------------------------------------------------------------------------------------


def test_what_other_engines_return_becomes_a_trace(tmp_path: Path) -> None:
    trace = drawn(4, [(3, 4)], None)
    rows = trace.experts.astype(np.int16)
    np.save(tmp_path / "run.npy", rows)
    body = {"prompt_routed_experts": rows[:3].tolist(), "choices": [{"routed_experts": rows[3:].tolist()}]}
    (tmp_path / "run.json").write_text(json.dumps(body))
    lines = ["layer,expert"]
    for batch in (rows[:5], rows[5:]):  # tokens are evaluated in batches, layer by layer
        for layer in range(LAYERS):
            lines += [f"{layer},{expert}" for token in batch[:, layer].tolist() for expert in token]
    (tmp_path / "run.csv").write_text("\n".join(lines))
    for name in ("run.npy", "run.json", "run.csv"):
        found = imported([tmp_path / name], TOP_K, EXPERTS, prompt_tokens=3)
        assert np.array_equal(found.experts, trace.experts)
        assert (found.prompt_tokens.tolist(), found.num_experts, found.scores) == ([3], EXPERTS, None)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "0,1\n0,2\n1,3\n", r"layers have \{0: 2, 1: 1\} rows"),
        ("a.csv", "0\n", r"line 1 is \['0'\]; expected: layer,expert"),
        ("a.json", "{}", "has no routed experts: 'prompt_routed_experts'"),
        ("a.npy", "no array", "has no routed experts"),
        ("a.txt", "", r"ends with '.txt'; allowed: .npy, .json, .csv"),
    ],
    ids=["rows", "columns", "response", "bytes", "name"],
)
def test_a_file_without_routes_is_refused_by_name(name: str, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        imported([tmp_path / name], TOP_K)
    assert str(tmp_path / name) in str(caught.value)


def test_damaged_traces_are_refused_by_name(tmp_path: Path) -> None:
    file, trace = tmp_path / "trace.npz", drawn(5, [(2, 2)], "gate")
    write_trace(file, trace)
    whole = dict(np.load(file))
    twice = whole["experts"].copy()
    twice[1, 2] = 3
    wrong = {
        "version": (np.array(9), "version 9, but this odmoe reads version 1"),
        "schema": (np.array("?"), "no array schema"),
        "num_experts": (np.array(2), "allowed: 0 to 1"),
        "experts": (twice, "token 1 chooses an expert twice in layer 2"),
        "request": (whole["request"][::-1] + 1, "request has 2 numbers for 1 prompts"),
        "prompt_tokens": (np.array([9]), "4 tokens, and a prompt of 9"),
        "scores": (whole["scores"][:, :, :2], "scores has shape"),
        "foresight_gate_place": (whole["foresight_gate_place"] + 9, "a place outside of 4 tokens and 3 layers"),
    }
    for name, (value, said) in wrong.items():
        np.savez(file, **{**whole, name: value})
        with pytest.raises(ConfigError, match=said) as caught:
            read_trace(file)
        assert str(file) in str(caught.value)
    file.write_bytes(file.read_bytes()[:-40])
    assert not is_trace(file)
    with pytest.raises(ConfigError, match="is not a routing trace"):
        read_trace(file)
    np.savez(file, **{**whole, "model": np.array([object()])})
    with pytest.raises(ConfigError, match="allow_pickle"):
        read_trace(file)


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(tmp_path / "none" / "trace.npz", drawn(6, [(1, 1)], None))


@pytest.mark.parametrize("name", sorted(file.stem for file in SHIPPED.glob("*.npz")))
def test_the_traces_that_come_along_serve_every_predictor(name: str) -> None:
    file = find_trace(name)
    assert file is not None
    trace = read_trace(file)
    shape = Scenario(find_profile("rtx3090-pcie3")).shape
    for kind, system in SYSTEMS.items():
        assert strategy_of(shape, system).predictor.foresight == kind
        assert traced_workloads(trace, kind)[0].foresight == kind
