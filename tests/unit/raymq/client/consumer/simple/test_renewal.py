"""Tests of the renewal of leases: which leases are renewed when, and until when."""

from __future__ import annotations

import math
import threading
import time

import pytest

from raymq.client.consumer.simple.received_message import Receipt, ReceivedMessage, parts_of, received
from raymq.client.consumer.simple.renewal import RENEW_AGAIN_S, RENEW_MAX_S, DueLeases, Renewals, Renewer
from raymq.common.errors import GroupNotExistError, ServiceNotAvailableError
from raymq.common.message import MessageExt
from raymq.common.protocol.pop import LeasePart
from tests.support.history.waiting import eventually

MS = 60_000


def messages(start: int, count: int, *, broker: str = "broker-a", invisible_ms: int = MS) -> list[ReceivedMessage]:
    """Return the messages of one lease."""
    hosts = ("10.0.0.1:0", "10.0.0.2:10911", "ID", "OFF")
    own = [
        MessageExt(
            *("orders", b"body", None, (), {}, 0, broker, 3, start + place, 0, 1, 2),
            *hosts,
            reconsume_times=0,
            sys_flag=0,
            system_properties={},
        )
        for place in range(count)
    ]
    return received(own, Receipt("orders", broker, 3, start, 1_700_000_000_000, invisible_ms, whole=count))


def part(start: int, offsets: str) -> LeasePart:
    return LeasePart("orders", 3, start, 1_700_000_000_000, offsets)


def parts(calls: list[DueLeases]) -> list[LeasePart]:
    return [one for call in calls for one in call.leases.values()]


def test_a_lease_is_renewed_after_half_of_its_time_again_and_again() -> None:
    renewals = Renewals()
    renewals.hold(messages(40, 3), MS, 100.0)
    assert renewals.next_s() == 130.0
    assert renewals.due(129.9) == []
    [call] = renewals.due(130.0)
    assert (call.broker_name, call.invisible_ms, parts([call])) == ("broker-a", MS, [part(40, "7")])
    renewals.renewed(call.leases, [True], 131.0)
    assert renewals.next_s() == 161.0
    assert parts(renewals.due(161.0)) == [part(40, "7")]


def test_only_what_is_neither_acknowledged_nor_moved_is_renewed() -> None:
    renewals = Renewals()
    first, other = messages(40, 3), messages(60, 2)
    renewals.hold(first, MS, 100.0)
    renewals.hold(other, MS, 100.0)
    renewals.settle(parts_of(first[1:2]))
    assert parts(renewals.due(130.0)) == [part(40, "5"), part(60, "3")]
    renewals.settle(parts_of(other))
    assert parts(renewals.due(130.0)) == [part(40, "5")]
    renewals.settle(parts_of([first[0], first[2]]))
    renewals.settle(parts_of(first))
    assert (len(renewals), renewals.next_s()) == (0, None)


def test_all_leases_of_a_broker_that_are_due_soon_go_in_one_call() -> None:
    renewals = Renewals()
    renewals.hold(messages(0, 1), MS, 100.0)
    renewals.hold(messages(10, 1), MS, 104.0)
    renewals.hold(messages(20, 1), MS, 106.0)
    renewals.hold(messages(30, 1, broker="broker-b"), MS, 101.0)
    assert [parts([call]) for call in renewals.due(130.0)] == [[part(0, "1"), part(10, "1")]]
    assert [call.broker_name for call in renewals.due(131.0)] == ["broker-a", "broker-b"]


def test_an_ended_lease_is_forgotten_and_a_failed_call_is_repeated() -> None:
    renewals = Renewals()
    renewals.hold(messages(0, 1), MS, 100.0)
    renewals.hold(messages(10, 1), MS, 100.0)
    [call] = renewals.due(130.0)
    renewals.renewed(call.leases, [True, False], 130.0)
    assert len(renewals) == 1
    renewals.failed(call.leases, 160.0, retryable=True)
    assert renewals.next_s() == 160.0 + RENEW_AGAIN_S
    renewals.failed(call.leases, 162.0, retryable=False)
    assert len(renewals) == 0


def test_nothing_is_renewed_for_ever() -> None:
    renewals = Renewals()
    renewals.hold(messages(0, 1), MS, 100.0)
    now_s = 100.0
    while len(renewals):
        now_s = renewals.next_s() or 0.0
        for call in renewals.due(now_s):
            renewals.renewed(call.leases, [True] * len(call.leases), now_s)
    assert now_s == 100.0 + RENEW_MAX_S


class Extensions:
    """A fake broker that records the extensions, and fails the first ones."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.made = list(errors), 0
        self.threads: set[str] = set()

    def __call__(self, name: str, own: list[LeasePart], invisible_ms: int, timeout_s: float) -> list[bool]:
        self.threads.add(threading.current_thread().name)
        if self.errors:
            raise self.errors.pop(0)
        self.made += 1
        return [True] * len(own)


def threads_of(group: str) -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == f"renew-{group}"]


def test_the_thread_renews_over_a_failure_and_ends_with_the_consumer() -> None:
    extend = Extensions(ServiceNotAvailableError("the broker restarts"))
    renewer = Renewer("g-over", extend)
    renewer.hold(messages(0, 1), 20, time.monotonic())
    eventually(lambda: extend.made >= 3, "renewals")
    assert extend.threads == {"renew-g-over"}
    renewer.close()
    renewer.close()
    eventually(lambda: not threads_of("g-over"), "the end of the thread")
    renewer.hold(messages(0, 1), 20, time.monotonic())
    assert threads_of("g-over") == []


def test_a_refused_renewal_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    extend = Extensions(GroupNotExistError("g-gone"))
    renewer = Renewer("g-gone", extend)
    renewer.hold(messages(0, 1), 20, time.monotonic())
    eventually(lambda: "cannot be renewed, and are delivered again" in caplog.text, "a warning")
    renewer.hold(messages(10, 1), 20, time.monotonic())
    eventually(lambda: extend.made >= 1, "the renewal of another lease")
    renewer.close()


def test_a_lease_is_valid_for_its_invisible_time_after_the_last_renewal() -> None:
    renewals, received_now = Renewals(), messages(40, 1)
    lease_id = received_now[0]._receipt.lease_id
    assert renewals.valid_until_s(lease_id) == 0.0
    renewals.hold(received_now, MS, 100.0)
    assert renewals.valid_until_s(lease_id) == 160.0
    renewals.failed([lease_id], 130.0, retryable=True)
    assert renewals.valid_until_s(lease_id) == 160.0
    renewals.renewed([lease_id], [True], 131.0)
    assert renewals.valid_until_s(lease_id) == 191.0
    renewals.renewed([lease_id], [False], 161.0)
    assert renewals.valid_until_s(lease_id) == 0.0


def test_a_lease_is_renewed_for_as_long_as_the_owner_says() -> None:
    renewals = Renewals(math.inf)
    renewals.hold(messages(40, 1), MS, 100.0)
    assert len(renewals.due(100.0 + 10 * RENEW_MAX_S)) == 1
