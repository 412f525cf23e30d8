"""Tests that ClusterStatus can read the servers' answers as the launcher passes them on: as JSON, with fields that
ClusterStatus does not have."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

import pytest

from raymq.common.errors import ServiceNotAvailableError
from raymq.common.protocol.stats import RequestFigures
from raymq.common.protocol.status import (
    BrokerReport,
    ClusterStatus,
    RequestsReport,
    RetentionReport,
    ScheduleReport,
    StoreReport,
)
from raymq.common.protocol.store import Hole, RetentionStatus, ScheduleStatus, StoreStatus
from raymq.common.protocol.transactions import TransactionFigures, WaitingTransactions

WAITING = WaitingTransactions("orders", "shop", 3, 1_700)
STORE = StoreStatus(
    *(
        7,
        "/data/broker-a-0",
        "broker-a",
        2,
        4,
        100,
        1_100,
        1_000,
        900,
        0,
        0,
        0,
        0,
        "clean",
        5,
        False,
        "the disk is full",
    ),
    ScheduleStatus({"level 3": 2}, 6_000, 0, 0),
    retention=RetentionStatus(0.5, 1, 2, "", 0, 3, 9_000),
    holes=(Hole(100, 5, "the body does not match"),),
    damaged_files=("dedup is damaged",),
)


def crossed(**report: object) -> ClusterStatus:
    """Return a cluster status that was converted to JSON and back, as the launcher does."""
    return ClusterStatus.of(json.loads(json.dumps(report)))


def test_the_answer_of_a_store_is_read_whole() -> None:
    requests = RequestFigures("fetch", 1, 0.5, 9, 12.5, 2, 1.5, 3, 4)
    answer = {
        **asdict(STORE),
        "requests": [requests._asdict()],
        "transactions": asdict(TransactionFigures([WAITING])),
        "role": "MASTER",
    }
    found = crossed(stores=[{"actor": "storage-broker-a-0", "error": "", **answer}])
    [store] = found.stores
    assert (store.name, store.broker_name, store.replica) == ("broker-a-0", "broker-a", "0")
    assert (store.log_bytes, store.unflushed_bytes, store.problem) == (1_000, 100, "the disk is full")
    assert (store.retention, store.schedule) == (RetentionReport(0.5, 9_000, 3), ScheduleReport({"level 3": 2}, 6_000))
    assert (store.disk_used, store.disk_free_bytes) == (0.5, 9_000)
    assert store.requests == (RequestsReport("fetch", 9, 12.5, 3, 4),)
    assert (store.transactions.waiting, store.holes) == ((WAITING,), STORE.holes)
    same = {one.name for one in fields(StoreReport)} & {one.name for one in fields(StoreStatus)}
    for name in same - {"retention", "schedule"}:
        assert getattr(store, name) == getattr(STORE, name)
    assert found.report["stores"][0]["visible_physical_offset"] == 900


def test_a_server_that_did_not_answer_has_its_error_and_defaults() -> None:
    found = crossed(brokers=[{"actor": "broker-a", "error": "no answer"}], stores=[{"actor": "storage-broker-a-0"}])
    assert found.brokers == (BrokerReport("broker-a", "no answer"),)
    assert (found.brokers[0].name, found.brokers[0].ready) == ("broker-a", False)
    assert (found.stores[0].disk_used, found.stores[0].disk_free_bytes) == (None, None)
    assert [server.actor for server in found.servers] == ["broker-a", "storage-broker-a-0"]


def test_an_answer_of_another_version_is_an_error_with_its_place() -> None:
    with pytest.raises(ServiceNotAvailableError, match=r"\$\.brokers\[0\]\.topics.* same version"):
        crossed(brokers=[{"actor": "broker-a", "error": "", "topics": 5}])
