"""Generate raymq's Grafana dashboard from the table of panels.

The dashboard's uid is fixed, so that links remain valid. The dashboard's variables select a data source, a Ray session,
a KubeRay cluster, brokers, topics and consumer groups.
"""

from __future__ import annotations

import json
from typing import Any, Final

from raymq.tools.observability.panels import ROWS, Panel, Row

BOARD_UID: Final = "raymq"
BOARD_FILE: Final = "raymq_grafana_dashboard.json"
"""Name of the dashboard's file in the folder with Ray's own dashboards."""

COLUMNS: Final = 3
GRID_WIDTH: Final = 24
PANEL_HEIGHT: Final = 8
DATA_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}

_ON_EVERY_SERIES: Final = 'SessionName=~"$SessionName",ray_io_cluster=~"$Cluster"'

VARIABLES: Final = (
    # A series has the label of a KubeRay cluster only if a PodMonitor collects it. If the user selects all clusters,
    # the query also matches series without this label.
    ("SessionName", "label_values(ray_raymq_up, SessionName)", "Ray sessions"),
    ("Cluster", 'label_values(ray_raymq_up{SessionName=~"$SessionName"}, ray_io_cluster)', "KubeRay clusters"),
    ("broker", f"label_values(ray_raymq_broker_permission{{{_ON_EVERY_SERIES}}}, broker)", "Broker groups"),
    ("topic", f"label_values(ray_raymq_messages_in_total{{{_ON_EVERY_SERIES}}}, topic)", "Topics"),
    (
        "consumer_group",
        f"label_values(ray_raymq_consumer_lag_messages{{{_ON_EVERY_SERIES}}}, consumer_group)",
        "Consumer groups",
    ),
)
"""The variables of the dashboard. Each has a name, a query for its possible values, and a description."""


def board_json() -> str:
    """Return the dashboard as JSON text for a file that Grafana loads. The text depends only on the version of
    raymq."""
    return json.dumps(make_board(), indent=1, sort_keys=True) + "\n"


def make_board() -> dict[str, Any]:
    """Build the dashboard as a dict in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        made, height = _row(row, y, next_id=len(_flat(panels)) + 1)
        panels += made
        y += height
    return {
        "uid": BOARD_UID,
        "title": "raymq",
        "description": "Messages, consumer groups, stores and replicas of raymq.",
        "tags": ["raymq", "ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timepicker": {},
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [_data_source_variable(), *(_variable(*about) for about in VARIABLES)]},
        "panels": panels,
    }


def expressions(board: dict[str, Any]) -> list[str]:
    """Return every PromQL expression in the panels of a dashboard, including panels in collapsed rows."""
    return [target["expr"] for panel in _flat(board["panels"]) for target in panel.get("targets", ())]


def _flat(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for panel in panels for one in (panel, *panel.get("panels", ()))]


def _row(row: Row, y: int, next_id: int) -> tuple[list[dict[str, Any]], int]:
    """Return the Grafana objects of a dashboard row and the row's height. The row's header comes first, then its
    panels. If the row is collapsed, the header contains the panels."""
    width = GRID_WIDTH // COLUMNS
    panels = [
        _panel(
            panel,
            next_id + 1 + index,
            {
                "x": index % COLUMNS * width,
                "y": y + 1 + index // COLUMNS * PANEL_HEIGHT,
                "w": width,
                "h": PANEL_HEIGHT,
            },
        )
        for index, panel in enumerate(row.panels)
    ]
    header = {
        "type": "row",
        "id": next_id,
        "title": row.title,
        "collapsed": row.collapsed,
        "gridPos": {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1},
        "panels": panels if row.collapsed else [],
    }
    if row.collapsed:
        return [header], 1
    return [header, *panels], 1 + -(-len(panels) // COLUMNS) * PANEL_HEIGHT


def _panel(panel: Panel, panel_id: int, position: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "id": panel_id,
        "title": panel.title,
        "description": panel.help,
        "datasource": DATA_SOURCE,
        "gridPos": position,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {"drawStyle": "line", "fillOpacity": 10, "showPoints": "never", "spanNulls": False},
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATA_SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "range": True,
            }
            for index, (legend, expression) in enumerate(panel.lines.items())
        ],
    }


def _data_source_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
    }


def _variable(name: str, query: str, text: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "description": text,
        "datasource": DATA_SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "allValue": ".*",
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        "options": [],
        "refresh": 2,
        "sort": 1,
        "hide": 0,
    }
