"""The table of requests: every remote method of every server has a line, and says what a call needs."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from actors.broker.actor import Broker
from actors.nameserver import NameServer
from actors.pull.actor import Pull
from actors.rebalance import Rebalance
from actors.replica.replicator_actor import Replicator
from actors.replica.storage_actor import Storage
from placement.console.actor import ConsoleService
from placement.controller import Controller
from raymq.access.requests import FOR_SERVERS, RULES, rules_of
from raymq.errors import InvalidArgumentError
from raymq.remoting.broker_client import LANE_RESULTS

SERVERS = (Broker, Storage, NameServer, Rebalance, Pull, Controller, Replicator, ConsoleService)


def test_every_remote_method_of_every_server_is_in_the_table_once() -> None:
    methods = {
        f"{server.__name__}.{name}"
        for server in SERVERS
        for name, _ in inspect.getmembers(server, inspect.isfunction)
        if not name.startswith("_")
    }
    assert RULES.keys() | FOR_SERVERS == methods
    assert not RULES.keys() & FOR_SERVERS


def test_every_call_of_a_brokers_lane_has_a_rule() -> None:
    assert {f"Broker.{name}" for name in LANE_RESULTS} <= RULES.keys()


def needs(method: str, *arguments: object) -> list[str]:
    return [str(need) for need in RULES[method].needed(arguments)]


def named(**values: object) -> SimpleNamespace:
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("method", "arguments", "expected"),
    [
        ("Storage.append", ([named(topic="orders"), named(topic="orders")],), ["Pub on Topic:orders"]),
        ("Storage.append", ([named(topic="%RETRY%billing")],), ["Sub on Group:billing"]),
        ("Storage.fetch", ([named(topic="a"), named(topic="%DLQ%g")], 1, 0.0), ["Sub on Topic:a", "Sub on Group:g"]),
        ("Storage.bounds_of_queues", ([("a", 0), ("a", 1)],), ["Pub or Sub or Get on Topic:a"]),
        ("Storage.next_sequences", ("producer", 1, [("a", 0)]), ["Pub on Topic:a"]),
        ("Storage.end_transaction", (named(producer_group="g"),), ["Pub on Group:g"]),
        ("Broker.send", ("orders", b"x"), ["Pub on Topic:orders"]),
        ("Broker.pull", ("g", "orders"), ["Sub on Group:g", "Sub on Topic:orders"]),
        ("Broker.receive_messages", (named(group="g", topics=("a",)),), ["Sub on Group:g", "Sub on Topic:a"]),
        ("Broker.ack_messages", ("g", [named(topic="a")]), ["Sub on Group:g", "Sub on Topic:a"]),
        ("Broker.commit_offsets", ("g", {"a": {}}), ["Sub or Update on Group:g", "Sub or Update on Topic:a"]),
        ("Broker.check_broadcast", ("g",), ["Sub on Group:g"]),
        ("Broker.create_topics", ([named(topic="a")],), ["Create on Topic:a"]),
        ("Broker.delete_group", ("g", True), ["Delete on Group:g"]),
        ("Broker.consumer_connections", (None,), []),
        ("Broker.consumer_connections", ("g",), ["Sub or Get on Group:g"]),
        ("Broker.ask_client", ("c", named(group="g", kind="running")), ["Get on Group:g"]),
        ("Broker.ask_client", ("c", named(group="g", kind="consume")), ["Update on Group:g"]),
        ("Broker.heartbeat", (named(consumers=[named(group="g")]),), ["Sub on Group:g"]),
        ("Rebalance.heartbeats", ([("g", named(topics=["a"])), ("g", named())],), ["Sub on Group:g", "Sub on Topic:a"]),
        ("Pull.report", ("pull-my-group-0", "life", 1, []), ["Sub on Group:my-group"]),
        (
            "Pull.host",
            (named(settings=named(group="g", subscriptions=[named(topic="a")])),),
            ["Sub on Group:g", "Sub on Topic:a"],
        ),
        ("NameServer.topic_route", ("a",), ["Pub or Sub or Get or List on Topic:a"]),
    ],
)  # fmt: skip
def test_what_a_call_needs(method: str, arguments: tuple[object, ...], expected: list[str]) -> None:
    assert needs(method, *arguments) == expected


def test_an_instance_of_no_group_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        needs("Pull.stop", "somebody", "key", 1.0)


def test_rules_are_found_by_server() -> None:
    assert rules_of("Pull")["stop"] is RULES["Pull.stop"]
    assert "send" not in rules_of("Storage")
