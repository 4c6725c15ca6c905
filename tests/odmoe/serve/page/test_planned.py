"""The plan that stands beside what is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

import odmoe
from odmoe.serve.page.planned import ClusterPlan
from scheduler.errors import LinkError
from support.machines.http_service import DEMO, Served, demo_model, serving


def _gone() -> Any:
    raise LinkError("10.0.0.7 is gone")


def planned(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = httpx2.get(f"{served.url}/cluster/plan", timeout=30.0).json()
    return found


def test_memory_is_planned_and_why_there_is_no_speed(served: Served) -> None:
    """The shipped checkpoint has the dtype of the store, and `odmoe.plan` reads its configuration alone."""
    found = planned(served)
    assert (found["tokens_per_s"], "compute on a processor" in found["why"]) == (None, True)
    context = served.service.context
    told = odmoe.plan(DEMO, dtype="float32", workers=2, slots=1, shadow="none", context=context).memory_bytes
    memory = found["memory"]
    assert memory["worker"] + memory["expert"] == told["worker"]
    assert (memory["main"], memory["shadow"]) == (told["main"], 0)
    served.client().completions.create(model="demo-moe", prompt="HAMLET", max_tokens=4)
    used = {node.name: node for node in served.service.model.cluster.figures().nodes}
    assert (used["main"].memory_bytes or 0) <= memory["main"]
    assert (used["worker 0"].memory_bytes or 0) <= memory["worker"] + used["worker 0"].slots * memory["expert"]


def test_other_systems_have_no_speed(demo_store: Callable[[str], Any]) -> None:
    with demo_model(demo_store("float32"), system="importance") as model, serving(model) as served:
        assert planned(served)["why"] == "it plans od-moe, and this cluster runs importance"


def test_a_cluster_that_cannot_be_asked_has_no_plan(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page gets no name or place, which the log has."""
    told: list[str] = []
    monkeypatch.setattr(served.service.model.cluster, "figures", _gone)
    monkeypatch.setattr(served.service, "log_cause", told.append)
    found = ClusterPlan(served.service)._make()
    assert "log" in found["why"]
    assert "10.0.0.7" not in found["why"]
    assert "10.0.0.7" in told[0]


def test_a_passing_failure_is_not_kept(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ClusterPlan(served.service)

    async def ask_thrice() -> list[dict[str, Any]]:
        with monkeypatch.context() as lost:
            lost.setattr(served.service.model.cluster, "figures", _gone)
            lost.setattr(served.service, "log_cause", lambda text: None)
            first = await plan.get()
        return [first, await plan.get(), await plan.get()]

    failed, made, again = asyncio.run(ask_thrice())
    assert (failed["memory"], again is made) == ({}, True)
    assert made["memory"] == planned(served)["memory"]


@pytest.mark.slow
def test_an_emulated_cluster_is_as_fast_as_planned(demo_store: Callable[[str], Any]) -> None:
    """Without a shadow, where no prediction is drawn by chance."""
    emulated = demo_model(demo_store("float32"), system="od-moe", workers=8, profile="rtx3090-1gbe")
    with emulated as model, serving(model) as served:
        found = planned(served)
        report = model.generate("HAMLET", max_new_tokens=12, ignore_eos=True).report
    assert found["hardware"] == "rtx3090-1gbe"
    assert report.decode_tokens_per_s == pytest.approx(found["tokens_per_s"], rel=0.1)
