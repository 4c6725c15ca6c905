"""What a cluster of actors asks of a Ray that runs already, without Ray: room for its nodes, nodes that are there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from odmoe.on_ray.actors import Serving
from odmoe.on_ray.cluster import RayCluster
from odmoe.settings.settings import Settings
from scheduler.errors import LaunchError, StoreNotFoundError
from support.machines.pretended_ray import MadeError, PretendedRay, TakenError

JOINED = Settings(model="m", cluster="auto", workers=4)


def store(fingerprint: str = "f", dtype: str = "float32") -> Any:
    return SimpleNamespace(path=Path("/store"), manifest=SimpleNamespace(model_digest=fingerprint, dtype=dtype))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PretendedRay:
    return PretendedRay(monkeypatch)


@pytest.mark.parametrize("role", ["main_node", "shadow_node", "worker_node"])
def test_a_ray_cluster_that_is_too_small(role: str, ray: PretendedRay) -> None:
    with pytest.raises(MadeError):
        RayCluster(JOINED, store())
    ray.free[role] -= 1
    with pytest.raises(LaunchError, match=f"every {role} .* is busy"):
        RayCluster(JOINED, store())
    ray.free[role] += 1
    ray.offered[role] -= 1
    with pytest.raises(LaunchError, match=rf"offers {ray.offered[role]:g} {role}, .* are wanted; .*--resources"):
        RayCluster(JOINED, store())
    if role == "shadow_node":
        with pytest.raises(MadeError):
            RayCluster(JOINED.replace(shadow="none"), store())


@pytest.mark.parametrize("replace", [False, True])
def test_nodes_whose_store_was_removed_are_replaced_where_that_is_asked_for(replace: bool, ray: PretendedRay) -> None:
    ray.serving = StoreNotFoundError("no store at /gone")
    if replace:
        with pytest.raises(MadeError):
            RayCluster(JOINED, store(), replace=True)
    else:
        with pytest.raises(StoreNotFoundError, match="no store at /gone"):
            RayCluster(JOINED, store())
    assert ray.ended == replace


# --- whether what is asked for is what is served: `generate` minds what was given, `up` minds all ---------------------


class Comparison:
    """`differs(served, wanted)`: what is said of nodes that serve with `served` where `wanted` is asked for, both as
    arguments of Settings; empty where the nodes are taken. `whole`: as `odmoe up` asks."""

    def __init__(self, ray: PretendedRay) -> None:
        self._ray = ray

    def __call__(self, served: dict[str, Any], wanted: dict[str, Any], opened: Any = ..., whole: bool = False) -> str:
        self._ray.serving = Serving(Settings(cluster="auto", **served), "/store", "f", "float32")
        told: list[str] = []
        opened = store() if opened is ... else opened
        try:
            RayCluster(Settings(cluster="auto", **wanted), opened, told.append, replace=whole)
        except TakenError:
            return ""
        except MadeError:
            ending = "ending the running nodes: "
            return next(line.removeprefix(ending) for line in told if line.startswith(ending))
        except LaunchError as error:
            return str(error).removesuffix("; odmoe up with these settings changes that")
        raise AssertionError("neither taken nor refused")


@pytest.fixture
def differs(ray: PretendedRay) -> Comparison:
    return Comparison(ray)


def test_what_nobody_gives_is_taken_as_it_is(differs: Comparison) -> None:
    served = {"slots": 2, "shadow": "nf4", "workers": 3, "group_size": 1, "profile": "rtx3090-1gbe"}
    assert differs(served, {}) == ""
    assert differs(served, {"slots": 2, "dtype": "float32"}) == ""
    assert differs(served, {"slots": 1}) == "the cluster serves with --slots 2, not 1"
    assert differs(served, {"dtype": "bfloat16"}) == "the cluster serves with --dtype float32, not bfloat16"
    assert "another model" in differs(served, {}, store("g"))
    assert differs(served, {}, None) == ""
    assert "no record for --trace" in differs(served, {"trace": "f"})
    assert "no record for --record" in differs(served, {"record": "f"})
    assert differs(served | {"trace": "a", "record": "b"}, {"trace": "f", "record": "f"}) == ""


def test_up_brings_back_the_defaults(differs: Comparison) -> None:
    half = store(dtype="bfloat16")
    assert differs({}, {}, whole=True) == ""
    assert differs({}, {}, half) == ""
    assert "float32, not bfloat16 as the model has it" in differs({}, {}, half, whole=True)
    assert differs({"slots": 2}, {}, whole=True) == "the cluster serves with --slots 2, not 1"
    assert "profile" in differs({"profile": "rtx3090-1gbe"}, {}, whole=True)
    assert differs({"workers": 3}, {}, whole=True) == "the cluster serves with --workers 3, not with all that it has"
    assert differs({"group_size": 2}, {}, whole=True) == ""  # the main node has it from the cluster file
    assert differs({"slots": 2}, {"slots": 2}, whole=True) == ""


def test_another_system_is_not_taken_for_the_one_that_is_asked(differs: Comparison) -> None:
    assert differs({"system": "fate"}, {}) == ""
    assert differs({}, {"system": "fate"}) == "the cluster serves with --system od-moe, not fate"
    assert differs({}, {"precision": "int4"}) == "the cluster serves with --precision full, not int4"
    assert differs({"system": "importance"}, {"router": "top-k"}) != ""
    assert differs({"system": "importance", "alpha": 0.1}, {"system": "importance", "alpha": 0.2}) != ""
    half = {"workers": 2, "device_memory": "50%"}
    assert differs(half, {"workers": 2, "device_memory": "40%"}) != ""
    assert differs(half, {"workers": 2}) == ""
    assert "--device-memory" in differs({"workers": 2}, half, whole=True)
