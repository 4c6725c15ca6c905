"""--memory: everything counts, slots get what is left, and what is held stays within it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from odmoe.clusters.configuration import budget_of, check_fits, configure, resources, with_precision
from odmoe.clusters.memory.budget import memory_budget
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError
from support.nodes.exact import answers

DENSE = 4 * (2048 * 192 + 8 * (2 * 192 * 192 + 2 * 192 * 64 + 8 * 192 + 2 * 192) + 192)
"""Bytes of the demo model in float32: tied embeddings; attention, gate and norms of 8 layers; the last norm."""
EXPERT = 663_552
"""3 x 192 x 288 of 4 bytes, in whole pages."""
KV = 8 * 2 * 2 * 32 * 4
"""Bytes of a token: keys and values of 2 heads of 32 in 8 layers."""


def settings_of(**values: Any) -> Settings:
    return Settings(**({"model": "demo", "threads": 1, "workers": 1, "parallel": 1, "ctx_size": 64} | values))


@pytest.fixture
def store(demo_store: Callable[[str], Any]) -> Any:
    return demo_store("float32")


def test_the_shares_are_those_of_the_model(store: Any) -> None:
    budget = budget_of(settings_of(memory="50MB", system="importance", parallel=3), store)
    assert budget is not None
    rows = 64 * 192 * (16 + 2 * 2) * 4
    computed = 64 * (3 * 288 + 192) * 4
    assert budget.shares == {
        "dense": DENSE,
        "kv": 3 * 64 * KV,
        "activations": rows + computed,
        "predictor": 0,
        "shadow": 0,
    }
    assert budget.bytes_left == 50_000_000 - sum(budget.shares.values())


def test_slots_are_what_is_left_over(store: Any) -> None:
    """Of each worker: 60 MB less 4.8 of weights, 0.1 of KV and 1.6 of activations for two workers."""
    settings = settings_of(memory="60MB", system="importance", workers=2)
    budget = budget_of(settings, store)
    assert budget is not None
    assert configure(settings, store).resources.slots == min(32, budget.bytes_left // 2 // EXPERT)
    less = settings_of(memory=str(budget.total - budget.bytes_left + 2 * 5 * EXPERT), system="importance", workers=2)
    assert configure(less, store).resources.slots == 5
    fewer = settings_of(
        memory=str(budget.total - budget.bytes_left + 2 * 5 * EXPERT - 1), system="importance", workers=2
    )
    assert configure(fewer, store).resources.slots == 4


def test_a_share_is_one_of_the_whole_model(store: Any) -> None:
    budget = budget_of(settings_of(memory="50%", system="importance"), store)
    assert budget is not None
    assert budget.total == (DENSE + store.manifest.expert_bytes) // 2


@pytest.mark.parametrize(("shadow", "item"), [("fp16", 2.0), ("nf4", 0.5625)])
def test_a_shadow_takes_its_part(store: Any, shadow: str, item: float) -> None:
    """Attention and experts at the bytes of the scheme; embeddings, gates, norms and two KV caches at 4."""
    budget = budget_of(settings_of(memory="90MB", system="sep-arc", shadow=shadow), store)
    assert budget is not None
    attention = 8 * (2 * 192 * 192 + 2 * 192 * 64)
    rest = DENSE // 4 - attention + 2 * 64 * KV // 4
    assert budget.shares["shadow"] == int((attention + 64 * 3 * 192 * 288) * item) + 4 * rest


@pytest.mark.parametrize(
    ("where", "kept"),
    [({}, 1000), ({"shadow_device": "cuda:0,cuda:1"}, 0), ({"profile": "rtx3090-1gbe"}, 0)],
)
def test_a_shadow_in_parts_or_emulated_keeps_no_prompts(store: Any, where: dict[str, Any], kept: int) -> None:
    def share(kv_memory: int) -> int:
        settings = settings_of(memory="200MB", system="sep-arc", kv_memory=kv_memory, **where)
        return memory_budget("200MB", settings, store, 0).shares["shadow"]

    assert share(1000) - share(0) == kept


def test_no_room_for_an_expert_names_every_share(store: Any) -> None:
    """Before anything is loaded."""
    settings = settings_of(memory="20MB", system="sep-arc", shadow="int8", parallel=8)
    for check in (configure, check_fits):
        with pytest.raises(ConfigError) as caught:
            check(settings, store)
        said = str(caught.value)
        assert said.startswith("--memory 20MB is 20.0 MB, and the nodes need ")
        for share in (
            "dense 4.8 MB",
            "kv 2.1 MB",
            "activations 1.3 MB",
            "shadow 17.5 MB",
            "one expert for each of 1 worker",
        ):
            assert share in said, share
        assert "--ctx-size" in said
    tight = budget_of(settings, store)
    assert tight is not None
    with pytest.raises(ConfigError, match=r"one expert for each of 1 worker 0\.7 MB"):
        configure(settings.replace(memory=str(tight.total - tight.bytes_left + EXPERT - 1)), store)
    assert resources(settings.replace(memory=str(tight.total - tight.bytes_left + EXPERT)), store).slots == 1


@pytest.mark.slow
def test_smaller_forms_have_their_restoring_counted(demo_store: Callable[[str], Any], embedded: Any) -> None:
    """More slots in the same memory, less what restoring takes."""
    cluster = embedded(system="fate", memory="25MB", smaller_forms="always", workers=1, parallel=1, ctx_size=64)
    report, _ = answers(cluster, list(range(5, 25)), 4)
    shares = report.memory_shares
    assert shares["scratch"] > EXPERT, "one restored expert, and what restoring works with"
    assert sum(shares.values()) <= 25_000_000


@pytest.mark.parametrize("system", ["od-moe", "sep-arc", "smoe", "importance", "fully-cached"])
def test_what_is_held_stays_within_it(system: str, embedded: Any) -> None:
    total = 64_000_000
    cluster = embedded(system=system, memory=str(total), workers=1, parallel=1, ctx_size=64, shadow="int8")
    budget = budget_of(cluster.serves(), cluster.main.store)
    report, _ = answers(cluster, list(range(5, 45)), 6)
    held, shares = report.memory_bytes, report.memory_shares
    assert held["main"] + held["shadow"] + sum(held["workers"]) == sum(shares.values()) <= total
    assert shares["slots"] + shares["scratch"] == sum(held["workers"])
    assert shares["shadow"] == held["shadow"]
    assert budget is not None
    assert shares["dense"] == pytest.approx(DENSE, rel=1e-3)
    assert shares["shadow"] <= budget.shares["shadow"]
    assert 0 < shares["kv"] <= budget.shares["kv"]
    assert shares["predictor"] <= budget.shares["predictor"]
    assert (shares["predictor"] > 0) == (system == "smoe")
    assert (shares["shadow"] > 0) == (system in ("od-moe", "sep-arc"))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"device_memory": "25%"}, "--memory is given with --device-memory, which decides on the slots"),
        ({"slots": 3}, "--memory is given with --slots, which decides on the slots"),
        ({"cluster": "auto"}, "--memory is for nodes that are all on this machine, and --cluster is auto"),
        ({"memory": "0%"}, "allowed: a share of the whole model"),
        ({"memory": "much"}, "allowed: a share of the whole model"),
    ],
)
def test_what_does_not_go_with_it_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**({"model": "m", "memory": "1GB"} | values))
    assert says in str(caught.value)


def test_a_budget_for_everything_needs_no_smaller_form(store: Any) -> None:
    everything = settings_of(memory="60MB", system="fate")
    assert with_precision(everything, store).precision == "full"
    assert with_precision(everything.replace(memory="30MB"), store).precision == "popular"
