"""Tests of the alert rules with Debian's promtool. Each alert fires for one made-up history of metrics and not for
another."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

import raymq.tools.observability
from raymq.tools.observability.export import alert_rules
from tests.support.metrics.prometheus import check_with_promtool

RULES = Path(str(files(raymq.tools.observability) / "alerts.yml"))
ALL = 'SessionName="s",cluster="raymq"'
GROUP = f'{ALL},broker="broker-a",consumer_group="g"'
LAG = f'{GROUP},topic="t",is_retry="false"'
MINUTES = 60


@dataclass(frozen=True, slots=True)
class History:
    """Two histories of metrics for one alert: series values for which the alert must fire, and series values for which
    it must not.

    Each series has one value per minute, in promtool's notation.
    """

    alert: str
    fires: dict[str, str]
    quiet: dict[str, str]


UP = f'ray_raymq_up{{{ALL},role="broker",name="broker-a"}}'
STORE_UP = f'ray_raymq_up{{{ALL},role="storage",name="storage-broker-a-0"}}'
LISTENER_UP = f'ray_raymq_up{{{ALL},role="listener",name="listener-1"}}'


def gauge(name: str, labels: str, values: str) -> dict[str, str]:
    return {f"ray_raymq_{name}{{{ALL},{labels}}}": values}


def sends(fast: str, slow: str) -> dict[str, str]:
    """Return the bucket series of a histogram of send times, in promtool's notation.

    `fast`: the count of the buckets up to 500 ms: sends that take at most 5 ms. `slow`: the count of all sends, fast
    and slow. No send takes between 5 ms and 500 ms.
    """
    bucket = f'ray_raymq_send_cost_time_milliseconds_bucket{{{ALL},topic="t",invocation_status="success",le='
    return {f'{bucket}"5"}}': fast, f'{bucket}"500"}}': fast, f'{bucket}"+Inf"}}': slow}


HISTORIES = [
    History(
        "RaymqNoMaster",
        gauge("broker_has_master", 'broker="broker-a"', "0x60"),
        gauge("broker_has_master", 'broker="broker-a"', "1x60"),
    ),
    History(
        "RaymqUnderReplicated",
        gauge("in_sync_replicas", 'broker="broker-a"', "2x60") | gauge("replicas", 'broker="broker-a"', "3x60"),
        gauge("in_sync_replicas", 'broker="broker-a"', "3x60") | gauge("replicas", 'broker="broker-a"', "3x60"),
    ),
    History(
        "RaymqClockSkew",
        gauge("clock_skew_seconds", 'storage="storage-broker-a-0"', "-11x60"),
        gauge("clock_skew_seconds", 'storage="storage-broker-a-0"', "-10x60"),
    ),
    History(
        "RaymqWritesRefused",
        gauge("storage_writable", 'broker="broker-a",storage="storage-broker-a-0"', "0x60"),
        gauge("storage_writable", 'broker="broker-a",storage="storage-broker-a-0"', "0x60")
        | gauge("storage_writable", 'broker="broker-a",storage="storage-broker-a-1"', "1x60"),
    ),
    History(
        "RaymqConsumerLagTime",
        {f'ray_raymq_consumer_lag_latency_milliseconds{{{LAG},is_system="false"}}': "300001x60"},
        {
            f'ray_raymq_consumer_lag_latency_milliseconds{{{LAG},is_system="false"}}': "300000x60",
            f'ray_raymq_consumer_lag_latency_milliseconds{{{LAG},is_system="true"}}': "900000x60",
        },
    ),
    History(
        "RaymqConsumerLagGrows",
        {f'ray_raymq_consumer_lag_messages{{{LAG},is_system="false"}}': "0+200x60"},
        {f'ray_raymq_consumer_lag_messages{{{LAG},is_system="false"}}': "90000-200x60"},
    ),
    History(
        "RaymqGroupWithoutConsumers",
        {f'ray_raymq_consumer_lag_messages{{{LAG},is_system="false"}}': "7x60"},
        {
            f'ray_raymq_consumer_lag_messages{{{LAG},is_system="false"}}': "7x60",
            f'ray_raymq_consumer_connections{{{GROUP},consume_mode="push",language="PYTHON",version="1"}}': "1x60",
        },
    ),
    History(
        "RaymqDeadLetters",
        {f'ray_raymq_send_to_dlq_messages_total{{{GROUP},topic="t"}}': "_x55 1x5"},
        {f'ray_raymq_send_to_dlq_messages_total{{{GROUP},topic="t"}}': "1x60"},
    ),
    History(
        "RaymqTopicFull",
        gauge("backlog_waiting_producers", 'topic="t"', "2x60"),
        gauge("backlog_waiting_producers", 'topic="t"', "0x55 2x5"),
    ),
    History(
        "RaymqMessagesSkipped",
        {f'ray_raymq_skipped_messages_total{{{GROUP},topic="t"}}': "_x55 9x5"},
        {f'ray_raymq_skipped_messages_total{{{GROUP},topic="t"}}': "9x60"},
    ),
    History("RaymqSendSlow", sends("0+98x60", "0+100x60"), sends("0+995x60", "0+1000x60")),
    History(
        "RaymqDiskFull",
        gauge("storage_disk_ratio", 'storage="storage-broker-a-0",path="/d"', "0.86x60"),
        gauge("storage_disk_ratio", 'storage="storage-broker-a-0",path="/d"', "0.85x60"),
    ),
    History(
        "RaymqLogDamaged",
        gauge("log_hole_bytes", 'storage="storage-broker-a-0"', "400x60"),
        gauge("log_hole_bytes", 'storage="storage-broker-a-0"', "400x5 0x55"),
    ),
    History(
        "RaymqFilesDamaged",
        gauge("scrub_unrepaired", 'storage="storage-broker-a-0"', "1x60"),
        gauge("scrub_unrepaired", 'storage="storage-broker-a-0"', "1x4 0x56"),
    ),
    History(
        "RaymqVerifyOverdue",
        gauge("scrub_overdue", 'storage="storage-broker-a-0"', "1x80"),
        gauge("scrub_overdue", 'storage="storage-broker-a-0"', "1x50 0x30"),
    ),
    History(
        "RaymqDelayedLate",
        gauge("timer_dequeue_latency_milliseconds", 'broker="broker-a"', "5001x60"),
        gauge("timer_dequeue_latency_milliseconds", 'broker="broker-a"', "4999x60"),
    ),
    History(
        "RaymqWebhooksFail",
        {f'ray_raymq_gateway_webhook_calls_total{{{ALL},outcome="status"}}': "0+1x60"},
        {
            f'ray_raymq_gateway_webhook_calls_total{{{ALL},outcome="status"}}': "0+9x60",
            f'ray_raymq_gateway_webhook_calls_total{{{ALL},outcome="accepted"}}': "0+1x60",
        },
    ),
    History(
        "RaymqMetricsGone",
        {UP: "1x60", STORE_UP: "1x55 stale"},
        {UP: "1x60", STORE_UP: "1x60", LISTENER_UP: "1x55 stale"},
    ),
]


def test_promtool_takes_the_rules() -> None:
    assert "18 rules found" in check_with_promtool("check", "rules", str(RULES))


def test_every_alert_has_a_history() -> None:
    assert [history.alert for history in HISTORIES] == [rule["alert"] for rule in alert_rules()]


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.alert)
@pytest.mark.parametrize("fires", [True, False], ids=["fires", "quiet"])
def test_alert(history: History, fires: bool, tmp_path: Path) -> None:
    firings = judge(history.alert, history.fires if fires else history.quiet, fires, tmp_path)
    assert "SUCCESS" in firings


def test_metrics_gone_fires_where_nothing_ever_reported(tmp_path: Path) -> None:
    judge("RaymqMetricsGone", {"something_else": "1x60"}, True, tmp_path)


def test_the_group_of_web_hooks_needs_no_consumers(tmp_path: Path) -> None:
    """The gateways receive its messages."""
    labels = LAG.replace('consumer_group="g"', 'consumer_group="raymq-webhooks"')
    series = {f'ray_raymq_consumer_lag_messages{{{labels},is_system="false"}}': "7x60"}
    judge("RaymqGroupWithoutConsumers", series, False, tmp_path)


def test_one_more_dead_letter_fires_again(tmp_path: Path) -> None:
    """The alert also fires for a new dead letter if the counter was already above zero for a long time."""
    judge(
        "RaymqDeadLetters",
        {f'ray_raymq_send_to_dlq_messages_total{{{GROUP},topic="t"}}': "1x56 2x4"},
        True,
        tmp_path,
    )


def judge(alert: str, series: dict[str, str], fires: bool, directory: Path) -> str:
    """Run promtool to check that an alert fires after an hour of the given series, or does not fire if `fires` is
    False. Other alerts may fire as well."""
    if alert != "RaymqMetricsGone":
        series = {UP: "1x60", STORE_UP: "1x60", **series}
    case = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                        "eval_time": f"{MINUTES}m",
                        "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                    }
                ],
            }
        ],
    }
    path = directory / "case.yml"
    path.write_text(yaml.safe_dump(case))
    return check_with_promtool("test", "rules", str(path))
