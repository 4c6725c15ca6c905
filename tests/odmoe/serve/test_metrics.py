"""Metrics, as Prometheus' own parser reads them: of requests, of a cluster that answers, of one that does not."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from main_node.answer import collect
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.serve.api_error import TABLE
from odmoe.serve.cluster_metrics import ClusterMetrics, FiguresReader
from odmoe.serve.metrics import FIRST_TOKEN_S, NEXT_TOKEN_S, Metrics
from odmoe.settings.settings import Settings
from scheduler.errors import LinkError
from support.paths import ROOT

WAIT_S = 30.0


class Failing:
    """Its main node is not there."""

    def figures(self) -> Any:
        raise LinkError("the main node died: SIGKILL")


class Hanging:
    """Its figures come when `go` is set."""

    def __init__(self, found: Any = None) -> None:
        self.go = threading.Event()
        self.found = found
        self.asked = 0

    def figures(self) -> Any:
        self.asked += 1
        assert self.go.wait(WAIT_S)
        return self.found


class Scrape:
    """What Prometheus makes of one."""

    def __init__(self, metrics: Metrics) -> None:
        body, self.content_type = metrics.render()
        self.families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(body.decode()):
            assert family.name not in self.families, "one family, one place"
            assert family.documentation
            self.families[family.name] = family
        self.samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __getitem__(self, name: str) -> float:
        return self.samples[name,]

    def of(self, name: str, **labels: str) -> float:
        return self.samples[name, *sorted(labels.items())]

    def sum(self, name: str) -> float:
        return sum(value for (found, *_), value in self.samples.items() if found == name)


@pytest.fixture(scope="module")
def cluster(demo_store: Callable[[str], Any]) -> Iterator[EmbeddedCluster]:
    settings = Settings(model="demo", workers=2, shadow="none", threads=1)
    made = EmbeddedCluster(settings, demo_store("float32"))
    yield made
    made.close()


def test_what_a_cluster_counts_is_the_sum_of_its_reports(cluster: EmbeddedCluster, reference: Any) -> None:
    metrics = Metrics(cluster)
    before = Scrape(metrics)
    assert (before["odmoe_up"], before["odmoe_answer_tokens_total"], before["odmoe_step_requests_count"]) == (1, 0, 0)
    reports = [collect(cluster.generate(reference("float32", n, 8).prompt, 8, ignore_eos=True))[1] for n in (0, 1)]
    after = Scrape(metrics)
    assert after.content_type == "text/plain; version=0.0.4; charset=utf-8"

    def total(field: str) -> Any:
        return pytest.approx(sum(getattr(report, field) for report in reports))

    assert after["odmoe_prompt_tokens_total"] == total("prompt_tokens")
    assert after["odmoe_answer_tokens_total"] == total("new_tokens")
    assert after.of("odmoe_expert_loads_total", phase="prefill") == total("prefill_loads")
    assert after.sum("odmoe_expert_loads_total") == total("loads")
    assert after["odmoe_expert_reloads_total"] == total("reloads")
    assert after["odmoe_expert_unused_loads_total"] == total("unused_loads")
    assert after["odmoe_experts_named_total"] == total("named")
    assert after["odmoe_expert_hits_total"] == total("hits")
    assert after["odmoe_experts_host_computed_total"] == total("host_computed")
    assert after.of("odmoe_stall_seconds_total", phase="decode") == total("stall_s")
    assert after.of("odmoe_stall_seconds_total", phase="prefill") == total("prefill_stall_s")
    assert after["odmoe_experts_activated_total"] == 0, "no shadow"
    assert after["odmoe_step_requests_sum"] == after["odmoe_step_requests_count"] == 16
    assert after["odmoe_computations_total"] == reports[-1].cluster.computations
    assert after["odmoe_audits_total"] == reports[-1].cluster.audits
    assert after.sum("odmoe_audits_missed_total") == sum(reports[-1].cluster.audits_missed.values())
    # Nodes.
    workers: Any = reports[-1].memory_bytes["workers"]
    for number, nbytes in enumerate(workers):
        assert after.of("odmoe_node_memory_bytes", node=f"worker {number}") == nbytes
        assert after.of("odmoe_node_load_seconds_total", node=f"worker {number}") > 0
    assert after.of("odmoe_node_memory_bytes", node="main") == reports[-1].memory_bytes["main"]
    assert after.sum("odmoe_node_loaded_bytes_total") >= total("bytes_loaded").expected
    assert after.sum("odmoe_node_up") == 3
    (info,) = [s for s in after.families["odmoe_node_info"].samples if s.labels["node"] == "worker 1"]
    assert info.labels["role"] == "worker"
    assert info.labels["device"].startswith("cpu")
    assert ("odmoe_main_requests", ("state", "waiting")) in after.samples


def test_requests_in_a_step(cluster: EmbeddedCluster) -> None:
    figures = cluster.figures()
    figures = replace(figures, totals=replace(figures.totals, steps=Counter({1: 2, 3: 5, 70: 1})))
    found = Scrape(Metrics(SimpleNamespace(figures=lambda: figures)))  # type: ignore[arg-type]
    buckets = [found.of("odmoe_step_requests_bucket", le=le) for le in ("1.0", "2.0", "3.0", "64.0", "+Inf")]
    assert buckets == [2, 2, 7, 7, 8]
    assert (found["odmoe_step_requests_count"], found["odmoe_step_requests_sum"]) == (8, 2 + 15 + 70)


def test_counters_never_fall(cluster: EmbeddedCluster, reference: Any) -> None:
    """Scrapes during an answer and after it was given up."""
    metrics, scrapes = Metrics(cluster), []
    with cluster.generate(reference("float32", 0, 8).prompt, 8, ignore_eos=True) as answer:
        for count, _ in enumerate(answer):
            scrapes.append(Scrape(metrics))
            if count == 3:
                break
        assert scrapes[-1].of("odmoe_main_requests", state="answered") == 1
    scrapes.append(Scrape(metrics))
    assert scrapes[-1].of("odmoe_main_requests", state="answered") == 0
    for before, after in pairwise(scrapes):
        for family in before.families.values():
            for sample in family.samples if family.type in ("counter", "histogram") else ():
                assert after.of(sample.name, **sample.labels) >= sample.value, sample
    first, *_, last = scrapes
    assert last["odmoe_answer_tokens_total"] - first["odmoe_answer_tokens_total"] == 3


def test_what_is_counted_of_requests() -> None:
    metrics = Metrics(Failing())  # type: ignore[arg-type]
    for _ in range(3):
        metrics.on_begun()
    metrics.on_refused("queue_full")
    metrics.on_first_token(0.2)
    metrics.on_first_token(700.0)
    metrics.on_next_token(0.03)
    metrics.on_ended("stop", SimpleNamespace(exact=True))  # type: ignore[arg-type]
    metrics.on_ended("stop", SimpleNamespace(exact=False))  # type: ignore[arg-type]
    metrics.on_ended("cancelled", None)
    metrics.watch(lambda: 4, lambda: 2)
    found = Scrape(metrics)
    assert found.of("odmoe_answers_total", finish="stop") == 2
    assert found.of("odmoe_answers_total", finish="cancelled") == 1
    assert found.of("odmoe_refused_requests_total", reason="queue_full") == 1
    assert (found["odmoe_answers_begun_total"], found["odmoe_inexact_answers_total"]) == (3, 1)
    assert (found["odmoe_answers_waiting"], found["odmoe_answers_under_way"]) == (4, 2)
    ttft = "odmoe_time_to_first_token_seconds"
    assert found[f"{ttft}_sum"] == pytest.approx(700.2)
    counts = [found.of(f"{ttft}_bucket", le=le) for le in ("0.1", "0.25", "600.0", "+Inf")]
    assert counts == [0, 1, 1, 2]
    assert found.of("odmoe_time_between_tokens_seconds_bucket", le="0.03") == 1
    assert FIRST_TOKEN_S[0] <= 0.01
    assert NEXT_TOKEN_S[0] <= 0.01
    assert min(FIRST_TOKEN_S[-1], NEXT_TOKEN_S[-1]) >= 120
    assert not [name for name in found.families if name.endswith("_created")]
    assert found["process_resident_memory_bytes"] > 0


CODES = {
    code for file in (ROOT / "odmoe" / "serve").rglob("*.py") for code in re.findall(r'code="(\w+)"', file.read_text())
}
"""Of the errors that the service itself makes."""


def test_every_end_and_every_refusal_is_there_before_it_happens() -> None:
    """`increase` does not see the first one of a series that begins with it."""
    assert {"deadline", "stopped", "invalid_api_key", "no_route"} <= CODES
    found = Scrape(Metrics(Failing()))  # type: ignore[arg-type]
    known = {told.code for told in TABLE.values() if told.code is not None}
    for finish in {"stop", "stop_text", "length", "context", "error", "deadline", "stopped", *known}:
        assert found.samples[("odmoe_answers_total", ("finish", finish))] == 0
    for reason in {"queue_full", "invalid_prompt", "invalid_request_error", *CODES}:
        assert found.samples[("odmoe_refused_requests_total", ("reason", reason))] == 0


def test_a_cluster_that_is_gone_costs_its_own_figures_alone(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(Failing())  # type: ignore[arg-type]
    metrics.on_begun()
    for _ in range(2):
        found = Scrape(metrics)
        assert (found["odmoe_up"], found["odmoe_answers_begun_total"]) == (0, 1)
        assert "odmoe_expert_loads" not in found.families
        assert "odmoe_node_up" not in found.families
    assert [record.message for record in caplog.records] == ["no figures of the cluster: the main node died: SIGKILL"]


def test_a_defect_costs_its_own_figures_alone(caplog: pytest.LogCaptureFixture) -> None:
    broken = SimpleNamespace(figures=lambda: {}["nothing"])
    found = Scrape(Metrics(broken))  # type: ignore[arg-type]
    assert found["odmoe_up"] == 0
    assert "KeyError" in caplog.text


def test_a_cluster_that_hangs_is_asked_once_and_not_waited_for(cluster: EmbeddedCluster) -> None:
    hanging = Hanging(cluster.figures())
    reader = FiguresReader(hanging, deadline_s=0.01)  # type: ignore[arg-type]
    assert [reader.read() for _ in range(3)] == [None] * 3
    assert hanging.asked == 1, "a thread waits already"
    hanging.go.set()
    assert reader._pending is not None
    assert reader._pending.result(WAIT_S) is hanging.found
    reader = FiguresReader(hanging, deadline_s=WAIT_S)  # type: ignore[arg-type]
    assert reader.read() is hanging.found
    assert reader.read() is hanging.found
    assert hanging.asked == 3, "what has come is not given a second time"


def test_every_metric_is_described_before_there_is_a_cluster(cluster: EmbeddedCluster) -> None:
    """A registry refuses two metrics of one name, where it knows them."""
    described = {(one.name, one.type) for one in ClusterMetrics(Failing()).describe()}  # type: ignore[arg-type]
    assert {(one.name, one.type) for one in ClusterMetrics(cluster).collect()} == described
