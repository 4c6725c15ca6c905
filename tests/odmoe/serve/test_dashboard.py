"""The dashboard, the example of a scrape and the document of metrics, beside scrapes of a cluster that answered."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from main_node.collect_figures import figures_of
from main_node.drafting import Drafting, DraftSource
from main_node.report import Report
from odmoe.serve.cluster_metrics import DEADLINE_S
from odmoe.serve.metrics import Metrics
from support.machines.certificates import Authority
from support.nodes.served_cluster import ServedCluster
from support.paths import ROOT
from support.promql import Query, QueryError, Scrape, Value, scrape

BOARD = json.loads((ROOT / "deploy" / "grafana" / "odmoe.json").read_text())
EXAMPLE = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
DOCUMENT = (ROOT / "docs" / "metrics.md").read_text()
(JOB,) = EXAMPLE["scrape_configs"]
TARGET = {"job": JOB["job_name"], "instance": JOB["static_configs"][0]["targets"][0]}
INTERVAL_S = 60.0
"""Between the two scrapes, as Prometheus is told."""
TOKENS = 12
LISTED = [5, 6, 7, 8, 9, 10, 11, 12] * 3
"""A prompt whose tokens are found in it again, so that there are drafts."""
TARGETS = [
    pytest.param(target["expr"], id=f"{panel['title']}: {target['legendFormat']}")
    for panel in BOARD["panels"]
    for target in panel.get("targets", [])
]


def filled(expression: str) -> str:
    """With the values of Grafana's variables."""
    return expression.replace("$__rate_interval", f"{INTERVAL_S:.0f}s").replace("$instance", ".*")


@dataclass
class World:
    """Two scrapes, and the answers between them."""

    reports: list[Report] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)
    scrapes: list[Scrape] = field(default_factory=list)
    metrics: Any = None

    def scrape(self) -> None:
        self.bodies.append(self.metrics.render()[0].decode())
        self.scrapes.append(scrape(len(self.scrapes) * INTERVAL_S, self.bodies[-1], **TARGET))

    def answer(self, cluster: ServedCluster, prompt: list[int]) -> None:
        """As the service counts it."""
        asked = last = time.perf_counter()
        self.metrics.on_begun()
        for count, step in enumerate(cluster.main.generate(prompt, TOKENS, ignore_eos=True)):
            if step.report is not None:
                self.reports.append(step.report)
                self.metrics.on_ended(step.report.finish, step.report)
                continue
            now = time.perf_counter()
            if count:
                self.metrics.on_next_token(now - last)
            else:
                self.metrics.on_first_token(now - asked)
            last = now

    def ask(self, expression: str) -> Value:
        """As the dashboard does."""
        return Query(filled(expression), self.scrapes).result()


