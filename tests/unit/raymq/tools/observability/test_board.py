"""Tests of the Grafana dashboard: its uid never changes, panels do not overlap, all variables are used, and titles fit
above their charts."""

from __future__ import annotations

import json
import re

from raymq.tools.observability.board import BOARD_UID, board_json, expressions, make_board


def panels():
    return [one for panel in make_board()["panels"] for one in (panel, *panel.get("panels", ()))]


def test_the_file_is_the_board_and_always_the_same():
    assert json.loads(board_json()) == make_board()
    assert board_json() == board_json()
    assert make_board()["uid"] == BOARD_UID == "raymq"


def test_rows_have_the_expected_titles():
    assert [panel["title"] for panel in panels() if panel["type"] == "row"] == [
        "Overview",
        "Produce",
        "Consume and lag",
        "Dead letters",
        "Bounded topics",
        "Requests that are not stored",
        "Delayed messages",
        "Transactions and receives",
        "Storage",
        "Replication",
        "Clients",
        "Gateway",
        "Ray processes of raymq",
    ]


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    shown = [panel["gridPos"] for panel in make_board()["panels"]]
    cells = [
        (x, y)
        for place in shown
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_every_chart_has_a_description_and_a_unit():
    charts = [panel for panel in panels() if panel["type"] != "row"]
    assert len(charts) > 40
    for chart in charts:
        assert chart["type"] == "timeseries"
        assert chart["description"].endswith(".")
        assert chart["fieldConfig"]["defaults"]["unit"]
        assert chart["targets"]
        assert len({target["refId"] for target in chart["targets"]}) == len(chart["targets"])


def test_a_title_fits_above_its_chart():
    """A chart's title has at most 48 characters. A chart has a third of the dashboard's width, so Grafana truncates
    longer titles."""
    assert [chart["title"] for chart in panels() if len(chart["title"]) > 48] == []


def test_charts_of_a_row_have_different_titles():
    titles: list[list[str]] = []
    for panel in panels():
        if panel["type"] == "row":
            titles.append([])
        else:
            titles[-1].append(panel["title"])
    assert len(titles) == 13
    assert all(len(set(row)) == len(row) for row in titles)


def test_legends_name_labels_that_the_expression_keeps():
    for chart in panels():
        for target in chart.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                kept = re.match(r"(?:histogram_quantile\([\d.]+, )?\w+ by \(([^)]*)\)", target["expr"])
                assert kept, target
                assert label in kept[1].split(", "), target


def test_the_board_has_exactly_the_variables_of_its_expressions():
    names = {variable["name"] for variable in make_board()["templating"]["list"]}
    assert names == {"datasource", "SessionName", "Cluster", "broker", "topic", "consumer_group"}
    used = set(re.findall(r"\$(\w+)", " ".join(expressions(make_board())))) - {"__rate_interval", "1"}
    assert used == names - {"datasource"}
