"""Tests that the table of requests has an entry for every remote method of every server. The entry contains the rights
that a call needs."""

from __future__ import annotations

import inspect
from dataclasses import replace
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
from placement.gateway.actor import Gateway
from raymq.common.delay import TIMER_TOPIC
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import Message
from raymq.common.names import HALF_TOPIC, SCHEDULE_TOPIC
from raymq.records.format.encode import EncodedBatch, WaitingBatch, encode_batch
from raymq.remoting.access.requests import FOR_SERVERS, OVER_LANES_ONLY, RULES, rules_of
from raymq.remoting.broker_client import LANE_RESULTS

SERVERS = (Broker, Storage, NameServer, Rebalance, Pull, Controller, Replicator, ConsoleService, Gateway)


def test_every_remote_method_of_every_server_is_in_the_table_once() -> None:
    methods = {
        f"{server.__name__}.{name}"
        for server in SERVERS
        for name, _ in inspect.getmembers(server, inspect.isfunction)
        if not name.startswith("_")
    }
    assert (RULES.keys() | FOR_SERVERS) - OVER_LANES_ONLY == methods
    assert RULES.keys() | FOR_SERVERS >= OVER_LANES_ONLY
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
        ("Storage.next_sequences", ("producer", 1, [("a", 0), (TIMER_TOPIC, 0)]), ["Pub on Topic:a"]),
        ("Storage.end_transaction", (named(producer_group="g"),), ["Pub on Group:g"]),
        ("Broker.take_group_checks", (["g", "h"], "c"), ["Pub on Group:g", "Pub on Group:h"]),
        ("Broker.send", ("orders", b"x"), ["Pub on Topic:orders"]),
        ("Broker.pull", ("g", "orders"), ["Sub on Group:g", "Sub on Topic:orders"]),
        ("Broker.receive_messages", (named(group="g", topics=("a",)),), ["Sub on Group:g", "Sub on Topic:a"]),
        ("Broker.ask_listener", (named(topic="a"),), ["Pub on Topic:a"]),
        ("Broker.take_requests", (named(group="g", topics={"a": ()}),), ["Sub on Group:g", "Sub on Topic:a"]),
        ("Broker.ack_messages", ("g", [named(topic="a")]), ["Sub on Group:g", "Sub on Topic:a"]),
        ("Broker.extend_invisible", ("g", [named(topic="a")], 1), ["Sub on Group:g", "Sub on Topic:a"]),
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
        ("Rebalance.conflict", ("g", "m", {"a": "*"}), ["Sub on Group:g", "Sub on Topic:a"]),
        ("Pull.report", ("pull-my-group-0", "life", 1, []), ["Sub on Group:my-group"]),
        (
            "Pull.host",
            (
                named(
                    instance=named(name="pull-other-group-0"),
                    settings=named(group="g", subscriptions=[named(topic="a")]),
                ),
            ),
            ["Sub on Group:g", "Sub on Group:other-group", "Sub on Topic:a"],
        ),
        ("NameServer.topic_route", ("a",), ["Pub or Sub or Get or List on Topic:a"]),
    ],
)  # fmt: skip
def test_a_call_needs_the_permissions_of_the_table(
    method: str, arguments: tuple[object, ...], expected: list[str]
) -> None:
    assert needs(method, *arguments) == expected


def waiting(topic: str, *messages: Message) -> EncodedBatch:
    """Encode messages as a producer sends them to the system topic `topic`, in which messages wait until they are
    delivered."""
    return encode_batch(
        messages,
        0,
        born_host=("127.0.0.1", 1),
        born_timestamp_ms=1,
        message_ids=["id"] * len(messages),
        waiting=WaitingBatch(topic, [0] * len(messages)),
    )


@pytest.mark.parametrize("topic", [SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC])
def test_waiting_messages_need_the_permissions_of_their_target_topics(topic: str) -> None:
    batch = waiting(topic, Message("orders", b"x"), Message("secret", b"yy"), Message("%RETRY%billing", b"z"))
    assert needs("Storage.append", [batch]) == ["Pub on Topic:orders", "Pub on Topic:secret", "Sub on Group:billing"]


@pytest.mark.parametrize("topic", [SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, "rmq_sys_broker_state"])
def test_system_topics_need_a_permission_that_no_user_has(topic: str) -> None:
    assert needs("Storage.fetch", [named(topic=topic)]) == [f"All on Server:{topic}"]
    plain = replace(waiting(SCHEDULE_TOPIC, Message("orders", b"x")), topic="rmq_sys_broker_state")
    assert needs("Storage.append", [plain]) == ["All on Server:rmq_sys_broker_state"]


def test_a_message_that_waits_and_names_no_topic_is_for_servers() -> None:
    batch = waiting(SCHEDULE_TOPIC, Message("orders", b"x"))
    nameless = replace(batch, records=bytes(batch.records).replace(b"REAL_TOPIC", b"REAL_TOPIX"))
    assert needs("Storage.append", [nameless]) == [f"All on Server:{SCHEDULE_TOPIC}"]


def test_traces_may_be_sent_to_their_own_topics() -> None:
    assert needs("Storage.append", [named(topic="rmq_sys_TRACE_DATA_x")]) == ["Pub on Topic:rmq_sys_TRACE_DATA_x"]


REPLIES = "raymq_REPLY_TOPIC"


@pytest.mark.parametrize("topic", [REPLIES, "RMQ_SYS_TRACE_TOPIC"])
def test_every_user_may_reply_and_write_its_trace(topic: str) -> None:
    assert needs("Storage.append", [named(topic=topic)]) == []
    assert needs("NameServer.topic_route", topic) == needs("NameServer.topic_routes", [topic]) == []
    assert needs("Storage.queue_bounds", topic, 0) == needs("Storage.bounds_of_queues", [(topic, 0)]) == []


def test_replies_are_read_by_the_client_that_they_are_for() -> None:
    assert needs("Storage.fetch", [named(topic=REPLIES, tag_codes=frozenset([17]))]) == []
    for codes in (None, frozenset(), frozenset([17, 18])):
        assert needs("Storage.fetch", [named(topic=REPLIES, tag_codes=codes)]) == [f"All on Server:{REPLIES}"]
    assert needs("Storage.query_by_key", REPLIES, "k") == [f"Sub or Get on Topic:{REPLIES}"]


def test_an_instance_of_no_group_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        needs("Pull.stop", "somebody", "key", 1.0)


def test_rules_are_found_by_server() -> None:
    assert rules_of("Pull")["stop"] is RULES["Pull.stop"]
    assert "send" not in rules_of("Storage")
