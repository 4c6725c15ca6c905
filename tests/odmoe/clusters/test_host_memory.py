"""--host-memory in a cluster: the tokens stay, the memory is used, and what it is for follows from the machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.expert import ExpertArithmetic
from checkpoint.sharding.form_files import add_forms
from checkpoint.store import ExpertStore
from checkpoint.tensors import round_up
from odmoe.clusters.configuration import check_fits, check_joined, configure, resources
from odmoe.clusters.memory import slots as slots_module
from odmoe.clusters.memory.host import host_slots
from odmoe.clusters.nodes import make_worker
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError
from support.nodes.exact import WHOLE, answers
from worker_node import form_choice

TOKENS = 6
GIB = 1 << 30


@pytest.mark.parametrize("policy", ["lru", "lrfu"])
def test_tokens_and_logits_stay_while_experts_are_evicted_from_host_memory(
    policy: str, embedded: Callable[..., Any], reference: Callable[..., Any], demo_store: Callable[[str], Any]
) -> None:
    """With a quarter of the experts in it, of a worker that keeps none in its slot."""
    expected, manifest = reference("float32", 4, TOKENS), demo_store("float32").manifest
    host = {"host_memory": "25%", "host_residency": policy}
    cluster = embedded("float32", shadow="none", workers=1, check_loads="all", **host, **WHOLE)
    report, logits = answers(cluster, expected.prompt, TOKENS)
    assert report.token_ids == expected.tokens
    assert all(bool((mine == theirs).all()) for mine, theirs in zip(logits, expected.logits, strict=True))
    given = manifest.expert_bytes // 4
    slots = given // manifest.blob_bytes
    assert slots >= 2
    assert report.loads - report.loads_from_memory > slots, "experts came from disk after host memory was full"
    assert report.loads_from_memory > 0
    assert report.resident_experts_max == [1], "in slots, the worker is as cacheless as before"
    assert 0.9 <= report.host_memory_bytes[0] / (slots * manifest.blob_bytes) <= 1
    assert report.cluster.loads_checked == 1.0


def test_the_slots_of_a_cache_on_a_processor_are_its_host_memory(demo_store: Callable[[str], Any]) -> None:
    store = demo_store("float32")
    count = sum(len(layer.blobs) for layer in store.manifest.layers.values())
    cached: dict[str, Any] = {"model": "demo", "system": "on-demand", "residency": "lru", "workers": 2}
    found = resources(Settings(**cached, host_memory="50%"), store)
    assert (found.slots, found.host_slots) == (count // 4, None), "of two workers"
    assert resources(Settings(**cached), store).host_slots is None
    for changed in ({"system": "on-demand", "residency": "none"}, {"profile": "rtx3090-1gbe"}):
        tiered = resources(Settings(**(cached | {"host_memory": "50%"} | changed)), store)
        assert (tiered.slots, tiered.host_slots) == (1, count // 4), "no cache, or a device of its own"


@pytest.mark.parametrize(("residency", "slots", "hosted"), [("none", 1, 2), ("lru", 2, None)])
@pytest.mark.parametrize("workers", [{}, {"workers": 4}], ids=str)
def test_a_worker_of_a_ray_cluster_has_its_machines_host_memory(
    residency: str, slots: int, hosted: int | None, workers: dict[str, int], demo_store: Callable[[str], Any]
) -> None:
    """Until a host knows how many it has."""
    store = demo_store("float32")
    memory = str(2 * round_up(store.manifest.blob_bytes))
    given: dict[str, Any] = {"cluster": "auto", "slots": 1} if residency == "none" else {"cluster": "auto"}
    settings = Settings(model="demo", system="on-demand", residency=residency, host_memory=memory, **(given | workers))
    found = configure(settings, store).resources
    assert (found.slots, found.host_slots) == (slots, hosted)
    check_fits(settings, store)
    check_joined(settings, store, 4)
    with pytest.raises(ConfigError, match=f"--host-memory {memory}"):
        resources(settings, store, workers_here=3)


def test_worker_processes_have_copies_of_their_own(demo_store: Callable[[str], Any]) -> None:
    """Beside a GPU. Host memory for one copy of all experts is enough for all workers of one process alone."""
    store = demo_store("float32")
    count = sum(len(layer.blobs) for layer in store.manifest.layers.values())
    found = {
        cluster: host_slots(
            Settings(model="demo", loader="cuda", cluster=cluster, workers=2, host_memory="100%"), store, ("",), 2
        )
        for cluster in ("embedded", "local")
    }
    assert found == {"embedded": None, "local": count // 2}


@pytest.fixture(scope="module")
def formed(demo_store: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """The demo model's store with int4."""
    copied = shutil.copytree(demo_store("float32").path, tmp_path_factory.mktemp("forms") / "store")
    return add_forms(ExpertStore.open(Path(copied)), ("int4",))


