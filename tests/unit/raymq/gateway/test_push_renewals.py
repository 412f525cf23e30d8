"""Tests of the leases that a gateway renews: which are due, who settles them, and what a client leaves behind."""

from __future__ import annotations

from raymq.client.consumer.simple.received_message import Receipt, ReceivedMessage, received
from raymq.gateway.service import push_renewals
from raymq.gateway.service.push_renewals import PushRenewals
from tests.support.console.fake_cluster import fake_message
from tests.support.gateway.fake_group_calls import FakeGroupCalls

INVISIBLE_MS = 60_000
BILLING, REPORTS = FakeGroupCalls("billing"), FakeGroupCalls("reports")


def messages(start: int, count: int = 1, broker: str = "a") -> list[ReceivedMessage]:
    """Return the messages of one lease, from offset `start` on."""
    stored = [fake_message("orders", b"x", queue_offset=start + number, broker_name=broker) for number in range(count)]
    return received(stored, Receipt("orders", broker, 0, start, 1_000, INVISIBLE_MS, 1))


def starts(renewals: PushRenewals, now_s: float) -> list[int]:
    """Return the first offsets of the leases that are due."""
    return sorted(part.start for due in renewals.due(now_s) for part in due.leases.leases.values())


def test_any_client_of_the_group_settles_a_message_and_no_other_group() -> None:
    renewals = PushRenewals()
    renewals.hold("one", BILLING, messages(0, 2), INVISIBLE_MS, 0.0)
    renewals.hold("two", BILLING, messages(10), INVISIBLE_MS, 0.0)
    renewals.hold("three", REPORTS, messages(0), INVISIBLE_MS, 0.0)
    assert starts(renewals, 29.0) == []
    assert starts(renewals, 30.0) == [0, 0, 10]
    first, second = (message.handle for message in messages(0, 2))
    [other] = messages(10)
    renewals.settle("billing", "orders", [first, other.handle])
    assert starts(renewals, 30.0) == [0, 0]
    renewals.settle("billing", "orders", [second])
    renewals.settle("unknown", "orders", [second])
    assert starts(renewals, 30.0) == [0]
    assert len(renewals) == 1


def test_a_settled_message_costs_the_same_with_many_clients() -> None:
    """The owner of a lease is found by the lease, so a table of another client is not looked at."""
    renewals = PushRenewals()
    for number in range(1000):
        renewals.hold(f"client-{number}", BILLING, messages(number), INVISIBLE_MS, 0.0)
    group = renewals._held["billing"]
    looked: list[str] = []

    class Watched(dict):  # type: ignore[type-arg]
        def get(self, key: str, default: object = None) -> object:
            looked.append(key)
            return super().get(key, default)

        def values(self) -> object:
            raise AssertionError("all clients are looked at")

    group.tables = Watched(group.tables)
    renewals.settle("billing", "orders", [messages(7)[0].handle])
    assert looked == ["client-7"]
    assert len(group.tables["client-7"]) == 0


def test_the_leases_of_a_client_that_has_gone_are_returned_by_broker() -> None:
    renewals = PushRenewals()
    renewals.hold("one", BILLING, messages(0, 3), INVISIBLE_MS, 0.0)
    renewals.hold("one", BILLING, messages(5, broker="b"), INVISIBLE_MS, 0.0)
    renewals.hold("one", REPORTS, messages(7), INVISIBLE_MS, 0.0)
    renewals.hold("two", BILLING, messages(9), INVISIBLE_MS, 0.0)
    renewals.settle("billing", "orders", [messages(0, 3)[1].handle])
    returns = [
        (one.calls.group, one.leases.broker_name, [(part.start, part.offsets) for part in one.leases.leases.values()])
        for one in renewals.release("one")
    ]
    assert sorted(returns) == [
        ("billing", "a", [(0, "5")]),
        ("billing", "b", [(5, "1")]),
        ("reports", "a", [(7, "1")]),
    ]
    assert renewals.release("one") == renewals.release("nobody") == []
    assert starts(renewals, 30.0) == [9]
    # a message that a gone client still acknowledges is no error
    renewals.settle("billing", "orders", [messages(0, 3)[0].handle])


def test_leases_that_have_ended_leave_no_owner_behind() -> None:
    renewals = PushRenewals()
    renewals.hold("one", BILLING, messages(0), INVISIBLE_MS, 0.0)
    renewals.hold("two", BILLING, messages(1), INVISIBLE_MS, 0.0)
    [due] = [one for one in renewals.due(30.0) if 0 in {part.start for part in one.leases.leases.values()}]
    due.table.renewed(due.leases.leases, [False], 30.0)
    renewals.due(30.0)
    assert list(renewals._held["billing"].owners.values()) == ["two"]
    renewals.release("two")
    renewals.due(30.0)
    assert renewals._held == {}


def test_the_leases_of_one_client_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(push_renewals, "CLIENT_LEASES_MAX", 2)
    renewals = PushRenewals()
    for number in range(4):
        renewals.hold("one", BILLING, messages(number), INVISIBLE_MS, 0.0)
    assert len(renewals) == 2
    assert len(renewals._held["billing"].owners) == 2
