"""The service's figures for Prometheus: what is counted of each request, beside what the cluster counts itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric

from odmoe.serve.api_error import TABLE
from odmoe.serve.certificate_metrics import CertificateMetrics
from odmoe.serve.cluster_metrics import ClusterMetrics

if TYPE_CHECKING:
    from main_node.report import Report
    from odmoe.clusters.base import Cluster

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the text format that every Prometheus reads."""
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Upper bounds of the histograms' buckets. Tokens that a draft has given come at once."""
FINISHES = (
    "stop",
    "stop_text",
    "length",
    "context",
    "cancelled",
    "stopped",
    "error",
    *sorted({told.code for told in TABLE.values() if told.code is not None} - {"cancelled"}),
)
"""Why answers end. A counter's series are there from the start, at 0: if one appears with 1, `increase` does not see
the 1."""
REASONS = (
    "context_length_exceeded",
    "foreign_host",
    "foreign_origin",
    "invalid_api_key",
    "invalid_http",
    "invalid_json",
    "invalid_prompt",
    "invalid_request_error",
    "invalid_value",
    "loading",
    "missing_required_parameter",
    "model_not_found",
    "no_chat_template",
    "no_route",
    "memory_full",
    "queue_full",
    "rate_limit_exceeded",
    "server_error",
    "slow_request",
    "stopped",
    "stopping",
    "too_large",
    "too_many_connections",
    "too_many_viewers",
    "unknown_parameter",
    "unsupported_parameter",
    "deadline",
)
"""Why requests are refused: the code of the error, or its type if it has none."""


class Metrics:
    """Thread-safe. Every metric has a row in docs/metrics.md. `cluster`: whose figures are read with each scrape.
    `certificates`: the folder of this host's, if any."""

    def __init__(self, cluster: Cluster, certificates: Path | None = None) -> None:
        registry = self.registry = CollectorRegistry()
        self._answers = Counter(
            "odmoe_answers_total", "Answers that have ended, by why.", ["finish"], registry=registry
        )
        self._begun = Counter(
            "odmoe_answers_begun_total",
            "Answers that were asked for: of one request there may be several.",
            registry=registry,
        )
        self._refused = Counter(
            "odmoe_refused_requests_total",
            "HTTP requests that were refused before an answer began, by why.",
            ["reason"],
            registry=registry,
        )
        for finish in FINISHES:
            self._answers.labels(finish)
        for reason in REASONS:
            self._refused.labels(reason)
        self._inexact = Counter(
            "odmoe_inexact_answers_total",
            "Answers whose tokens may not be those of the model with every expert in memory.",
            registry=registry,
        )
        self._first_token = Histogram(
            "odmoe_time_to_first_token_seconds",
            "From a request to its answer's first token.",
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self._next_token = Histogram(
            "odmoe_time_between_tokens_seconds",
            "From a token of an answer to the next.",
            buckets=NEXT_TOKEN_S,
            registry=registry,
        )
        self._waiting = Gauge("odmoe_answers_waiting", "Answers that wait for their first token.", registry=registry)
        self._under_way = Gauge(
            "odmoe_answers_under_way",
            "Answers that have their first token, and not their last.",
            registry=registry,
        )
        registry.register(ClusterMetrics(cluster))
        registry.register(CertificateMetrics(certificates))
        ProcessCollector(registry=registry)

    def on_begun(self) -> None:
        """An answer was asked for and not refused."""
        self._begun.inc()

    def on_refused(self, reason: str) -> None:
        """An HTTP request was refused before an answer began. `reason`: one of `REASONS`."""
        self._refused.labels(reason).inc()

    def on_first_token(self, seconds: float) -> None:
        """From the request to an answer's first token."""
        self._first_token.observe(seconds)

    def on_next_token(self, seconds: float) -> None:
        """Between two tokens of an answer."""
        self._next_token.observe(seconds)

    def on_ended(self, finish: str, report: Report | None) -> None:
        """An answer that began has ended. `finish`: one of `FINISHES`. `report`: None if it ended without."""
        self._answers.labels(finish).inc()
        if report is not None and not report.exact:
            self._inexact.inc()

    def watch(self, waiting: Callable[[], int], answered: Callable[[], int]) -> None:
        """Asked at each scrape, from any thread: how many answers have no token yet, and how many have one and have not
        ended."""
        self._waiting.set_function(waiting)
        self._under_way.set_function(answered)

    def render(self) -> tuple[bytes, str]:
        """The body of a scrape, and its content type. Takes as long as the cluster does to give its figures, at most
        `cluster_metrics.DEADLINE_S`."""
        return generate_latest(_Plain(self.registry)), CONTENT_TYPE


class _Plain:
    """A registry without the times at which its counters were made: in the text format each is a metric of its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