@pytest.mark.parametrize("pays", [False, True])
def test_host_memory_is_divided_by_the_form_that_a_worker_loads(
    pays: bool, formed: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full form is measured though host memory was asked for int4."""
    monkeypatch.setattr(form_choice, "full_pays", lambda *_: pays)
    manifest = formed.manifest
    memory = str(6 * round_up(manifest.blob_bytes))
    settings = Settings(
        model="demo", system="on-demand", residency="none", precision="int4", workers=1, host_memory=memory
    )
    found = resources(settings, formed)
    smaller = 6 * round_up(manifest.blob_bytes) // round_up(manifest.form_bytes("int4"))
    assert (found.host_slots, found.full_host_slots) == (smaller, 6)
    worker: Any = make_worker(0, settings, formed, ExpertArithmetic(manifest.config, manifest.dtype), None, found)
    try:
        assert worker.forms == (("",) if pays else ("int4",))
        assert worker.loader.tier.slots == (6 if pays else smaller)
    finally:
        worker.close()


def test_beside_a_gpu_smaller_forms_stay_where_they_alone_fit_in_host_memory(formed: ExpertStore) -> None:
    """As a slab of full experts they would not."""
    given: dict[str, Any] = {"model": "demo", "loader": "cuda", "precision": "int4", "workers": 1, "slots": 8}
    experts = sum(len(layer.blobs) for layer in formed.manifest.layers.values())
    memory = str(experts * formed.manifest.blob_bytes - 1)
    found = resources(Settings(**given, system="on-demand", host_memory=memory), formed)
    assert (found.host_slots, found.full_slots, found.full_host_slots) == (None, 0, experts - 1)
    plenty = resources(Settings(**given, system="on-demand", host_memory="2GB"), formed)
    assert (plenty.host_slots, plenty.full_host_slots) == (None, None)
    assert plenty.full_slots > 0


def test_auto_slots_take_what_is_free_less_a_reserve(
    demo_store: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least half of it, so that a small machine has a cache at all."""
    free = [0]
    monkeypatch.setattr(slots_module, "_free", lambda device: free[0])
    for free[0], reserve, room in ((24 * GIB, 2 * GIB, 21 * GIB), (3 * GIB, 0, 2 * GIB), (2 * GIB, GIB, GIB)):
        assert slots_module.slot_memory("cpu", 1, reserve) == room
        assert slots_module.slot_memory("cpu", 3, reserve) == room // 3
    free[0] = 24 * GIB
    count = sum(len(layer.blobs) for layer in demo_store("float32").manifest.layers.values())
    cached = Settings(model="demo", system="on-demand", residency="lru", workers=1, slots="auto", ctx_size=64)
    assert resources(cached, demo_store("float32")).slots == count


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"loader": "memory"}, "with --loader memory, which leaves it to the kernel"),
        ({"memory": "1GB"}, "with --memory, which is for all that nodes hold"),
        ({"residency": "lru", "device_memory": "50%"}, "with --device-memory; workers on a processor keep experts in"),
        ({"residency": "lru", "slots": 2}, "with --slots; workers on a processor keep experts in host memory"),
        ({"host_memory": "lots"}, "--host-memory is 'lots'; allowed: auto, 0 .none., a share of all experts"),
    ],
)
def test_what_contradicts_it_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    asked: dict[str, Any] = {"model": "demo", "system": "on-demand", "workers": 1, "host_memory": "2GB"}
    with pytest.raises(ConfigError, match=says):
        Settings(**(asked | given))


def test_memory_for_less_than_an_expert_of_each_worker_is_refused(demo_store: Callable[[str], Any]) -> None:
    for residency in ("none", "lru"):
        settings = Settings(model="demo", system="on-demand", residency=residency, workers=2, host_memory="1kB")
        with pytest.raises(ConfigError, match="--host-memory 1kB"):
            resources(settings, demo_store("float32"))
