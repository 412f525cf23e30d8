"""Tests that docs/observability.md contains a line for each alert, and the table of metrics that is generated from the
code."""

from __future__ import annotations

import re
from pathlib import Path

from raymq.tools.observability.export import alert_rules, exported_files
from raymq.tools.observability.reference import metrics_table

DOCS = Path(__file__).parents[5] / "docs"
PAGE = (DOCS / "observability.md").read_text()


def test_the_table_of_metrics_is_made_from_the_instruments():
    _, _, section = PAGE.partition("\n## Metrics\n")
    table = "".join(line for line in section.splitlines(keepends=True) if line.startswith("|"))
    assert table == metrics_table(), "take what `python -m raymq.tools.observability.reference` prints"


def test_each_alert_has_its_advice():
    _, _, section = PAGE.partition("\n## Alerts\n")
    told = re.findall(r"^\| `(Raymq\w+)` \| [^|]+ \| [^|]+ \|$", section, re.MULTILINE)
    assert told == [rule["alert"] for rule in alert_rules()]


def test_each_exported_file_is_documented():
    _, _, section = PAGE.partition("\n## Prometheus and Grafana elsewhere\n")
    told = set(re.findall(r"`([\w-]+\.(?:json|ya?ml))`", section.partition("\n## ")[0])) - {"prometheus.yml"}
    assert told == set(exported_files())


def test_the_page_of_autoscaling_names_metrics_and_labels_that_exist():
    text = (DOCS / "autoscaling.md").read_text()
    names = set(re.findall(r"\bray_raymq_\w+", text))
    rows = {name: row for name in names for row in metrics_table().splitlines() if row.startswith(f"| `{name}` |")}
    assert set(rows) == names >= {"ray_raymq_consumer_lag_messages", "ray_raymq_consumer_lag_latency_milliseconds"}
    [grouped] = re.findall(r"max by \(([^)]+)\)", text)
    [chosen] = re.findall(r"\(ray_raymq_consumer_lag_messages\{(\w+)=", text)
    labels = set(re.findall(r"`(\w+)`", rows["ray_raymq_consumer_lag_messages"].split("|")[4])) | {"broker", "cluster"}
    assert {*grouped.split(", "), chosen} <= labels
