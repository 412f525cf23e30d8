"""Tests that the Grafana dashboard and the alerts name only series that raymq reports, and only labels that these
series have."""

from __future__ import annotations

import pytest

from raymq.telemetry.metrics.instruments import INSTRUMENTS
from raymq.tools.observability.board import expressions, make_board
from raymq.tools.observability.export import alert_rules
from raymq.tools.observability.series import exposed_names, highest, per_second, percentile, selector
from tests.support.metrics.expressions import faults_of, plain

BOARD = expressions(make_board())


@pytest.mark.parametrize("expression", BOARD)
def test_the_boards_expressions_use_existing_metrics(expression):
    assert list(faults_of(plain(expression))) == []


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: rule["alert"])
def test_the_alerts_expressions_use_existing_metrics(rule):
    assert list(faults_of(rule["expr"])) == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("ray_raymq_mesages_in_total", "nobody reports ray_raymq_mesages_in_total"),
        ("ray_raymq_messages_in", "nobody reports ray_raymq_messages_in"),
        ('rate(ray_raymq_put_failed_total{topic="t"}[1m])', "ray_raymq_put_failed_total has no topic"),
        ("sum by (topic) (ray_raymq_put_failed_total)", "by (topic), which ray_raymq_put_failed_total does not have"),
        ("sum by (le) (ray_raymq_up)", "by (le), which ray_raymq_up does not have"),
    ],
)
def test_a_name_or_label_that_nobody_reports_is_found(expression, fault):
    assert list(faults_of(expression)) == [fault]


def test_every_instrument_is_on_the_board():
    """The dashboard shows each metric that raymq reports, because a metric that no panel shows is not worth its
    cost."""
    text = "\n".join(BOARD)
    unseen = {
        name for name in INSTRUMENTS if not any(f"{exposed}{{" in text for exposed in exposed_names(INSTRUMENTS[name]))
    }
    assert unseen == set()


def test_a_wrong_name_is_an_error_when_the_board_is_made():
    with pytest.raises(KeyError):
        highest("raymq_no_such_thing")
    with pytest.raises(KeyError, match="is a gauge"):
        per_second("raymq_up")
    with pytest.raises(KeyError, match="is a counter"):
        percentile(99, "raymq_messages_in")
    with pytest.raises(KeyError, match="no label 'colour'"):
        selector("raymq_up", colour="red")
