"""What the nodes of a cluster are made with."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from checkpoint.prediction.token_predictor import FILE
from checkpoint.sharding.form_files import add_forms
from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore
from odmoe.clusters.configuration import (
    Resources,
    check_checkpoint,
    check_fits,
    configure,
    core_config,
    find_token_predictor,
    forms_needed,
    resources,
    with_precision,
)
from odmoe.clusters.memory.slots import _free, slot_memory
from odmoe.settings.settings import Settings
from scheduler.errors import ConfigError
from scheduler.policies.registry import forms_of
from scheduler.policies.systems import SYSTEMS
from scheduler.types import ModelShape

FULL = ("",)


@pytest.fixture(scope="module")
def demo_forms(demo_store: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """The demo model's store with both forms."""
    copied = shutil.copytree(demo_store("float32").path, tmp_path_factory.mktemp("forms") / "store")
    return add_forms(ExpertStore.open(Path(copied)), ("int4", "int2"))


TOP_10 = ModelShape(layers=(0,), experts=64, top_k=10)


@pytest.mark.parametrize(
    ("given", "group"),
    [
        ({"cluster": "auto"}, 10),
        ({"cluster": "auto", "group_size": 12}, 12),
        ({"cluster": "auto", "workers": 4}, 4),
        ({"cluster": "local"}, 8),
        ({"cluster": "local", "workers": 12}, 10),
    ],
)
def test_groups_of_a_model_of_top_10(given: dict[str, Any], group: int) -> None:
    """How many workers a Ray cluster has is not known beforehand: the default number bounds nothing there."""
    assert core_config(Settings(model="m", **given), TOP_10).group_size == group


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({}, False),
        ({"profile": "rtx3090-pcie3@10"}, False),
        ({"profile": "rtx3090-1gbe"}, True),
        ({"cluster": "local"}, True),
    ],
)
def test_rows_are_sent_in_parts_where_they_travel(given: dict[str, Any], parts: bool, demo_store: Any) -> None:
    """A machine that is emulated has no network."""
    core = configure(Settings(model="m", system="on-demand", workers=1, **given), demo_store("float32")).core
    assert (core.mini_batch is None) is parts
    assert core.mini_batch is None or core.mini_batch > 1024


def test_a_core_has_the_settings_own_system() -> None:
    settings = Settings(model="m", system="importance", alpha=0.1, align_kv=2, mini_batch=3)
    core = core_config(settings, TOP_10)
    assert (core.shape, core.alignment, core.mini_batch) == (TOP_10, settings.alignment, 3)
    assert core.system == settings.system_config
    assert core.system.alpha == 0.1
    assert core_config(Settings(model="m", shadow="none"), TOP_10).system == SYSTEMS["on-demand"].config


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, Resources(8, 1, FULL)),
        ({"slots": 3, "workers": 2}, Resources(2, 3, FULL)),
        ({"system": "fully-cached"}, Resources(8, 8, FULL)),
        ({"system": "fully-cached", "workers": 3}, Resources(3, 22, FULL)),
        ({"residency": "all", "workers": 2, "slots": 40}, Resources(2, 40, FULL)),
        ({"system": "fully-cached", "device_memory": "100%"}, Resources(8, 8, FULL)),
        ({"system": "fully-cached", "device_memory": "100%", "workers": 3}, Resources(3, 22, FULL)),
        ({"workers": 3, "device_memory": "99%"}, Resources(3, 21, FULL)),
        ({"workers": 4, "device_memory": "50%"}, Resources(4, 8, FULL)),
        ({"workers": 1, "device_memory": "100%"}, Resources(1, 64, FULL)),
        ({"cluster": "auto", "slots": 2}, Resources(None, 2, FULL)),
    ],
    ids=str,
)
def test_slots_as_given_or_as_many_as_fit(
    given: dict[str, Any], found: Resources, demo_store: Callable[[str], Any]
) -> None:
    """The demo model has 64 experts in all."""
    assert resources(Settings(model="demo", **given), demo_store("float32")) == found


MIB = 1 << 20


