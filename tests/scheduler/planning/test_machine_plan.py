"""Advice for set-ups that people have at home, against hand arithmetic."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from unittest.mock import Mock

import networkx  # type: ignore[import-untyped]  # comes with torch
import pytest

from scheduler.errors import DoesNotFitError
from scheduler.held import experts_of
from scheduler.planning import layout_speed
from scheduler.planning.layout_speed import guess, profile_of, speed
from scheduler.planning.machine_plan import advise, improve
from scheduler.planning.machines import Layout, layouts
from scheduler.planning.role_bytes import main_bytes, shadow_bytes
from scheduler.simulation.simulate import simulate
from scheduler.store_parts import missing_parts
from scheduler.types import ExpertId, ModelSize
from support.scheduling.homes import BASE, advice_on, glm_5, home, model, with_links

QWEN = model("qwen3-30b-a3b")
GPT_OSS = model("gpt-oss-120b", quantization_config={"quant_method": "mxfp4"})
"""As it is published: 65 GB with all experts in 4 bits."""


@pytest.mark.parametrize("ram", [8, 32])
def test_a_cache_fills_the_memory_that_is_given(ram: int) -> None:
    """Three boxes are three machines, one of which is the main node, too."""
    found = advice_on(model("mixtral-8x7b"), f"box x3: ram={ram}GB")
    assert len(found.layout.machines) == 3
    assert [seat.place.machine.name for seat in found.layout.seats] == ["box 1", "box 2", "box 3"]
    assert found.layout.keeps == "cache"
    assert 0.9 <= found.used_bytes / found.given_bytes <= 0.96
    assert found.alone is not None
    assert found.tokens_per_s > found.alone[1], "caches and disks add up"


def test_four_mini_pcs_hold_all_experts_of_a_model_that_one_cannot() -> None:
    found = advice_on(QWEN, "mini x4: ram=24GB disk=3GB/s net=1Gbit memory=40GB/s")
    assert found.layout.preset == "fully-cached"
    assert found.layout.slots >= 48 * 128
    assert found.alone is not None
    assert found.alone[0].preset == "lrfu-prefetch"
    assert found.tokens_per_s > 3 * found.alone[1]
    read = QWEN.read * 2 + QWEN.top_k * QWEN.layers * QWEN.expert_bytes / 4
    assert found.most < 40e9 / read, "no faster than its memories"


def test_a_shadow_larger_than_the_model_is_not_advised() -> None:
    """int8 takes 118 GB of a model of 65, however much memory there is."""
    assert shadow_bytes(GPT_OSS, "int8") / 1e9 == pytest.approx(118, abs=1)
    assert (main_bytes(GPT_OSS) + GPT_OSS.store_bytes) / 1e9 == pytest.approx(65, abs=1.5)
    found = advice_on(GPT_OSS, "small x3: ram=16GB", "large: ram=256GB")
    assert found.layout.shadow is None
    assert found.layout.preset == "fully-cached"
    none = [one for one in layouts(GPT_OSS, found.home.machines) if one.scheme == "int8"]
    assert none == []


@pytest.mark.slow
def test_faster_links_never_make_it_slower() -> None:
    """Recurrent states of 65 MB, too, stay on the main node."""
    recurrent = replace(QWEN, state=65_000_000 // 2)
    for size in (QWEN, recurrent):
        setup = home(size, "pc x4: ram=16GB")
        rates = [advise(with_links(setup, bits)).tokens_per_s for bits in (1e8, 1e9, 2.5e9, 1e10)]
        assert all(after >= 0.995 * before for before, after in pairwise(rates)), rates
        assert rates[-1] > 1.2 * rates[0]


def test_a_machine_without_a_gpu_beside_one_with() -> None:
    """The dense part goes where memory is fastest; the other machine keeps experts."""
    found = advice_on(QWEN, "old: ram=32GB memory=20GB/s", "gamer: ram=32GB gpu=8GB")
    assert found.layout.main.machine.name == "gamer"
    assert found.layout.main.on_gpu
    assert {seat.place.machine.name for seat in found.layout.seats} == {"old", "gamer"}


def test_a_slow_network_keeps_it_on_one_machine() -> None:
    found = advice_on(QWEN, "big: ram=96GB", "other: ram=96GB net=10Mbit")
    assert [one.name for one in found.layout.machines] == ["big"]
    assert found.layout.preset == "fully-cached"


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(DoesNotFitError, match=r"all but the experts takes 3\.48 GB .* box 1 has 770\.0 MB"):
        advice_on(QWEN, "box x2: ram=2GB")
    with pytest.raises(DoesNotFitError, match="no machine has room for an expert of 352"):
        advice_on(model("mixtral-8x7b"), "box x1: ram=5.1GB")


def test_the_best_change_is_the_one_that_hand_arithmetic_names() -> None:
    """Reading 6 of 8 experts a layer from a slow disk is nearly all of a token."""
    found = advice_on(QWEN, "pc: ram=12GB disk=0.5GB/s")
    best = {one.what.split(" (")[0]: one.factor for one in improve(found)}
    assert best["experts in 4 bits"] > best["disks twice as fast"] > 1.8
    assert "memory that is read twice as fast" not in best


@pytest.mark.parametrize("shape", [glm_5(), model("deepseek-v3", experts="int4")], ids=["glm", "deepseek"])
def test_eight_old_pcs_are_five_times_as_fast_as_one(shape: ModelSize) -> None:
    """Between the bounds of arithmetic: the dense part and experts at the rate of memory, and nothing else."""
    found = advice_on(shape, "pc x8: ram=64GB")
    assert len(found.layout.machines) == 8
    assert found.alone is not None
    assert found.tokens_per_s >= 5 * found.alone[1]
    dense_s = (shape.read * 2 - shape.dense_saved) / 64e9
    experts_s = shape.top_k * shape.layers * shape.expert_bytes / 8 / 64e9
    assert 0.5 / (dense_s + experts_s) < found.tokens_per_s < 1 / (dense_s + experts_s)
    assert found.alone[1] < 6e9 / (shape.top_k * shape.layers * shape.expert_bytes * 0.5), "half are read from the disk"


@pytest.mark.slow
def test_few_layers_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 8 % of four times as many layers and tokens; and the order of guesses is nearly that of simulations."""
    found = sorted(layouts(QWEN, home(QWEN, "pc x4: ram=8GB").machines), key=lambda one: -guess(BASE, one))
    short = [speed(BASE, one, "deep-moe") for one in found]
    monkeypatch.setattr("scheduler.planning.layout_speed._LAYERS", 8)
    monkeypatch.setattr("scheduler.planning.layout_speed._MEASURED", 64)
    long = [speed(BASE, one, "deep-moe") for one in found]
    assert short == pytest.approx(long, rel=0.08)
    assert max(short[:3]) >= 0.98 * max(short)


