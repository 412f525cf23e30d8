"""Tests of the registry of a broker's producers and consumers, which is built from heartbeats."""

from __future__ import annotations

from actors.core.broker.client_registry import ClientRegistry
from raymq.common.protocol.clients import ClientHeartbeat, ConsumerData

BILLING = ConsumerData("billing", "PULL", {"orders": "*"})
AUDIT = ConsumerData("audit", "PUSH", {"orders": "paid", "bills": "*"})


def beat(client: str, producers=(), consumers=()) -> ClientHeartbeat:
    return ClientHeartbeat(client, "10.0.0.1", 7, frozenset(producers), tuple(consumers))


def test_clients_are_listed_by_group_with_their_heartbeats():
    registry = ClientRegistry()
    registry.heartbeat(beat("b", ["shop"], [BILLING]), 0.0)
    registry.heartbeat(beat("a", ["shop", "cron"], [BILLING, AUDIT]), 1.0)
    assert [connection.client_id for connection in registry.producers(2.0, "shop")] == ["a", "b"]
    assert [connection.silent_s for connection in registry.producers(2.0, "shop")] == [1.0, 2.0]
    assert [connection.consumer for connection in registry.consumers(2.0, "audit")] == [AUDIT]
    assert len(registry.consumers(2.0)) == 3
    assert registry.consumers(2.0, "nobody") == []


def test_a_consumer_has_the_library_of_its_client_or_its_own():
    java = ConsumerData("billing", "POP", member="java-1", language="JAVA", version="5.0.7")
    registry = ClientRegistry()
    registry.heartbeat(ClientHeartbeat("gateway", "10.0.0.1", 7, consumers=(BILLING, java), version="0.2.0"), 0.0)
    found = registry.consumers(0.0, "billing")
    assert [(one.language, one.version) for one in found] == [("PYTHON", "0.2.0"), ("JAVA", "5.0.7")]


def test_a_heartbeat_replaces_the_previous_heartbeat():
    registry = ClientRegistry()
    registry.heartbeat(beat("a", ["shop"], [BILLING, AUDIT]), 0.0)
    registry.heartbeat(beat("a", [], [BILLING]), 1.0)
    assert registry.producers(1.0) == []
    assert [connection.consumer for connection in registry.consumers(1.0)] == [BILLING]


def test_members_with_different_subscriptions_do_not_overwrite_one_another():
    other = ConsumerData("billing", "PULL", {"bills": "*"})
    registry = ClientRegistry()
    registry.heartbeat(beat("a", consumers=[BILLING]), 0.0)
    registry.heartbeat(beat("b", consumers=[other]), 0.0)
    assert [connection.consumer for connection in registry.consumers(0.0, "billing")] == [BILLING, other]


def test_a_silent_client_is_forgotten_after_two_minutes_and_not_before():
    registry = ClientRegistry()
    registry.heartbeat(beat("a", ["shop"]), 0.0)
    assert len(registry.producers(120.0)) == 1
    assert registry.producers(120.1) == []
    registry.heartbeat(beat("a", ["shop"]), 121.0)
    assert len(registry.producers(121.0)) == 1


def test_a_client_that_ends_is_forgotten_at_once():
    registry = ClientRegistry()
    registry.heartbeat(beat("a", ["shop"]), 0.0)
    registry.unregister("a")
    registry.unregister("a")
    assert registry.producers(0.0) == []


def test_a_client_is_removed_when_it_unregisters_or_its_heartbeats_stop():
    registry = ClientRegistry(started_s=0.0)
    registry.heartbeat(beat("a", ["shop"]), 0.0)
    registry.heartbeat(beat("b", ["shop"]), 0.0)
    assert registry.knows("a", 1.0)
    registry.unregister("a")
    assert not registry.knows("a", 1.0)
    assert registry.knows("b", 119.0)
    assert not registry.knows("b", 121.0)


def test_a_registry_that_is_new_does_not_take_a_client_for_gone():
    registry = ClientRegistry(started_s=100.0)
    assert registry.knows("not heard of yet", 101.0)
    assert not registry.knows("not heard of yet", 221.0)
    for number in range(10_001):
        registry.unregister(f"c{number}")
    assert registry.knows("c0", 101.0)  # the registry remembers the last 10,000 unregistered clients
    assert not registry.knows("c1", 101.0)


def test_subscriptions_of_a_group_include_all_of_its_consumers():
    registry = ClientRegistry(expiry_s=10.0)
    registry.heartbeat(beat("a", consumers=[BILLING, AUDIT]), 0.0)
    registry.heartbeat(beat("b", ["shop"], [ConsumerData("billing", "POP", {"refunds": "*"})]), 5.0)
    assert registry.subscriptions(5.0) == {"billing": {"orders", "refunds"}, "audit": {"orders", "bills"}}
    assert registry.subscriptions(12.0) == {"billing": {"refunds"}}


def test_subscriptions_are_unknown_until_every_client_could_send_them():
    registry = ClientRegistry(expiry_s=10.0, started_s=100.0)
    registry.heartbeat(beat("a", consumers=[BILLING]), 101.0)
    assert registry.subscriptions(109.0) is None
    assert registry.subscriptions(110.0) == {"billing": {"orders"}}
