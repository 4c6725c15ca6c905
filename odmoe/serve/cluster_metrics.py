"""What a cluster counts, as metrics that are read with each scrape."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from scheduler.errors import ODMoEError

if TYPE_CHECKING:
    from main_node.figures import Figures, NodeFigures
    from odmoe.clusters.base import Cluster

DEADLINE_S = 5.0
"""How long a scrape waits for the cluster's figures. Prometheus itself gives a scrape 10 s unless told otherwise."""
STEP_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Upper bounds of the buckets of requests in a step."""
_log = logging.getLogger(__name__)


class FiguresReader:
    """Asks a cluster for its figures in a thread of its own. Thread-safe."""

    def __init__(self, cluster: Cluster, deadline_s: float = DEADLINE_S) -> None:
        self._cluster, self._deadline_s = cluster, deadline_s
        self._lock = threading.Lock()
        self._pending: Future[Figures] | None = None
        self._trouble = ""
        """Why there were none the last time."""

    def read(self) -> Figures | None:
        """None: the cluster has no figures just now, or does not give them in time. However often it is asked, one
        thread at most waits for it."""
        with self._lock:
            if self._pending is None or self._pending.done():
                self._pending = Future()
                threading.Thread(target=self._ask, args=(self._pending,), name="figures", daemon=True).start()
            pending = self._pending
        try:
            found = pending.result(self._deadline_s)
        except ODMoEError as error:
            self._log_change(str(error))
            return None
        except TimeoutError:
            self._log_change(f"it has not answered within {self._deadline_s:g} s")
            return None
        except Exception:  # noqa: BLE001 - a defect, which must not cost the figures of requests too
            _log.exception("the cluster's figures cannot be read")
            return None
        self._log_change("")
        return found

    def _ask(self, pending: Future[Figures]) -> None:
        try:
            pending.set_result(self._cluster.figures())
        except BaseException as error:  # noqa: BLE001 - raised in `read`
            pending.set_exception(error)

    def _log_change(self, trouble: str) -> None:
        """Once for each trouble, and once when it is over."""
        with self._lock:
            before, self._trouble = self._trouble, trouble
        if trouble and trouble != before:
            _log.warning("no figures of the cluster: %s", trouble)
        elif before and not trouble:
            _log.info("the cluster gives its figures again")


class ClusterMetrics:
    """A collector for a registry. Without figures there is `odmoe_up` alone, at 0."""

    def __init__(self, cluster: Cluster, deadline_s: float = DEADLINE_S) -> None:
        self._reader = FiguresReader(cluster, deadline_s)

    def describe(self) -> Iterable[Metric]:
        """The metrics without values."""
        return [_up(None), *_requests(None), *_experts(None), *_checks(None), *_nodes(()), *_links(())]

    def collect(self) -> Iterable[Metric]:
        figures = self._reader.read()
        if figures is None:
            return [_up(None)]
        nodes = figures.nodes
        every = (_requests(figures), _experts(figures), _checks(figures), _nodes(nodes), _links(nodes))
        return [_up(figures), *itertools.chain.from_iterable(every)]


def _up(figures: Figures | None) -> Metric:
    text = "Whether the cluster gave its figures in time. At 0 every metric that is read from it is missing."
    return GaugeMetricFamily("odmoe_up", text, value=int(figures is not None))


def _requests(figures: Figures | None) -> list[Metric]:
    at_once = GaugeMetricFamily("odmoe_main_requests", "Requests of all clients at the main node.", labels=["state"])
    read = CounterMetricFamily("odmoe_prompt_tokens_total", "Tokens of prompts that the main node has begun to read.")
    found = CounterMetricFamily("odmoe_cached_tokens_total", "Tokens of prompts that the prefix cache had.")
    answer = CounterMetricFamily("odmoe_answer_tokens_total", "Tokens of answers that the main node has computed.")
    steps = HistogramMetricFamily("odmoe_step_requests", "Requests whose passes ran together, by step.")
    drafted = CounterMetricFamily("odmoe_drafts_verified_total", "Drafts of tokens that passes have verified.")
    accepted = CounterMetricFamily("odmoe_drafts_accepted_total", "Drafts that the main model chose itself.")
    if figures is not None:
        totals = figures.totals
        at_once.add_metric(["answered"], figures.answered)
        at_once.add_metric(["waiting"], figures.waiting)
        read.add_metric([], totals.prompt_tokens)
        found.add_metric([], totals.cached_tokens)
        answer.add_metric([], totals.answer_tokens)
        bounds = [(str(float(bound)), float(bound)) for bound in STEP_BOUNDS] + [("+Inf", float("inf"))]
        buckets = [(name, sum(n for size, n in totals.steps.items() if size <= bound)) for name, bound in bounds]
        steps.add_metric([], buckets, sum(size * n for size, n in totals.steps.items()))
        drafted.add_metric([], totals.drafted)
        accepted.add_metric([], totals.accepted)
    return [at_once, read, found, answer, steps, drafted, accepted]


def _experts(figures: Figures | None) -> list[Metric]:
    loads = CounterMetricFamily("odmoe_expert_loads_total", "Expert loads begun.", labels=["phase"])
    stall = CounterMetricFamily(
        "odmoe_stall_seconds_total", "Time for which requests waited for loads, of each request.", labels=["phase"]
    )
    counted = {
        "reloads": CounterMetricFamily(
            "odmoe_expert_reloads_total", "Loads of decoding begun after the gate: no prediction had named the expert."
        ),
        "unused_loads": CounterMetricFamily(
            "odmoe_expert_unused_loads_total", "Loads begun ahead of a gate that did not choose the expert."
        ),
        "named": CounterMetricFamily("odmoe_experts_named_total", "Experts that decoding's gates chose, of each row."),
        "hits": CounterMetricFamily("odmoe_expert_hits_total", "Named experts that were in a slot at their gate."),
        "host_computed": CounterMetricFamily(
            "odmoe_experts_host_computed_total", "Named experts that a host place computed."
        ),
        "activated": CounterMetricFamily(
            "odmoe_experts_activated_total", "Experts of decoding's gates whose layer was predicted."
        ),
        "predicted": CounterMetricFamily(
            "odmoe_experts_predicted_total", "Activated experts that the prediction had named."
        ),
        "unpredicted": CounterMetricFamily(
            "odmoe_experts_unpredicted_total", "Experts of decoding's gates whose prediction never came."
        ),
        "late_predictions": CounterMetricFamily(
            "odmoe_late_predictions_total", "Predictions of a layer that came after its gate."
        ),
    }
    if figures is not None:
        totals = figures.totals
        loads.add_metric(["prefill"], totals.prefill_loads)
        loads.add_metric(["decode"], totals.loads - totals.prefill_loads)
        stall.add_metric(["prefill"], totals.prefill_stall_s)
        stall.add_metric(["decode"], totals.stall_s)
        for name, family in counted.items():
            family.add_metric([], getattr(totals, name))
    return [loads, stall, *counted.values()]


def _checks(figures: Figures | None) -> list[Metric]:
    computations = CounterMetricFamily("odmoe_computations_total", "Computations of workers, without those of audits.")
    audits = CounterMetricFamily("odmoe_audits_total", "Computations that were done twice and compared.")
    missed = CounterMetricFamily(
        "odmoe_audits_missed_total", "Attempts at an audit that came to nothing, by why.", labels=["reason"]
    )
    if figures is not None:
        computations.add_metric([], figures.cluster.computations)
        audits.add_metric([], figures.cluster.audits)
        for reason, count in sorted(figures.cluster.audits_missed.items()):
            missed.add_metric([reason], count)
    return [computations, audits, missed]


def _nodes(nodes: Iterable[NodeFigures]) -> list[Metric]:
    info = InfoMetricFamily("odmoe_node", "Where a node runs, and on what.", labels=["node"])
    up = _gauge("odmoe_node_up", "Whether the node is connected.")
    memory = _gauge("odmoe_node_memory_bytes", "Most bytes of weights, slots and caches that the node has held.")
    slots = _gauge("odmoe_node_slots", "Slots of a worker.")
    measured = _gauge("odmoe_node_load_bytes_per_second", "Bandwidth of a worker's loads, measured when it started.")
    round_trip = _gauge("odmoe_node_round_trip_seconds", "Of a small message, measured when the node joined.")
    suspect = _gauge("odmoe_node_suspect", "Whether a wrong output of the worker is known.")
    loads = _counter("odmoe_node_loads_total", "Loads of a worker that have ended.")
    nbytes = _counter("odmoe_node_loaded_bytes_total", "Bytes of these loads.")
    seconds = _counter("odmoe_node_load_seconds_total", "Time that these loads took.")
    lost = _counter("odmoe_node_lost_total", "How often the node was lost.")
    rejoined = _counter("odmoe_node_rejoined_total", "How often it came back.")
    for node in nodes:
        name = [node.name]
        info.add_metric(name, {"role": node.role, "host": node.host, "device": node.device, "loader": node.loader})
        up.add_metric(name, node.up)
        if node.memory_bytes is not None:
            memory.add_metric(name, node.memory_bytes)
        if node.role == "worker":
            slots.add_metric(name, node.slots)
            suspect.add_metric(name, node.suspect)
            loads.add_metric(name, node.loads)
            nbytes.add_metric(name, node.bytes_loaded)
            seconds.add_metric(name, node.load_s)
            if node.measured_load_bytes_per_s is not None:
                measured.add_metric(name, node.measured_load_bytes_per_s)
        if node.role != "main":
            lost.add_metric(name, node.lost)
            rejoined.add_metric(name, node.rejoined)
            if node.round_trip_s is not None:
                round_trip.add_metric(name, node.round_trip_s)
    return [info, up, memory, slots, measured, round_trip, suspect, loads, nbytes, seconds, lost, rejoined]


def _links(nodes: Iterable[NodeFigures]) -> list[Metric]:
    """Nothing of nodes in the main node's process, to which nothing is encoded."""
    streams = CounterMetricFamily(
        "odmoe_node_stream_bytes_total", "Encoded messages that tokens cost, by stream.", labels=["node", "stream"]
    )
    sent = _counter("odmoe_node_sent_bytes_total", "Encoded messages of every kind to the node.")
    received = _counter("odmoe_node_received_bytes_total", "Encoded messages of every kind from it.")
    for node in nodes:
        for stream, nbytes in node.stream_bytes:
            streams.add_metric([node.name, stream], nbytes)
        if node.sent_bytes is not None:
            sent.add_metric([node.name], node.sent_bytes)
        if node.received_bytes is not None:
            received.add_metric([node.name], node.received_bytes)
    return [streams, sent, received]


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=["node"])


def _counter(name: str, text: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=["node"])
