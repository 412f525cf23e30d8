"""Tests of the cluster status that the servers return to the calling user."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from placement import status as module
from placement.status import cluster_status
from raymq.common.errors import AccessDeniedError, AuthenticationError, RaymqError, ServiceNotAvailableError
from raymq.common.protocol.status import StoppedStore

STORE = {"root": "/data/broker-a-0", "beside": ["broker-a-0", "broker-b-0", "lost+found"], "writable": True}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the functions that call servers by fakes. Returns the table of their results: it maps a server's name to
    an answer, or to an error that the fake raises."""
    known: dict[str, Any] = {"broker-a": {"ready": True}, "rebalance-0": {"groups": []}, "storage-broker-a-0": STORE}

    def call(name: str) -> Any:
        if isinstance(known[name], RaymqError):
            raise known[name]
        return known[name]

    monkeypatch.setattr(module, "running", lambda: sorted(known))
    monkeypatch.setattr(
        module, "ActorRef", lambda name: SimpleNamespace(call=lambda method, timeout_s: dict(call(name)))
    )
    return known


def test_stores_on_disk_that_do_not_run_are_named(answers: dict[str, Any]) -> None:
    found = cluster_status()
    assert found.stopped_stores == (StoppedStore("broker-b-0", "broker-b", "/data/broker-b-0"),)
    assert found.report["stopped_stores"] == [
        {"store": "broker-b-0", "broker": "broker-b", "directory": "/data/broker-b-0"}
    ]
    answers["storage-broker-b-0"] = {**STORE, "root": "/data/broker-b-0"}
    assert cluster_status().stopped_stores == ()


def test_the_store_of_a_replica_that_has_left_its_group_is_not_missing(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.ray, "nodes", list)
    members = {"version": 3, "replicas": [0], "joining": [], "leaving": [], "added": [], "removed": [1]}
    group = {"broker": "broker-a", "master": 0, "in_sync": [0], "replicas": [], "members": members, "change": ""}
    answers["controller"] = {"error": "", "groups": [group]}
    answers["storage-broker-a-0"] = {**STORE, "beside": ["broker-a-0", "broker-a-1", "broker-a-2"]}
    assert [one.store for one in cluster_status().stopped_stores] == ["broker-a-2"]


def test_a_server_that_does_not_answer_has_its_error_and_one_that_refuses_is_named_once(
    answers: dict[str, Any],
) -> None:
    for name in ("storage-broker-a-0", "rebalance-0"):
        answers[name] = AccessDeniedError("team", f"All on Server:{name}.status", "")
    answers["broker-b"] = ServiceNotAvailableError("it is away")
    told = cluster_status()
    assert (told.stores, told.rebalances) == ((), ())
    assert told.refused == ("storage-broker-a-0", "rebalance-0")
    assert [broker.error for broker in told.brokers] == ["", "it is away"]


def test_a_wrong_secret_is_an_error(answers: dict[str, Any]) -> None:
    answers["broker-a"] = AuthenticationError("the secret is another one")
    with pytest.raises(AuthenticationError):
        cluster_status()


def test_the_report_has_every_field_of_the_answers_and_the_keys_in_their_order(answers: dict[str, Any]) -> None:
    answers["rebalance-0"] = {"slots": [0], "groups": [{"group": "billing", "members": [], "more": 1}]}
    answers["pull-0"] = {"node": "n", "instances": [{"instance": "billing@1", "holding": [], "last_error": ""}]}
    answers["gateway-3f9a-0"] = {"listens": "127.0.0.1:8081", "clients": {"JAVA": 2}}
    answers["console"] = {"url": "http://127.0.0.1:8270/", "pid": 7}
    report = cluster_status().report
    assert list(report) == [
        *("actors", "brokers", "stores", "rebalances", "pulls", "groups", "instances", "replication", "consoles"),
        *("gateways", "stopped_stores", "refused", "problems"),
    ]
    assert report["actors"] == sorted(answers)
    assert report["stores"] == [{"actor": "storage-broker-a-0", "error": "", **STORE}]
    assert report["rebalances"] == [{"actor": "rebalance-0", "error": "", "slots": [0]}]
    assert report["groups"] == [{"actor": "rebalance-0", "error": "", "group": "billing", "members": [], "more": 1}]
    assert report["instances"] == [
        {"actor": "pull-0", "error": "", "instance": "billing@1", "holding": [], "last_error": ""}
    ]
    assert report["consoles"] == [{"actor": "console", "error": "", "url": "http://127.0.0.1:8270/", "pid": 7}]
    assert report["gateways"] == [
        {"actor": "gateway-3f9a-0", "error": "", "listens": "127.0.0.1:8081", "clients": {"JAVA": 2}}
    ]
    assert [problem["state"] for problem in report["problems"]] == ["warn"]
