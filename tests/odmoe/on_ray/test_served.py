"""Whether what is asked for is what is served: `generate` minds what was said, `up` minds all."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from odmoe.clusters.process import prepare_ray
from odmoe.settings.settings import Settings

STORE: Any = SimpleNamespace(manifest=SimpleNamespace(fingerprint="f", dtype="float32"))
OTHER: Any = SimpleNamespace(manifest=SimpleNamespace(fingerprint="g", dtype="float32"))
HALF: Any = SimpleNamespace(manifest=SimpleNamespace(fingerprint="f", dtype="bfloat16"))


@pytest.fixture
def differs() -> Any:
    """`differs(served, wanted, ...)`, both as keyword arguments of Settings."""
    prepare_ray("local")  # before Ray is imported
    cluster, actors = (importlib.import_module(f"odmoe.on_ray.{name}") for name in ("cluster", "actors"))

    def ask(served: dict[str, Any], wanted: dict[str, Any], store: Any = STORE, whole: bool = False) -> str | None:
        runs = actors.Serving(Settings(cluster="auto", **served), "/store", "f", "float32")
        return cluster._differs(runs, Settings(cluster="auto", **wanted), store, whole)

    return ask


def test_what_nobody_says_is_taken_as_it_is(differs: Any) -> None:
    served = {"slots": 2, "shadow": "nf4", "workers": 3, "group_size": 1, "profile": "rtx3090-1gbe"}
    assert differs(served, {}) is None
    assert differs(served, {"slots": 2, "dtype": "float32"}) is None
    assert differs(served, {"slots": 1}) == "the cluster serves with --slots 2, not 1"
    assert differs(served, {"dtype": "bfloat16"}) == "the cluster serves with --dtype float32, not bfloat16"
    assert "another model" in differs(served, {}, OTHER)
    assert differs(served, {}, None) is None
    assert "no record for --trace" in differs(served, {"trace": "f"})
    assert "no record for --record" in differs(served, {"record": "f"})
    assert differs(served | {"trace": "a", "record": "b"}, {"trace": "f", "record": "f"}) is None


def test_up_brings_back_the_defaults(differs: Any) -> None:
    assert differs({}, {}, whole=True) is None
    assert differs({}, {}, HALF) is None
    assert "float32, not bfloat16 as the model has it" in differs({}, {}, HALF, whole=True)
    assert differs({"slots": 2}, {}, whole=True) == "the cluster serves with --slots 2, not 1"
    assert "profile" in differs({"profile": "rtx3090-1gbe"}, {}, whole=True)
    assert differs({"workers": 3}, {}, whole=True) == "the cluster serves with --workers 3, not with all that it has"
    assert differs({"group_size": 2}, {}, whole=True) is None  # the main node has it from the cluster file
    assert differs({"slots": 2}, {"slots": 2}, whole=True) is None


def test_another_system_is_not_taken_for_the_one_that_is_asked(differs: Any) -> None:
    assert differs({"system": "fate"}, {}) is None
    assert differs({}, {"system": "fate"}) == "the cluster serves with --system od-moe, not fate"
    assert differs({}, {"precision": "int4"}) == "the cluster serves with --precision full, not int4"
    assert differs({"system": "importance"}, {"router": "top-k"}) is not None
    assert differs({"system": "importance", "alpha": 0.1}, {"system": "importance", "alpha": 0.2}) is not None
    half = {"workers": 2, "device_memory": "50%"}
    assert differs(half, {"workers": 2, "device_memory": "40%"}) is not None
    assert differs(half, {"workers": 2}) is None
    assert "--device-memory" in differs({"workers": 2}, half, whole=True)
