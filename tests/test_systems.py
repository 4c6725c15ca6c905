"""Every system, and combinations that no paper tried: exact ones give Transformers' tokens and logits, whatever is
predicted, kept or late; those that change the answer say so; nobody holds more than the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler.eventlog.recording import read_recording
from scheduler.eventlog.replay import replay
from scheduler.files import write_whole
from scheduler.policies.systems import SYSTEMS
from scheduler.simulation.recorded_forms import recorded_profile
from scheduler.simulation.scenario import Scenario
from scheduler.timing.profile import find_profile
from scheduler.types import Load, WorkerJoined
from support.cases import slow_except
from support.nodes.exact import WHOLE, answers
from support.nodes.recounted import NEEDS, hits_of

TOKENS = 6
EXACT = ("smoe", "smoe-flex", "moe-infinity", "hybrimoe", "lrfu-prefetch", "static", "on-demand")
MIXED: dict[str, dict[str, Any]] = {
    "SEP with a cache": {"system": "od-moe", "residency": "arc", "workers": 4, "device_memory": "30%"},
    "cross-layer gate on workers": {"system": "on-demand", "predictor": "cross-layer", "workers": 4, "slots": 3},
    "importance, nothing replaced": {"system": "importance", "alpha": 0.0, "device_memory": "25%"},
    "Fate in full": {"system": "fate", "precision": "full", "device_memory": "25%"},
    "stacked gates, LFU": {"predictor": "stacked", "residency": "lfu", "shadow": "none", "workers": 2, "slots": 9},
    "LRU, prefill in turn": {"system": "on-demand", "residency": "lru", "prefill": "in-turn", "workers": 1, "slots": 5},
    "one slot": {"system": "moe-infinity", "slots": 1},
    "everything fits": {"system": "eap", "device_memory": "100%"},
}


def is_exact(cluster: Any, expected: Any) -> Any:
    report, logits = answers(cluster, expected.prompt, TOKENS)
    assert report.token_ids == expected.tokens
    assert all(torch.equal(got, wanted) for got, wanted in zip(logits, expected.logits, strict=True))
    assert report.exact
    slots = [node.slots for node in cluster.main.engine.peers.nodes() if node.role == "worker"]
    assert all(held <= room for held, room in zip(report.resident_experts_max, slots, strict=True))
    return report


@pytest.mark.parametrize("name", EXACT)
def test_exact_systems(name: str, embedded: Any, reference: Any) -> None:
    cluster = embedded(system=name, **({"device_memory": "25%"} if name != "on-demand" else {"slots": 2}), **WHOLE)
    report = is_exact(cluster, reference("float32", 0, TOKENS))
    assert report.hits <= report.named == (TOKENS - 1) * 8 * 2


def test_all_experts_on_the_host(embedded: Any, reference: Any) -> None:
    """KTransformers: nothing is loaded, in prefill or later, and one slot is all that a worker gets of a budget."""
    cluster = embedded(system="ktransformers", profile="rtx3090-pcie3", device_memory="50%", **WHOLE)
    report = is_exact(cluster, reference("float32", 0, TOKENS))
    assert (report.loads, report.bytes_loaded, report.hits) == (0, 0, 0)
    assert report.named == report.host_computed == (TOKENS - 1) * 8 * 2
    assert sum(report.memory_bytes["workers"]) == cluster.main.store.manifest.blob_bytes


FAST_MIXED = ("SEP with a cache", "importance, nothing replaced", "Fate in full")


@pytest.mark.parametrize("name", slow_except(FAST_MIXED, MIXED))
def test_combinations(name: str, embedded: Any, reference: Any) -> None:
    is_exact(embedded(**MIXED[name], **WHOLE), reference("float32", 4, TOKENS))


def test_what_everything_has_room_for_is_loaded_once(embedded: Any, reference: Any) -> None:
    cluster = embedded(system="on-demand", residency="lru", workers=1, device_memory="100%", **WHOLE)
    first = is_exact(cluster, reference("float32", 0, TOKENS))
    second = is_exact(cluster, reference("float32", 4, TOKENS))
    assert first.loads + second.loads <= 2 * 64
    # Bytes count once a load has ended: how many were begun, and made way for a more urgent one, is a matter of luck.
    assert first.bytes_loaded + second.bytes_loaded <= cluster.main.store.manifest.expert_bytes
    missed = first.named - first.hits + second.named - second.hits
    assert missed <= 64 - 56  # the first prompt's prefill names 56 of the 64 experts, and they stay


APPROXIMATE = sorted({*SYSTEMS} - {*EXACT, "od-moe", "fully-cached", "ktransformers"})


@pytest.mark.parametrize("name", slow_except(("importance", "sep-arc"), APPROXIMATE))
def test_the_others_answer_and_say_that_they_are_approximate(name: str, embedded: Any, reference: Any) -> None:
    quantised = name in ("eap", "fate", "hobbit", "mixtral-offloading")
    forms = {"smaller_forms": "always"} if quantised else {}  # whether they pay is a matter of the machine
    cluster = embedded(system=name, device_memory="40%", **forms)
    report, _ = answers(cluster, reference("float32", 0, TOKENS).prompt, TOKENS)
    assert len(report.token_ids) == TOKENS
    assert report.exact == (name in ("random-prefetch", "sep-arc"))
    assert report.bytes_loaded > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weighed", "settings"),
    [
        (True, {"system": "lrfu-prefetch"}),
        (False, {"system": "lrfu-prefetch", "predictions": "always"}),
        (False, {"system": "lrfu-prefetch", "profile": "rtx3090-pcie3"}),
        (False, {"system": "moe-infinity"}),
    ],
    ids=str,
)
def test_predictions_are_weighed_where_the_main_model_makes_them_in_real_time(
    weighed: bool, settings: dict[str, Any], embedded: Any, reference: Any
) -> None:
    """Whichever way it goes, the answer is the model's."""
    cluster = embedded(device_memory="40%", **settings)
    report = is_exact(cluster, reference("float32", 0, TOKENS))
    assert cluster.main.engine.prediction_trial.weighs is weighed
    assert report.cluster.prediction_step_s is None  # no trial ends within so few tokens


