"""Clusters with nodes on an accelerator: the same tokens, what crosses and who asks for it, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Unpack

import pytest
import torch

from checkpoint.store import ExpertStore
from main_node.sampling import GenerateOptions, Sampling
from odmoe.clusters.devices import check_devices, device_of
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError, LaunchError
from support.devices.counted_device import Crossings
from support.devices.counted_machine import counted_machine, workers_there
from support.paths import DEMO

LAYERS, TOKENS = 8, 3
ONCE = {
    "dense.py:move_model",  # weights
    "quantise.py:_move",
    "quantise.py:quantise_linear",
    "chooser.py:make_config",  # tokens that end an answer
}
"""Who may move tensors when a node or a request begins, beside the two below."""
MOVES = {"transfer.py:to_device", "transfer.py:to_host"}
"""Who may move tensors while a model runs."""
Machine = tuple[torch.device, Crossings]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with counted_machine(monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def store(demo_store: Callable[[str], ExpertStore]) -> ExpertStore:
    return demo_store("float32")


def settings(**more: Any) -> Settings:
    return Settings(model=str(DEMO), threads=1, workers=2, audit=0.0, **more)


def there(**more: Any) -> Settings:
    """Main node and shadow are on the accelerator."""
    return settings(**{"device": "privateuseone", **more})


def answer(
    cluster: EmbeddedCluster, prompt: list[int], tokens: int = TOKENS, **how: Unpack[GenerateOptions]
) -> tuple[list[int], Any]:
    steps = list(cluster.generate(prompt, tokens, **{"ignore_eos": True, **how}))
    return [step.token_id for step in steps if step.token_id is not None], steps[-1].report


def per_token(
    cluster: EmbeddedCluster, crossings: Crossings, prompt: list[int], **how: Unpack[GenerateOptions]
) -> Counter[tuple[str, str]]:
    """What two answers of different lengths differ in, for each token, by kind and asker."""
    counts = []
    for tokens in (2, 2 + TOKENS):
        crossings.clear()
        answer(cluster, prompt, tokens, **how)
        counts.append(Counter((one.kind, one.asked_by) for one in crossings.all))
    more = counts[1] - counts[0]
    assert not [count for count in more.values() if count % TOKENS], more
    return Counter({key: count // TOKENS for key, count in more.items()})


@pytest.fixture(scope="module")
def prompt(reference: Any) -> list[int]:
    """Where answers are counted or compared with each other, not with Transformers', its beginning is enough."""
    found: list[int] = reference("float32", 0, TOKENS).prompt
    return found[:12]


def test_main_node_and_shadow_there_answer_as_eager_does_and_only_transfers_move_tensors(
    machine: Machine, store: ExpertStore, reference: Any
) -> None:
    wanted = reference("float32", 0, TOKENS)
    logits: list[torch.Tensor] = []
    with closing(EmbeddedCluster(there(shadow="fp16"), store)) as cluster:
        cluster.main.on_logits = lambda number, row: logits.append(row)
        tokens, report = answer(cluster, wanted.prompt)
    assert tokens == wanted.tokens
    assert all(torch.equal(got, want) for got, want in zip(logits, wanted.logits, strict=True))
    assert machine[1].by_asker().keys() == ONCE | MOVES
    assert machine[1].by_asker("waits").keys() <= {"chooser.py:make_config"}, (
        "Transformers looks at the ends of an answer"
    )
    assert report.recall is not None
    assert report.devices["main"] == "privateuseone:0 (privateuseone)"
    assert report.devices["shadow"] == "privateuseone:0 (privateuseone)"
    assert {one.partition(" ")[0] for one in report.devices["workers"]} == {"cpu"}
    assert not report.exact, "processors round otherwise than an accelerator"


def test_by_default_nothing_is_there_and_answers_stay_exact(
    machine: Machine, store: ExpertStore, reference: Any
) -> None:
    """Workers with the loader `disk` are on the processor, and the other roles with them."""
    wanted, said = reference("float32", 0, TOKENS), list[str]()
    with closing(EmbeddedCluster(settings(shadow="none"), store, said.append)) as cluster:
        tokens, report = answer(cluster, wanted.prompt)
    assert tokens == wanted.tokens
    assert report.exact
    assert not machine[1].all
    assert "2 workers on the processor; --device privateuseone is for the accelerator" in said[0]


