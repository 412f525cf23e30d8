"""Tests of how a server meters users' consumption: the user whose quota a read counts against, the maximum size of a
read, and the wait after a read."""

from __future__ import annotations

from typing import Any

import pytest

from actors.core.access.meter import HANDED_OUT, Meter, ReadLimit
from raymq.common.errors import QuotaExceededError
from raymq.common.message import MessageQueue, PullStatus
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.remoting.access.users import User

USERS = {
    "free": User("free", b"", bytes_per_second=1),
    "slow": User("slow", b"", consume_bytes_per_second=1000, consume_messages_per_second=10),
    "bytes": User("bytes", b"", consume_bytes_per_second=1000),
}
REQUEST = FetchRequest("orders", 0, 0, 32)
QUEUE = MessageQueue("orders", "broker-a", 0)


@pytest.mark.parametrize("name", ["free", "nobody"])
def test_a_user_without_a_bound_is_not_counted(name: str) -> None:
    meter = Meter(USERS.get)
    for _ in range(3):
        meter.require_left(name, 0)
        meter.consumed(name, 1 << 40, 1 << 20, 0)
    assert meter.portion(name) is None


def test_a_user_waits_until_its_debt_is_paid() -> None:
    meter = Meter(USERS.get)
    meter.require_left("slow", 0)
    meter.consumed("slow", 10, 20, 0)
    with pytest.raises(QuotaExceededError) as caught:
        meter.require_left("slow", 500)
    assert (caught.value.what, caught.value.retry_after_ms) == ("consumed messages", 600)
    meter.require_left("slow", 1100)
    meter.require_left("bytes", 0)


def test_one_request_reads_a_seconds_worth_at_most() -> None:
    portion = Meter(USERS.get).portion("slow")
    assert portion == ReadLimit(1000, 10)
    assert (portion.bytes_of(64), portion.bytes_of(1 << 20)) == (64, 1000)
    assert [one.max_messages for one in portion.requests_of([REQUEST])] == [10]
    unbound = ReadLimit(0, 0)
    assert (unbound.bytes_of(64), unbound.requests_of([REQUEST])) == (64, [REQUEST])


@pytest.mark.parametrize(
    ("method", "answer", "weight"),
    [
        ("fetch", [FetchResult(PullStatus.FOUND, 3, 0, 9, b"x" * 70, 3)], (70, 3)),
        ("fetch", [FetchResult(PullStatus.FOUND, 3, 0, 9, b"", 3)], (0, 0)),
    ],
    ids=["records", "offsets"],
)
def test_the_weight_of_an_answer_is_its_messages_and_bytes(method: str, answer: Any, weight: tuple[int, int]) -> None:
    assert HANDED_OUT[method](answer) == weight