@pytest.mark.parametrize(
    ("weighed", "settings"),
    [
        (False, {"system": "importance"}),
        (True, {"system": "importance", "alpha": 0.0}),
        (False, {"system": "hobbit", **WHOLE}),
        (True, {"system": "smoe"}),
        (False, {"system": "smoe", "predictor_learning_rate": 0.1}),
    ],
    ids=str,
)
def test_predictions_are_not_weighed_where_tokens_depend_on_slots_or_a_predictor_learns(
    weighed: bool, settings: dict[str, Any], embedded: Any
) -> None:
    cluster = embedded(device_memory="40%", **settings)
    assert cluster.main.engine.prediction_trial.weighs is weighed


@pytest.mark.parametrize("name", slow_except(("hobbit",), ("fate", "hobbit", "mixtral-offloading")))
def test_a_budget_that_holds_everything_needs_no_smaller_form(name: str, embedded: Any, reference: Any) -> None:
    report = is_exact(embedded(system=name, device_memory="100%", **WHOLE), reference("float32", 0, TOKENS))
    assert (report.cluster.forms, report.cluster.smaller_forms, report.cluster.form_costs) == ([""], [], {})


@pytest.mark.parametrize("name", slow_except(("hobbit",), ("fate", "hobbit", "mixtral-offloading")))
def test_where_restoring_is_slow_everything_is_loaded_in_full(
    name: str, embedded: Any, reference: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tokens are the model's, memory stays in the budget, and the recording gives the same decisions again."""
    monkeypatch.setattr("worker_node.form_choice.restoring_seconds", lambda *_: 1.0)
    cluster = embedded(system=name, device_memory="25%", record=str(tmp_path / "log"), **WHOLE)
    report = is_exact(cluster, reference("float32", 0, TOKENS))
    found = report.cluster
    assert (found.forms, found.smaller_forms[0], found.form_costs["int4"][1]) == ([""], "int4", 1.0)
    expert_bytes = cluster.main.store.manifest.expert_bytes
    assert sum(report.memory_bytes["workers"]) <= 0.25 * expert_bytes
    write_whole(tmp_path / "log", cluster.recording())
    recording = read_recording(tmp_path / "log")
    assert replay(recording).difference is None
    loads = [c for commands in recording.commands for c in commands if isinstance(c, Load)]
    assert {load.form for load in loads} == {""}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fate", "hobbit"])
def test_a_hit_is_an_expert_in_a_form_that_serves(name: str, embedded: Any, reference: Any, tmp_path: Path) -> None:
    """Counted again from the recording: what lay in slots, in which form, when each gate fired."""
    cluster = embedded(system=name, device_memory="40%", smaller_forms="always", record=str(tmp_path / "log"), **WHOLE)
    reports = [answers(cluster, reference("float32", number, TOKENS).prompt, 5 * TOKENS)[0] for number in (0, 4)]
    write_whole(tmp_path / "log", cluster.recording())
    recounted = hits_of(read_recording(tmp_path / "log"), NEEDS[name])
    assert [(report.named, report.hits) for report in reports] == [(one.named, one.hits) for one in recounted]
    assert sum(one.wrong_form for one in recounted) > 0


def test_in_emulated_time_forms_cost_what_the_profile_says(embedded: Any, reference: Any, tmp_path: Path) -> None:
    """As a simulation of the recording has it."""
    cluster = embedded(system="fate", device_memory="25%", profile="rtx3090-pcie3", record=str(tmp_path / "log"))
    report, _ = answers(cluster, reference("float32", 0, 2).prompt, 2)
    write_whole(tmp_path / "log", cluster.recording())
    recording, manifest = read_recording(tmp_path / "log"), cluster.main.store.manifest
    profile = recorded_profile(find_profile("rtx3090-pcie3"), recording)
    assert profile.form_share("int4") == manifest.form_bytes("int4") / manifest.blob_bytes
    [joined] = [event for _, event in recording.events if isinstance(event, WorkerJoined) and event.slots]
    [simulated] = [
        cost for cost in Scenario(profile, system=recording.core_config.system).costs_of(0) if cost.form == "int4"
    ]
    assert simulated in joined.forms
    assert simulated == ("int4", profile.form_load_s("int4"), 0.0001, True)
    assert report.cluster.form_costs["int4"] == simulated[1:3]
    assert joined.load_s == pytest.approx(profile.form_load_s("int4"), rel=1e-6)
    assert joined.call_s == pytest.approx(profile.device_costs[0] + 0.0001)


def test_the_token_wise_predictor_learns_where_it_is_told_to(embedded: Any, reference: Any) -> None:
    """From each decoded token that it had predicted: the first one is predicted by prefill's last row."""
    prompt, found = reference("float32", 0, 2).prompt, {}
    for rate, tokens in ((0.0, 4), (0.25, 1), (0.25, 4), (0.5, 4)):
        cluster = embedded(system="smoe", device_memory="25%", predictor_learning_rate=rate)
        weights = cluster.main.experts.watch._foresight.predictor.weights
        before = {layer: weight.clone() for layer, weight in weights.items()}
        answers(cluster, prompt, tokens)
        found[rate, tokens] = sum(float((weights[layer] - before[layer]).abs().sum()) for layer in weights)
    assert found[0.0, 4] == found[0.25, 1] == 0
    assert 0 < found[0.25, 4] < found[0.5, 4]


def test_importance_replaces_and_loads_less(embedded: Any, reference: Any) -> None:
    """At a large alpha most chosen experts count as low, so residents stand in for them."""
    prompt = reference("float32", 0, TOKENS).prompt
    loads = {}
    for alpha in (0.0, 1.0):
        cluster = embedded(system="importance", predictor="none", alpha=alpha, device_memory="25%", prefill="pipelined")
        report, _ = answers(cluster, prompt, 10)
        loads[alpha] = report.loads - report.prefill_loads
    assert loads[1.0] < loads[0.0]
