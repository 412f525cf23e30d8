"""The alert rules of raymq, which are in the file alerts.yml beside this module, as Prometheus loads it."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml


def alerts_text() -> str:
    """The file of rules."""
    return (files(__package__) / "alerts.yml").read_text()


def alert_groups() -> list[dict[str, Any]]:
    """The groups of rules, as PrometheusRule takes them, too."""
    return list(yaml.safe_load(alerts_text())["groups"])


def alert_rules() -> list[dict[str, Any]]:
    """All rules, in the file's order."""
    return [rule for group in alert_groups() for rule in group["rules"]]


def relabel_text() -> str:
    """The snippet for a scrape config that gives raymq's series RocketMQ's names."""
    return (files(__package__) / "relabel.yml").read_text()