@pytest.mark.parametrize(
    ("free", "given", "workers_here", "slots"),
    [
        (1 << 40, {}, None, 2),
        (1 << 40, {"system": "fully-cached"}, None, 8),  # a slot for every expert, whatever the memory
        (1 << 40, {"residency": "lru"}, None, 8),  # all of the model's 64 experts, an eighth each
        (1 << 40, {"residency": "lru", "cluster": "auto"}, 1, 64),
        (22 * MIB, {"residency": "lru", "workers": 1}, None, 17),  # half of it
        (20 * MIB, {"residency": "lru", "cluster": "auto"}, 2, 7),  # half of it, for each of two half of that
        (0, {"residency": "lru"}, None, 1),
        (22 * MIB, {}, None, 2),  # half of it for 16 of the demo model's experts of 0.66 MB
        (20 * MIB, {}, None, 1),
        (20 * MIB, {"workers": 2}, None, 2),
        (20 * MIB, {"cluster": "auto"}, 1, 2),  # of the cluster's workers one is on this machine
        (20 * MIB, {"cluster": "auto"}, 8, 1),
        (0, {}, None, 1),
        (0, {"workers": 4, "device_memory": "50%"}, None, 2),  # room for eight
        (1 << 40, {"device_memory": "20%"}, None, 1),
        (1 << 40, {"workers": 4, "device_memory": "50%", "residency": "lru"}, None, 8),
    ],
)
def test_slots_by_the_memory_of_a_worker(
    free: int,
    given: dict[str, Any],
    workers_here: int | None,
    slots: int,
    demo_store: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("odmoe.clusters.memory.slots._free", lambda device: free)
    store = demo_store("float32")
    assert store.manifest.blob_bytes * 2 * 8 * 2 in range(20 * MIB, 22 * MIB)
    found = resources(Settings(model="demo", slots="auto", **given), store, workers_here)
    assert found.slots == slots


def test_free_memory_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers of a process get the same, though the first has taken its slots by then."""
    amounts = iter((1000, 10))
    monkeypatch.setattr("odmoe.clusters.memory.slots.available_memory", lambda: next(amounts))
    _free.cache_clear()
    try:
        assert [slot_memory("cpu", workers) for workers in (1, 2, 4)] == [500, 250, 125]
    finally:
        _free.cache_clear()


BUDGET = {"workers": 1, "device_memory": "100%"}


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ({"system": "fate"} | BUDGET, "full"),
        ({"system": "hobbit"} | BUDGET, "full"),
        ({"system": "mixtral-offloading"} | BUDGET, "full"),
        ({"system": "fate", "device_memory": "100%", "workers": 2}, "full"),
        ({"system": "fate", "workers": 1, "device_memory": "99%"}, "popular"),
        ({"system": "fate", "smaller_forms": "always"} | BUDGET, "popular"),
        ({"precision": "int4"} | BUDGET, "int4"),  # nothing stays: each use is a load
        ({"system": "hobbit", "slots": 64}, "full"),  # slots of the full form
        ({"system": "hobbit", "slots": 63}, "mixed"),
        ({"system": "fate", "slots": 64}, "popular"),  # slots of int4
        ({"system": "fate", "slots": 640}, "full"),
        ({"system": "fully-cached", "precision": "int4"}, "int4"),
        ({"system": "fate", "cluster": "auto", "slots": 640}, "popular"),  # of how many workers?
        ({"system": "fate"}, "popular"),
        ({"system": "fate", "slots": "auto"}, "full"),
    ],
    ids=str,
)
def test_full_precision_where_every_expert_fits_in_full(
    given: dict[str, Any], precision: str, demo_store: Callable[[str], Any]
) -> None:
    """The demo model has 64 experts, and its store no other form yet."""
    store, settings = demo_store("float32"), Settings(model="demo", **given)
    found = with_precision(settings, store)
    assert found.system_config == settings.replace(precision=precision).system_config
    assert forms_needed(settings, store) == forms_of(found.system_config)
    assert with_precision(found, store).system_config == found.system_config
    if precision == "full":
        configured = configure(settings, store)
        assert configured.resources == resources(found, store)
        assert configured.core.system.precision == "full"


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "own", "forms"), [(1, 640, ("int4",)), (640, 1, FULL)])
def test_a_host_with_slots_of_its_own_loads_the_forms_that_the_core_asks_for(
    slots: int, own: int, forms: tuple[str, ...], demo_forms: ExpertStore
) -> None:
    """The core has one precision, decided on with the settings that all hosts share."""
    given = {"system": "fate", "cluster": "auto", "workers": 1, "slots": slots}
    found = configure(Settings(model="demo", **given), demo_forms)
    assert set(forms) <= set(forms_of(found.core.system))
    on_host = resources(found.settings.replace(slots=own), demo_forms)
    assert (on_host.slots, on_host.forms) == (own, forms_of(found.core.system))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "slots", "full_slots"),
    [
        ({"system": "fate", "device_memory": "50%", "workers": 1}, range(60, 65), [32]),
        ({"system": "hobbit", "device_memory": "50%", "workers": 2}, range(12, 16), [16]),
        ({"system": "fate", "slots": 1}, [1], [1]),  # room for a restored expert is room for a full one
        ({"system": "fully-cached", "precision": "int4", "workers": 1}, [64], [0]),  # all must stay
        ({"system": "on-demand"}, [1], [0]),
    ],
    ids=str,
)
def test_slots_for_the_full_form_in_the_same_memory(
    given: dict[str, Any], slots: Any, full_slots: Any, demo_forms: ExpertStore
) -> None:
    found = resources(Settings(model="demo", **given), demo_forms)
    assert found.slots in slots
    assert found.full_slots in full_slots


def test_a_cluster_of_unknown_size_cannot_be_started_to_keep_everything(demo_store: Callable[[str], Any]) -> None:
    """Where its nodes run already, it can be asked for."""
    settings, store = Settings(model="demo", cluster="auto", system="fully-cached"), demo_store("float32")
    check_fits(settings, store)
    with pytest.raises(ConfigError, match="--cluster auto is not known here; give --workers or --slots"):
        configure(settings, store)
    assert configure(settings.replace(workers=4), store).resources.slots == 16


def test_too_few_slots_are_refused(demo_store: Callable[[str], Any]) -> None:
    settings = Settings(model="demo", system="fully-cached", device_memory="50%")
    for check in (configure, check_fits):
        with pytest.raises(ConfigError, match="64 slots are needed, 32 are there"):
            check(settings, demo_store("float32"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub that cannot be reached, and the snapshot of org/name in the local cache."""
    revision = "0" * 40
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    download = functools.partial(huggingface_hub.snapshot_download, cache_dir=tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: pytest.fail("the Hub was asked"))
    return snapshot


def test_the_token_predictor_is_found_where_training_writes_it(
    hub: Path, monkeypatch: pytest.MonkeyPatch, demo_store: Callable[[str], Any], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home = tmp_path / "models" / "x"
    home.mkdir(parents=True)
    for name, folder in (("org/name", hub), ("~/models/x", home)):
        (folder / FILE).touch()
        assert find_token_predictor(Settings(model=name, system="smoe"), demo_store("float32")) == folder / FILE


@pytest.mark.usefixtures("hub")
def test_a_model_that_this_host_does_not_have_is_not_fetched(demo_store: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match="make them with odmoe train-predictor org/other"):
        find_token_predictor(Settings(model="org/other", system="smoe"), demo_store("float32"))


def test_a_head_is_missed_before_a_store_is_made(demo: Path, demo_store: Callable[[str], Any]) -> None:
    settings = Settings(model=str(demo), shadow="none", draft=2, draft_from="mtp")
    with pytest.raises(
        ConfigError, match=r"own MTP head, and the checkpoint at .*'mixtral', of which none can be read"
    ):
        check_checkpoint(settings, open_source(demo))
    with pytest.raises(ConfigError, match=r"own MTP head, and the store at .*'mixtral', of which none can be read"):
        check_fits(settings, demo_store("float32"))