def test_one_machine_sends_nothing() -> None:
    (alone,) = layouts(QWEN, home(QWEN, "pc: ram=16GB").machines)
    assert not profile_of(BASE, alone).is_networked


# --- disks, and host memory below a GPU -------------------------------------------------------------------------------


def test_parts_of_the_store_go_where_disks_are_small() -> None:
    """The main node's disk has all of it; seven others have two copies of the experts, or one, or too little."""
    mixtral = model("mixtral-8x7b")
    whole, share = mixtral.store_bytes + mixtral.dense_bytes, mixtral.store_bytes / 7 / 1e9

    def disks(gigabytes: float) -> dict[str, int]:
        small = f"box x7: ram=16GB disk-free={gigabytes:.2f}GB"
        found = advice_on(mixtral, "first: ram=16GB", small).layout
        assert found.main.machine.name == "first"
        assert len(found.machines) == 8
        return found.disk()

    boxes = [f"box {n}" for n in range(1, 8)]
    for replicas in (2, 1):  # in whole experts, of 256
        part = math.ceil(replicas * 256 / 7) * mixtral.store_bytes // 256
        assert disks(1.1 * replicas * share) == {"first": whole} | dict.fromkeys(boxes, part)
    with pytest.raises(DoesNotFitError, match=r"the main node's disk has the whole store, 93\.\d+ GB.* 50\.00 GB free"):
        advice_on(mixtral, "box x8: ram=16GB disk-free=50GB")
    alone = advice_on(mixtral, "large: ram=16GB", f"box x7: ram=16GB disk-free={0.9 * share:.2f}GB")
    assert [one.name for one in alone.layout.machines] == ["large"]


