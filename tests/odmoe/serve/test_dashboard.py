"""The dashboard, the example of a scrape and the document of metrics, beside a scrape of a cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from main_node.collect_figures import figures_of
from odmoe.serve.cluster_metrics import DEADLINE_S
from odmoe.serve.metrics import Metrics
from support.machines.certificates import Authority
from support.nodes.served_cluster import ServedCluster
from support.paths import ROOT

BOARD = json.loads((ROOT / "deploy" / "grafana" / "odmoe.json").read_text())
EXAMPLE = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
DOCUMENT = (ROOT / "docs" / "metrics.md").read_text()
(JOB,) = EXAMPLE["scrape_configs"]
TARGET = {"job": JOB["job_name"], "instance": JOB["static_configs"][0]["targets"][0]}
INTERVAL_S = 60.0
"""Between two scrapes, as Prometheus is told."""
TARGETS = [
    pytest.param(target["expr"], id=f"{panel['title']}: {target['legendFormat']}")
    for panel in BOARD["panels"]
    for target in panel.get("targets", [])
]


def filled(expression: str) -> str:
    """With the values of Grafana's variables."""
    return expression.replace("$__rate_interval", f"{INTERVAL_S:.0f}s").replace("$instance", ".*")


Families = dict[str, tuple[str, set[str]]]
"""Metric, as queries name it -> its type and labels."""


@pytest.fixture(scope="module")
def exposed(demo_store: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Families:
    """What a scrape has, or could have: a label's values may come later."""
    cluster = ServedCluster(demo_store("float32"), workers=2)
    try:
        figures: Any = SimpleNamespace(figures=lambda: figures_of(cluster.main))
        metrics = Metrics(figures, Authority(tmp_path_factory.mktemp("keys")).folder())
        metrics.watch(lambda: 3, lambda: 1)
        body = metrics.render()[0].decode()
    finally:
        cluster.close()
    declared = {
        family.name: set(getattr(family, "_labelnames", ()))
        for collector in metrics.registry._collector_to_names
        for family in (collector.describe() if hasattr(collector, "describe") else ())
    }
    found: Families = {}
    for family in text_string_to_metric_families(body):
        labels = {label for sample in family.samples for label in sample.labels if label != "le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = family.type, labels or declared.get(family.name, set())
    return found


def parts_of(expression: Any, rates: bool = False, by: frozenset[str] = frozenset()) -> Iterator[tuple[Any, bool, set]]:
    """Each selector of a query, whether a rate is made of it, and the labels that its sum is by."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression, rates, set(by)
    elif isinstance(expression, promql_parser.MatrixSelector):
        yield expression.vector_selector, rates, set(by)
    elif isinstance(expression, promql_parser.Call):
        for argument in expression.args:
            yield from parts_of(argument, expression.func.name in ("rate", "increase"), by)
    elif isinstance(expression, promql_parser.AggregateExpr):
        labels = expression.modifier.labels if expression.modifier else ()
        yield from parts_of(expression.expr, rates, frozenset(labels))
    elif isinstance(expression, promql_parser.BinaryExpr):
        yield from parts_of(expression.lhs, rates, by)
        yield from parts_of(expression.rhs, rates, by)


@pytest.mark.parametrize("expression", TARGETS)
def test_each_query_asks_for_what_a_scrape_has(expression: str, exposed: Families) -> None:
    """A wrong name or label would give an empty graph, and no error."""
    found = list(parts_of(promql_parser.parse(filled(expression))))
    assert found
    for selector, is_rate, by in found:
        family = re.sub(r"_(bucket|sum|count)$", "", selector.name)
        name = selector.name if selector.name in exposed else family
        kind, labels = exposed[name]
        assert is_rate == (kind in ("counter", "histogram")), selector.name
        asked = {matcher.name for matcher in selector.matchers.matchers} | by
        assert asked <= labels | {*TARGET, "le"}
        assert ("le" in by) == selector.name.endswith("_bucket")


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


def test_its_variables_have_values(exposed: Families) -> None:
    for variable in BOARD["templating"]["list"][1:]:
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
        assert found
        assert found[1] in exposed
        assert found[2] in TARGET


def test_the_example_gives_a_scrape_the_time_that_it_takes() -> None:
    def seconds(text: str) -> float:
        return float(text.removesuffix("s"))

    assert DEADLINE_S < seconds(JOB["scrape_timeout"]) <= seconds(JOB["scrape_interval"])


ROW = re.compile(r"^\| `(odmoe_\w+)` \| (\w+) \|(.*?)\| (.+) \|$", re.M)


def test_the_document_has_every_metric_and_no_other(exposed: Families) -> None:
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in ROW.findall(DOCUMENT)}
    assert documented == {name: one for name, one in exposed.items() if not name.startswith("process_")}
