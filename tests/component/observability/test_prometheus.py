"""Tests with a real Prometheus. It scrapes an exporter that has a time series of every instrument.

Each dashboard expression returns data, Prometheus loads the rules, and the relabel snippet produces RocketMQ's metric
names.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from itertools import count
from pathlib import Path

import pytest
import yaml

import raymq.tools.observability
from raymq.telemetry.metrics.instruments import INSTRUMENTS, InstrumentKind
from raymq.tools.observability.board import expressions, make_board
from raymq.tools.observability.export import alert_rules
from tests.support.history.waiting import eventually
from tests.support.metrics.expressions import RAYS_SERIES, plain
from tests.support.metrics.prometheus import Prometheus, exporter, running_prometheus

RULES = str(files(raymq.tools.observability) / "alerts.yml")
RELABEL = Path(str(files(raymq.tools.observability) / "relabel.yml"))
RAYS = 'SessionName="session_1",WorkerId="w",JobId="01000000",NodeAddress="127.0.0.1"'

FIXED = {"is_system": "false", "role": "broker"}
"""Label values that expressions of the dashboard and the rules select, by label."""


def page(scrape: int) -> str:
    """Return a metrics page with made-up values of all instruments, as Ray's agent exposes them. Counters grow with
    each scrape."""
    lines = []
    for instrument in INSTRUMENTS.values():
        own = ",".join(f'{label}="{FIXED.get(label, "some")}"' for label in instrument.labels)
        labels = f"{RAYS},{own}" if own else RAYS
        name = f"ray_{instrument.name}"
        if instrument.kind is InstrumentKind.COUNTER:
            lines += [f"# TYPE {name}_total counter", f"{name}_total{{{labels}}} {10 * scrape}"]
        elif instrument.kind is InstrumentKind.GAUGE:
            lines += [f"# TYPE {name} gauge", f"{name}{{{labels}}} 1"]
        else:  # Ray exposes the three series of a histogram (bucket, count, sum) as gauges whose values only grow.
            bounds = [*map(str, instrument.bounds), "+Inf"]
            for index, bound in enumerate(bounds, start=1):
                lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {index * scrape}')
            lines += [f"{name}_count{{{labels}}} {len(bounds) * scrape}", f"{name}_sum{{{labels}}} {scrape}"]
    lines += [f'{name}{{{RAYS},Component="ray::Storage.append"}} 3' for name in sorted(RAYS_SERIES)]
    return "\n".join(lines) + "\n"


def config(target: str, more: str = "") -> str:
    """Return a prometheus.yml as Ray writes it, with raymq's rules and a scrape each second. `more`: additional keys of
    the scrape config, as YAML."""
    scrape = {"job_name": "ray", "static_configs": [{"targets": [target]}], **(yaml.safe_load(more) if more else {})}
    return yaml.safe_dump(
        {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [RULES],
            "scrape_configs": [scrape],
        }
    )


@pytest.fixture(scope="module")
def stand_in() -> Iterator[str]:
    scrapes = count(1)
    with exporter(lambda: page(next(scrapes))) as address:
        yield address


@pytest.fixture(scope="module")
def prometheus(stand_in: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with running_prometheus(config(stand_in), tmp_path_factory.mktemp("prometheus")) as server:
        # Wait for several scrapes, because a rate has a value only from the second scrape on.
        eventually(lambda: server.query("count_over_time(ray_raymq_up[1m]) > 2"), "three scrapes")
        yield server


def test_every_expression_of_the_board_has_data(prometheus: Prometheus) -> None:
    silent = [expression for expression in expressions(make_board()) if not prometheus.query(plain(expression))]
    assert silent == []


def test_every_value_is_a_number(prometheus: Prometheus) -> None:
    for expression in expressions(make_board()):
        for sample in prometheus.query(plain(expression)):
            assert sample["value"][1] not in ("NaN", "+Inf", "-Inf"), expression


def test_process_metrics_are_split_by_kind_of_actor(prometheus: Prometheus) -> None:
    [row] = [panel for panel in make_board()["panels"] if panel["title"] == "Ray processes of raymq"]
    for chart in row["panels"]:
        [sample] = prometheus.query(plain(chart["targets"][0]["expr"]))
        assert sample["metric"] == {"actor": "Storage"}


def test_the_server_has_loaded_the_rules(prometheus: Prometheus) -> None:
    def loaded() -> list[str]:
        [group] = prometheus.ask("rules")["groups"]
        return [rule["name"] for rule in group["rules"] if rule["health"] == "ok"]

    eventually(lambda: loaded() == [rule["alert"] for rule in alert_rules()], "all rules evaluated")


def test_relabelled_series_have_rocketmqs_names(stand_in: str, tmp_path: Path) -> None:
    with running_prometheus(config(stand_in, RELABEL.read_text()), tmp_path) as server:
        eventually(lambda: server.query("rocketmq_messages_in_total"), "a scrape with new names")
        assert server.query("rocketmq_consumer_lag_messages")
        assert server.query('{__name__=~"ray_raymq_.+"}') == []
        assert server.query("ray_component_rss_bytes"), "Ray's own series keep their names"
