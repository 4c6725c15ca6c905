"""What `auto` becomes on a machine with two GPUs, as torch tells of them: they are never used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkpoint.store import ExpertStore
from odmoe.clusters.device_choice import choice_text, choose_devices, role_bytes
from odmoe.clusters.devices import device_of, with_workers_of
from odmoe.machines.cluster_file import Host, worker_settings
from odmoe.settings.settings import Settings
from shadow_node.model import ShadowModel
from support.paths import DEMO

GIB = 1 << 30


@pytest.fixture
def store(demo_store: Callable[[str], ExpertStore]) -> ExpertStore:
    return demo_store("float32")


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """By GPU, its free bytes; each has 1 GiB in all. A test may change them."""
    found = {0: GIB, 1: GIB}
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (found[device.index], GIB))
    return found


def settings(**more: Any) -> Settings:
    return Settings(model=str(DEMO), workers=2, **more)


def chosen(store: ExpertStore, **more: Any) -> tuple[str, str]:
    """The devices of main node and shadow."""
    found = choose_devices(settings(**more), store)
    return str(device_of(found, "main")), str(device_of(found, "shadow"))


@pytest.mark.parametrize(
    ("given", "main", "shadow"),
    [
        ({}, "cpu", "cpu"),
        ({"loader": "memory"}, "cpu", "cpu"),
        ({"loader": "cuda"}, "cuda:0", "cuda:0"),
        ({"worker_device": "cuda:1"}, "cuda:1", "cuda:1"),
        ({"worker_device": "cuda:1", "shadow_device": "cpu"}, "cuda:1", "cpu"),
        ({"main_device": "cuda:1"}, "cuda:1", "cpu"),
        ({"device": "cuda", "worker_device": "cpu"}, "cuda:0", "cuda:0"),
        ({"worker_device": "cuda:7"}, "cuda:0", "cuda:0"),
    ],
)
def test_auto_is_the_workers_kind(given: dict[str, str], main: str, shadow: str, store: ExpertStore) -> None:
    """Workers on a device that another machine has, too."""
    if given.get("worker_device") == "cuda:7":
        found = settings(**given)
        assert (str(device_of(found, "main")), str(device_of(found, "shadow"))) == (main, shadow)
    else:
        assert chosen(store, **given) == (main, shadow)


def test_it_is_the_processor_where_a_roles_weights_do_not_fit(
    free: dict[int, int], store: ExpertStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside the workers' slots and a tenth of the memory. One that was asked for is not second-guessed."""
    slots = 2 * store.manifest.blob_bytes
    main, shadow = (role_bytes(store, role, "int8") for role in ("main", "shadow"))
    spare = GIB // 10 + 1
    free[0] = spare + slots + main + shadow
    assert chosen(store, loader="cuda") == ("cuda:0", "cuda:0")
    free[0] -= 2
    assert chosen(store, loader="cuda") == ("cuda:0", "cpu")
    assert "the shadow computes on the processor: its weights take " in caplog.text
    assert "--shadow-device cuda:0 puts it there all the same" in caplog.text
    free[0] = spare + slots + main - 2
    assert chosen(store, loader="cuda") == ("cpu", "cpu")
    assert chosen(store, device="cuda") == ("cuda:0", "cuda:0")
    assert chosen(store, loader="cuda", main_device="cuda:0") == ("cuda:0", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp16", "int8", "nf4"])
def test_a_shadow_is_not_larger_than_is_thought(scheme: str, store: ExpertStore) -> None:
    """On the processor, where what is not quantised has twice the bytes."""
    held = ShadowModel(store, scheme).device_bytes
    assert 0.5 * held < role_bytes(store, "shadow", scheme) < 1.5 * held


def test_the_main_nodes_bytes_are_those_of_its_weights(store: ExpertStore, embedded: Any) -> None:
    cluster = embedded(shadow="none")
    assert role_bytes(store, "main", "none") == pytest.approx(cluster.main.weight_bytes, rel=0.02)


def test_it_is_said_at_the_start(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(**given: Any) -> str:
        asked = settings(**given)
        return choice_text(asked, choose_devices(asked, store))

    assert said() == " on the processor; --device cuda is for the accelerator"
    assert said(loader="cuda") == "; main node on cuda:0, shadow on cuda:0"
    assert said(loader="cuda", shadow="none") == "; main node on cuda:0"
    assert said(device="cpu") == said(device="cuda") == ""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert said() == ""


def test_hosts_whose_workers_are_all_on_gpus_take_the_others_with_them() -> None:
    given = settings()
    on = Host("worker_node", 0, "10.0.0.3", settings={"worker_device": "cuda:1"})
    off = Host("worker_node", 1, "10.0.0.4", settings={"slots": 2})
    shadow = Host("shadow_node", 0, "10.0.0.2", settings={"slots": 2})
    on, both, alone = (worker_settings(hosts) for hosts in ([shadow, on, on], [on, off], [shadow]))
    assert str(device_of(with_workers_of(given, on), "main")) == "cuda:0"
    for hosts in (both, alone, []):
        assert with_workers_of(given, hosts) == given
    assert str(device_of(with_workers_of(settings(main_device="cpu"), on), "main")) == "cpu"