@pytest.mark.slow
def test_main_node_and_shadow_may_be_on_two_accelerators(
    store: ExpertStore, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV rows go from one to the other, in one copy for each alignment."""
    wanted = reference("float32", 0, TOKENS)
    with counted_machine(monkeypatch, count=2) as (first, crossings):
        two = there(shadow="fp16", main_device=str(first), shadow_device="privateuseone:1")
        with closing(EmbeddedCluster(two, store)) as cluster:
            tokens, report = answer(cluster, wanted.prompt)
            lost = list(cluster.main.engine.peers.lost)
        between = crossings.by_asker("between devices")
    assert tokens == wanted.tokens
    assert (lost, report.recall_complete) == ([], True)
    assert report.devices["main"].startswith("privateuseone:0 (")
    assert report.devices["shadow"].startswith("privateuseone:1 (")
    assert between.keys() == {"transfer.py:to_device"}
    assert 1 <= between.total() <= TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"draft": 2}, {"departure": "late"}], ids=str)
def test_a_shadow_over_two_accelerators_predicts_as_on_one(
    how: dict[str, Any], store: ExpertStore, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With alignments, ways back and drafts. Layers end on the device on which their weights are."""
    wanted, found = reference("float32", 0, TOKENS), []
    with counted_machine(monkeypatch, count=2) as (first, crossings):
        for devices in (str(first), "privateuseone:0,privateuseone:1"):
            crossings.clear()
            asked = settings(shadow="fp16", main_device="cpu", shadow_device=devices, profile="rtx3090-1gbe", **how)
            with closing(EmbeddedCluster(asked, store)) as cluster:
                tokens, report = answer(cluster, wanted.prompt)
            assert tokens == wanted.tokens
            found.append((report.recall, report.recall_complete, report.drafted, report.accepted))
    assert found[0] == found[1]
    assert report.devices["shadow"] == "privateuseone:0,privateuseone:1 (privateuseone)"
    assert crossings.by_asker("between devices").keys() == {"transfer.py:to_device"}
    assert report.recall > 0.9


@pytest.mark.slow
def test_a_token_waits_once_a_layer_and_once_for_itself(
    machine: Machine, store: ExpertStore, prompt: list[int]
) -> None:
    """With workers on the processor: a layer's outputs go back in one copy, which nothing waits for."""
    with closing(EmbeddedCluster(there(shadow="none"), store)) as cluster:
        found = per_token(cluster, machine[1], prompt)
    assert found == {("to host", "transfer.py:to_host"): LAYERS + 1, ("to device", "transfer.py:to_device"): LAYERS + 1}


@pytest.mark.slow
def test_so_does_one_with_log_probabilities_penalties_and_a_schema(
    machine: Machine, store: ExpertStore, prompt: list[int]
) -> None:
    """Which tokens the schema allows is one more copy there, which nothing waits for."""
    sampling = Sampling(frequency_penalty=0.5, presence_penalty=0.1, logit_bias=((5, 1.0),))
    schema = '{"type": "string", "minLength": 100}'
    with closing(EmbeddedCluster(there(shadow="none"), store)) as cluster:
        found = per_token(cluster, machine[1], prompt, sampling=sampling, logprobs=3)
        guided = per_token(cluster, machine[1], prompt, sampling=sampling, logprobs=3, schema=schema)
        assert not machine[1].by_asker("waits")
    assert found == {("to host", "transfer.py:to_host"): LAYERS + 1, ("to device", "transfer.py:to_device"): LAYERS + 1}
    assert guided == found + Counter({("to device", "transfer.py:to_device"): 1})


@pytest.mark.slow
def test_what_is_told_and_chosen_there_is_as_on_the_processor(
    machine: Machine, store: ExpertStore, prompt: list[int]
) -> None:
    """A prompt's log-probabilities are waited for once."""
    how: GenerateOptions = {
        "sampling": Sampling(frequency_penalty=0.5),
        "logprobs": 3,
        "prompt_logprobs": 2,
        "schema": '{"enum": ["ab", 17, null, true]}',
    }
    steps, waited = [], []
    for where in (there(shadow="none"), settings(shadow="none", device="cpu")):
        with closing(EmbeddedCluster(where, store)) as cluster:
            cluster.main._output_layer.rows = 16
            steps.append(list(cluster.generate(prompt, TOKENS, **how))[:-1])
            waited.append(machine[1].by_asker("to host", "waits")["transfer.py:to_host"])
            machine[1].clear()
    assert steps[0] == steps[1]
    assert len(steps[0][0].prompt_logprobs) == len(prompt)
    assert steps[0][-1].finish == "stop"
    # The model's settings are tried at the start: two more waits.
    assert waited == [len(steps[0]) * (LAYERS + 1) + 1 + 1 + 2, 0]


@pytest.mark.slow
def test_rows_and_outputs_of_workers_there_stay_there(
    machine: Machine, store: ExpertStore, reference: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host learns the gates' choices and the token, the device the token; and experts are loaded."""
    workers_there(monkeypatch, machine[0])
    wanted = reference("float32", 0, TOKENS)
    with closing(EmbeddedCluster(there(shadow="none", residency="all"), store)) as cluster:
        tokens, report = answer(cluster, wanted.prompt)
        found = per_token(cluster, machine[1], prompt)
    assert tokens == wanted.tokens
    assert report.exact
    assert found == {("to host", "transfer.py:to_host"): LAYERS + 1, ("to device", "transfer.py:to_device"): 1}


SYSTEMS = [
    {"system": "importance", "alpha": 0.0},
    {"predictor": "next-gate"},
    {"predictor": "next-layer", "router": "skip"},
]


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_policies_that_read_scores_get_them_there(
    machine: Machine, store: ExpertStore, prompt: list[int], system: dict[str, Any]
) -> None:
    """The same choices as on the processor. With an alpha they depend on what is resident, and so on time."""
    more = {"shadow": "none", "device_memory": "50%", **system}
    with closing(EmbeddedCluster(settings(**more), store)) as cluster:
        wanted, _ = answer(cluster, prompt)
    with closing(EmbeddedCluster(there(**more), store)) as cluster:
        found, _ = answer(cluster, prompt)
    assert found == wanted


@pytest.mark.slow
def test_several_requests_share_steps_there(machine: Machine, store: ExpertStore, reference: Any) -> None:
    answers = [reference("float32", number, TOKENS) for number in range(2)]
    with closing(EmbeddedCluster(there(shadow="fp16"), store)) as cluster:
        open_answers = [cluster.generate(one.prompt, TOKENS, ignore_eos=True) for one in answers]
        found: list[list[int]] = [[] for _ in answers]
        for _ in range(TOKENS):
            for number, one in enumerate(open_answers):
                token = next(one).token_id
                assert token is not None
                found[number].append(token)
        for one in open_answers:
            one.close()
    assert found == [one.tokens for one in answers]


@pytest.mark.slow
@pytest.mark.parametrize("line", ["item", "cpu"])
def test_a_crossing_that_nothing_asked_for_is_found(
    machine: Machine, store: ExpertStore, prompt: list[int], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above count changes with one call in a layer of the main node."""
    from main_node.engine.device_layer import DeviceLayerWork

    combine = DeviceLayerWork.combine

    def with_a_look(layer: DeviceLayerWork) -> torch.Tensor:
        output = combine(layer)
        getattr(output.sum(), line)()
        return output

    monkeypatch.setattr(DeviceLayerWork, "combine", with_a_look)
    with closing(EmbeddedCluster(there(shadow="none"), store)) as cluster:
        found = per_token(cluster, machine[1], prompt)
    assert found.total() == 3 * LAYERS + 2
    assert any(asker not in ONCE | MOVES for _, asker in found)


def test_a_main_device_without_room_is_named(
    machine: Machine, store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 MiB")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    named = r"^privateuseone:0 has no room for the dense weights \(tried .*\); give another --main-device, such as cpu$"
    with pytest.raises(LaunchError, match=named):
        EmbeddedCluster(there(shadow="none"), store)


# --- which device -----------------------------------------------------------------------------------------------------


def test_a_role_has_its_own_device(machine: Machine) -> None:
    there, here = machine[0], torch.device("cpu")
    assert [device_of(settings(), role) for role in ("main", "shadow", "worker")] == [here, here, here]
    of_all = settings(device="privateuseone")
    assert [device_of(of_all, role) for role in ("main", "shadow", "worker")] == [there, there, here]
    own = settings(device="cpu", shadow_device="privateuseone:0")
    assert [device_of(own, role) for role in ("main", "shadow", "worker")] == [here, there, here]


def test_loader_and_device_of_workers_go_together() -> None:
    assert settings(device="cuda").loader_used == settings(worker_device="cuda:1").loader_used == "cuda"
    assert settings(device="cuda", worker_device="cpu").loader_used == "disk"
    assert settings(device="xpu").loader_used == "disk"
    assert settings(loader="cuda").loader_used == "cuda"
    with pytest.raises(ConfigError, match=r"^--device is cuda with --loader memory.*--worker-device cpu$"):
        settings(device="cuda", loader="memory")
    with pytest.raises(ConfigError, match=r"^--worker-device is cpu with --loader cuda"):
        settings(worker_device="cpu", loader="cuda")
    with pytest.raises(ConfigError, match=r"^--worker-device is 'xpu'; allowed"):
        settings(worker_device="xpu")


@pytest.mark.parametrize("name", ["", "CUDA", "cuda:", "cuda:x", "cuda:-1", "auto:1", "cpu:0", "cuda:01", 3, True])
def test_what_is_no_device_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"^--main-device is .*; allowed: auto, cpu, cuda, cuda:1"):
        settings(main_device=name)


@pytest.mark.parametrize(
    "name",
    ["", "cuda:0,", "cuda:0,cpu", "auto,auto", "cuda:1,cuda:1", "cuda,cuda:0", ["cuda:0", 1], [], "cuda:0;cuda:1"],
)
def test_what_are_no_devices_of_one_kind_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"^--shadow-device is .*; or several of one kind, such as cuda:0,cuda:1"):
        settings(shadow_device=name)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"device": "cuda"}, "--device is 'cuda'"),
        ({"shadow_device": "cuda:3"}, "--shadow-device is 'cuda:3'"),
        ({"worker_device": "cuda"}, "--worker-device is 'cuda'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(
    given: dict[str, str], named: str, store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("something was loaded")

    monkeypatch.setattr("odmoe.clusters.embedded.make_engine", load)
    with pytest.raises(ConfigError, match=f"^{named}, which this machine does not have"):
        EmbeddedCluster(settings(**given), store)
    with pytest.raises(ConfigError, match=f"^{named}"):
        check_devices(settings(**given))
    check_devices(settings(**given).replace(cluster="auto"))  # its nodes are elsewhere


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_every_role_is_on_the_processor() -> None:
    assert {device_of(settings(), role) for role in ("main", "shadow", "worker")} == {torch.device("cpu")}
