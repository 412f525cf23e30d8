"""Parses PromQL expressions to check the series and labels in them."""

from __future__ import annotations

from collections.abc import Iterator

import promql_parser

from raymq.telemetry.metrics.instruments import INSTRUMENTS
from raymq.tools.observability.series import exposed_names

RAYS_LABELS = {"SessionName", "ray_io_cluster", "Component", "NodeAddress", "WorkerId", "JobId", "Version"}
"""Labels that raymq's own metrics do not set. Ray sets some of them on every series, and KubeRay's PodMonitor adds the
others."""
RAYS_SERIES = {"ray_component_cpu_percentage", "ray_component_rss_bytes"}
"""Names of Ray's own series about processes that the Grafana dashboard shows."""


def plain(expression: str) -> str:
    """Replace the variables in a dashboard expression as Grafana does if all values of every variable are selected.
    Returns the expression that Prometheus receives."""
    for variable in ("SessionName", "Cluster", "broker", "topic", "consumer_group"):
        expression = expression.replace(f'"${variable}"', '".*"')
    return expression.replace("$__rate_interval", "1m")


def series_labels() -> dict[str, set[str]]:
    """Return the labels of every series that raymq reports to Prometheus, by the series' name."""
    return {
        name: set(instrument.labels) | ({"le"} if name.endswith("_bucket") else set())
        for instrument in INSTRUMENTS.values()
        for name in exposed_names(instrument)
    }


def faults_of(expression: str) -> Iterator[str]:
    """Yield the errors of a PromQL expression: series that raymq does not report, and labels that a series does not
    have."""
    known = series_labels()
    for node in _nodes(promql_parser.parse(expression)):
        if isinstance(node, promql_parser.VectorSelector):
            labels = {matcher.name for matcher in node.matchers.matchers}
            if node.name in RAYS_SERIES:
                yield from (f"{node.name} has no {label}" for label in labels - RAYS_LABELS)
            elif node.name not in known:
                yield f"nobody reports {node.name}"
            else:
                yield from (f"{node.name} has no {label}" for label in labels - known[node.name] - RAYS_LABELS)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            below = [one for one in _nodes(node.expr) if isinstance(one, promql_parser.VectorSelector)]
            made = {"actor"} if "label_replace" in node.prettify() else set()
            for selector in below:
                missing = set(node.modifier.labels) - known.get(selector.name, set()) - RAYS_LABELS - made
                yield from (f"by ({label}), which {selector.name} does not have" for label in missing)


def _nodes(expression: promql_parser.Expr) -> list[promql_parser.Expr]:
    found: list[promql_parser.Expr] = []
    promql_parser.walk(expression, pre_visit=found.append)
    return found