@pytest.fixture(scope="module")
def world(
    demo_store: Callable[[str], Any], shadow_model: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    found = World()
    drafts = DraftSource(3, prompt=True)
    cluster = ServedCluster(demo_store("float32"), workers=2, shadow=shadow_model("nf4"), drafts=drafts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("main_node.node.LAST_PREDICTIONS_S", 0.2)  # drafts overtake the shadow, which is waited for then
        try:
            figures: Any = SimpleNamespace(figures=lambda: figures_of(cluster.main))
            found.metrics = Metrics(figures, Authority(tmp_path_factory.mktemp("keys")).folder())
            found.metrics.on_refused("queue_full")
            found.scrape()
            drafting, cluster.main.drafting = cluster.main.drafting, Drafting(None)
            found.answer(cluster, list(range(5, 45)))
            cluster.main.drafting = drafting
            found.answer(cluster, LISTED)
            found.metrics.on_refused("queue_full")
            found.metrics.watch(lambda: 3, lambda: 1)
            found.scrape()
            yield found
        finally:
            cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("expression", TARGETS)
def test_each_query_finds_figures(expression: str, world: World) -> None:
    found = world.ask(expression)
    assert isinstance(found, dict)
    assert [value for value in found.values() if math.isfinite(value)], f"nothing, or no number: {found}"


def test_prometheus_own_grammar_takes_each_query() -> None:
    for expression in (str(target.values[0]) for target in TARGETS):
        promql_parser.parse(filled(expression))
        with pytest.raises(ValueError, match=r"\w"):
            promql_parser.parse(filled(expression) + ")")


def of(title: str, legend: str) -> str:
    (found,) = [
        target["expr"]
        for panel in BOARD["panels"]
        for target in panel.get("targets", [])
        if (panel["title"], target["legendFormat"]) == (title, legend)
    ]
    return str(found)


@pytest.mark.slow
def test_what_they_find_is_what_the_reports_say(world: World) -> None:
    first, second = world.reports
    (tokens,) = world.ask(of("Tokens a second", "answers")).values()  # type: ignore[union-attr]
    assert tokens == pytest.approx(2 * TOKENS / INTERVAL_S)
    (hits,) = world.ask(
        "sum(increase(odmoe_expert_hits_total[1m])) / sum(increase(odmoe_experts_named_total[1m]))"
    ).values()  # type: ignore[union-attr]
    assert hits == pytest.approx((first.hits + second.hits) / (first.named + second.named))
    (share,) = world.ask(of("Accepted", "accepted")).values()  # type: ignore[union-attr]
    assert second.drafted > 0
    assert share == pytest.approx(second.accepted / second.drafted)
    assert world.ask(of("Answers here", "waiting")) == {(): 3}
    ended = world.ask(of("Answers that ended", "{{finish}}"))
    assert isinstance(ended, dict)
    assert ended[("finish", "length"),] == pytest.approx(2 / INTERVAL_S)
    refused = world.ask(of("Asked for and refused", "refused: {{reason}}"))
    assert isinstance(refused, dict)
    assert {labels: rate for labels, rate in refused.items() if rate} == {
        (("reason", "queue_full"),): pytest.approx(1 / INTERVAL_S)
    }
    (median,) = world.ask(of("Time to first token", "p50")).values()  # type: ignore[union-attr]
    slower, faster = max(first.ttft_s, second.ttft_s), min(first.ttft_s, second.ttft_s)
    assert faster / 2.5 < median < 2.5 * slower, "a bucket is at most 2.5 times as wide as what is below it"
    streams = world.ask(of("Links by stream", "{{stream}}"))
    assert isinstance(streams, dict)
    assert {dict(labels)["stream"] for labels in streams} == {"to_workers", "from_workers", "to_shadow", "from_shadow"}
    assert min(streams.values()) > 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("rate(odmoe_answers_waiting[1m])", "a gauge"),
        ("rate(odmoe_answers_total)", "needs a range"),
        ("odmoe_answers_total[1m]", "a range of"),
        ("sum(odmoe_requests)", "no scrape has"),
        ('odmoe_answers_total{reason="stop"}', "has the label reason"),
        ("sum by (node) (odmoe_answers_total)", "which .* does not have"),
        ("histogram_quantile(0.5, odmoe_time_to_first_token_seconds_sum)", "no le"),
        ("odmoe_node_up + odmoe_answers_total", "same labels"),
        ("sum(odmoe_node_up", "the end"),
        ("sum(odmoe_node_up))", "too much"),
        ("quantile(odmoe_node_up)", "quantile of 1"),
        ("rate(odmoe_answers_total[5])", "no unit"),
    ],
)
def test_a_query_that_could_find_nothing_is_noticed(wrong: str, why: str, world: World) -> None:
    with pytest.raises(QueryError, match=why):
        world.ask(wrong)


def test_its_panels_stand_side_by_side_and_ask_the_chosen_source() -> None:
    taken: set[tuple[int, int]] = set()
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, "Grafana's grid"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["targets"]
        for one in (panel, *panel["targets"]):
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            by = re.findall(r" by \(([\w, ]+)\)", target["expr"])
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown <= {label for labels in by for label in labels.split(", ")}, target
    source, *others = BOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    names = set(re.findall(r"\$\{?(\w+)", json.dumps(panels)))
    assert names == {"datasource", "__rate_interval", *(one["name"] for one in others)}


def test_its_variables_have_values(world: World) -> None:
    for variable in BOARD["templating"]["list"][1:]:
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
        assert found
        vector = world.ask(found[1])
        assert isinstance(vector, dict)
        assert {dict(labels)[found[2]] for labels in vector} == {TARGET["instance"]}


def test_the_example_gives_a_scrape_the_time_that_it_takes() -> None:
    def seconds(text: str) -> float:
        return float(text.removesuffix("s"))

    assert DEADLINE_S < seconds(JOB["scrape_timeout"]) <= seconds(JOB["scrape_interval"])


ROW = re.compile(r"^\| `(odmoe_\w+)` \| (\w+) \|(.*?)\| (.+) \|$", re.M)


def exposed(world: World) -> dict[str, tuple[str, set[str]]]:
    """Metric, as queries name it -> its type and labels, of those that the last scrape has or could have."""
    found: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(world.bodies[-1]):
        if family.name.startswith("process_"):
            continue
        labels = {label for sample in family.samples for label in sample.labels if label != "le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = family.type, labels
    without = {name: kind for name, (kind, labels) in found.items() if not labels}
    for collector in world.metrics.registry._collector_to_names:
        for family in collector.describe() if hasattr(collector, "describe") else ():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if name in without and getattr(family, "_labelnames", ()):
                found[name] = family.type, set(family._labelnames)
    return found


def test_the_document_has_every_metric_and_no_other(world: World) -> None:
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in ROW.findall(DOCUMENT)}
    assert documented == exposed(world)
