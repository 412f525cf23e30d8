"""Tests of `raymq metrics export`: the files that it exports, and targets that it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from click.testing import CliRunner

from raymq.tools.cli import cli
from raymq.tools.observability.board import make_board
from raymq.tools.observability.export import METRICS_PORT_NAME, alert_groups, relabel_text


def test_all_files_are_written_with_the_expected_content(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    result = CliRunner().invoke(cli, ["metrics", "export", str(folder), "--json"], catch_exceptions=False)
    assert sorted(json.loads(result.output)["files"]) == sorted(map(str, folder.iterdir()))
    assert json.loads((folder / "raymq_grafana_dashboard.json").read_text()) == make_board()
    assert yaml.safe_load((folder / "alerts.yml").read_text())["groups"] == alert_groups()
    assert (folder / "relabel.yml").read_text() == relabel_text()
    rule = yaml.safe_load((folder / "prometheus-rule.yaml").read_text())
    assert rule["spec"]["groups"] == alert_groups()
    monitor = yaml.safe_load((folder / "pod-monitor.yaml").read_text())
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == METRICS_PORT_NAME
    assert endpoint["relabelings"][0]["targetLabel"] == "ray_io_cluster"


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(cli, ["metrics", "export", str(tmp_path / "file" / "below")])
    assert result.exit_code != 0
    assert "cannot write to" in str(result.exception)
