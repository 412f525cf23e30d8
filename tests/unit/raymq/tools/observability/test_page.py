"""Tests that docs/observability.md contains a line for each alert, and the table of metrics that is generated from the
code."""

from __future__ import annotations

import re
from pathlib import Path

from raymq.tools.observability.export import alert_rules, exported_files
from raymq.tools.observability.reference import metrics_table

PAGE = (Path(__file__).parents[5] / "docs" / "observability.md").read_text()


def test_the_table_of_metrics_is_made_from_the_instruments():
    _, _, section = PAGE.partition("\n## Metrics\n")
    table = "".join(line for line in section.splitlines(keepends=True) if line.startswith("|"))
    assert table == metrics_table(), "take what `python -m raymq.tools.observability.reference` prints"


def test_each_alert_has_its_advice():
    _, _, section = PAGE.partition("\n## Alerts\n")
    told = re.findall(r"^\| `(Raymq\w+)` \| [^|]+ \| [^|]+ \|$", section, re.MULTILINE)
    assert told == [rule["alert"] for rule in alert_rules()]


def test_each_exported_file_is_told_of():
    _, _, section = PAGE.partition("\n## Prometheus and Grafana elsewhere\n")
    told = set(re.findall(r"`([\w-]+\.(?:json|ya?ml))`", section.partition("\n## ")[0])) - {"prometheus.yml"}
    assert told == set(exported_files())