def test_parts_are_advised_where_they_cost_no_speed() -> None:
    found = advice_on(model("mixtral-8x7b"), "pc x8: ram=16GB")
    assert found.layout.replicas == 2
    whole = found.tried[replace(found.layout, replicas=None)]
    assert found.tokens_per_s >= 0.98 * whole
    assert advice_on(model("mixtral-8x7b"), "pc x3: ram=16GB").layout.replicas is None, "two workers have all anyway"


def test_host_memory_below_a_gpu_is_filled_and_saves_reads() -> None:
    """Misses take a read and a copy over the bus: 64 experts a token at most, if nothing is kept."""
    mixtral, sizes, found = model("mixtral-8x7b"), (12, 32, 64, 120), []
    for ram in sizes:
        machines = home(mixtral, f"gamer: ram={ram}GB disk=1GB/s gpu=16GB").machines
        found.append(next(one for one in layouts(mixtral, machines) if one.seats[0].place.on_gpu))
    held = [one.seats[0].host_slots for one in found]
    assert held == [min(256, int((0.95 * ram - 0.83) * 1e9 // mixtral.expert_bytes)) for ram in sizes]
    rates = [speed(BASE, one, "deep-moe") for one in found]
    read_s, copy_s = (mixtral.layers * mixtral.top_k * mixtral.expert_bytes / rate for rate in (1e9, 12e9))
    assert 1 / (read_s + copy_s) < rates[0] < rates[1] < rates[2] < rates[3]
    assert 1 / copy_s < rates[3] < 2 / copy_s, "all are in host memory, a few on the GPU"


@pytest.mark.slow
def test_all_experts_are_kept_only_if_workers_have_slots_for_those_on_their_disks() -> None:
    """By the largest flow from slots to experts, with the parts that hosts would get."""
    mixtral, rng, seen = model("mixtral-8x7b"), random.Random(1), Counter[tuple[bool, bool]]()
    for _ in range(25):
        rams = [rng.choice([8, 16, 24, 32, 48, 64]) for _ in range(rng.randint(3, 7))]
        texts = [f"pc-{n}: ram={ram}GB" + " disk-free=40GB" * rng.randint(0, 1) for n, ram in enumerate(rams)]
        machines = home(mixtral, *texts).machines
        for replicas in (1, 2):
            for one in layouts(mixtral, machines, replicas=replicas):
                if one.replicas and not one.shadow:
                    keeps_all = one.keeps == "all"
                    assert not keeps_all or most_kept(one) == one.experts, one
                    seen[keeps_all, one.slots >= one.experts] += 1
                    assert all(seat.slots <= one.parts.get(seat.place.machine.name, 256) for seat in one.seats)
    assert min(seen[kind] for kind in ((True, True), (False, True), (False, False))) > 0, seen


def most_kept(layout: Layout) -> int:
    """How many experts can have a slot, each where it is on disk."""
    experts = [ExpertId(layer, n) for layer in range(layout.model.layers) for n in range(layout.model.experts)]
    rooms = {name: float(part) for name, part in layout.parts.items()}
    parts = missing_parts(dict.fromkeys(experts, 1), rooms, layout.replicas or 0, {})
    graph = networkx.DiGraph()
    graph.add_edges_from(((expert, "end") for expert in experts), capacity=1)
    for seat in layout.seats:
        name = seat.place.machine.name
        graph.add_edge("start", name, capacity=seat.slots)
        graph.add_edges_from(((name, expert) for expert in parts.get(name, experts)), capacity=1)
    return int(networkx.maximum_flow_value(graph, "start", "end"))


def test_parts_of_unlike_machines_are_simulated_as_they_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of 64 GB could keep all experts, and disks let each have few of them."""
    mixtral = model("mixtral-8x7b")
    monkeypatch.setattr(layout_speed, "simulate", seen := Mock(wraps=simulate))
    setup = home(mixtral, "first: ram=16GB", "small: ram=16GB disk-free=40GB", "pc x2: ram=64GB disk-free=60GB")
    found = next(one for one in layouts(mixtral, setup.machines, replicas=1) if len(one.machines) == 4)
    assert found.keeps == "cache"
    speed(BASE, found, "deep-moe")
    scenario = seen.call_args.args[0]
    layers = len(scenario.shape.layers)
    sizes = [8 * layers if part is None else len(experts_of(part)) for part in scenario.parts()]
    share = layers / mixtral.layers
    on_disk = [found.parts.get(seat.place.machine.name, found.experts) for seat in found.seats]
    assert sizes == pytest.approx([part * share for part in on_disk], abs=1)
