"""Tests of one share-mode instance with its threads: receives, listener calls, settlements, and its stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.share.feed import ShareFeed
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import GroupNotExistError, RaymqError, ServiceNotAvailableError
from raymq.common.message import ConsumeStatus, MessageExt
from raymq.common.protocol.clients import ConsumerData
from tests.support.clients.fakes import WAIT_S
from tests.support.history.leases import leased_messages, offsets_of
from tests.support.history.waiting import eventually


class FakeEngine:
    """Takes the place of the SimpleEngine: gives out prepared messages, and notes what becomes of them."""

    def __init__(self) -> None:
        self.batches: list[list[ReceivedMessage]] = []
        self.asked: list[tuple[int, float, int]] = []
        self.acked: list[int] = []
        self.returned: list[tuple[int, float, bool]] = []
        self.letters: list[tuple[int, int, str]] = []
        self.released: list[int] = []
        self.failures: list[RaymqError] = []
        self.valid_s = 60.0
        self.closed = False
        self._news = threading.Condition()

    def give(self, messages: list[ReceivedMessage]) -> None:
        with self._news:
            self.batches.append(messages)
            self._news.notify()

    def receive(self, max_messages: int, invisible_s: float, wait_s: float, max_bytes: int) -> list[ReceivedMessage]:
        with self._news:
            self.asked.append((max_messages, invisible_s, max_bytes))
            self._news.wait_for(lambda: self.batches, 0.05)
            return self.batches.pop(0) if self.batches else []

    def ack(self, messages: Iterable[ReceivedMessage]) -> int:
        if self.failures:
            raise self.failures.pop()
        self.acked += offsets_of(list(messages))
        return 0

    def change_invisible(self, messages: Iterable[ReceivedMessage], invisible_s: float, *, counted: bool) -> None:
        self.returned += [(one.queue_offset, invisible_s, counted) for one in messages]

    def dead_letter(self, message: ReceivedMessage, attempts: int, failure: str) -> bool:
        self.letters.append((message.queue_offset, attempts, failure))
        return True

    def release(self, messages: Iterable[ReceivedMessage]) -> None:
        self.released += offsets_of(list(messages))

    def valid_until_s(self, receipt: object) -> float:
        return time.monotonic() + self.valid_s if self.valid_s else 0.0


class FakeConnection:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.announced: list[ConsumerData] = []
        self.closed = False

    def announce(self, member: object, data: ConsumerData) -> None:
        self.announced.append(data)

    def close(self, member: object) -> None:
        self.closed = True


class Share:
    """A running instance with its fake connection."""

    def __init__(self, handler: Callable[[Any], Any], *, takes_batch: bool = False, **settings: Any) -> None:
        self.connection = FakeConnection()
        self.engine = self.connection.engine
        own = PushSettings("billing", (Subscription.parse("orders"),), consume_mode="share", **settings)
        connect: Any = lambda _: self.connection  # noqa: E731
        self.feed = ShareFeed(handler, own, "billing-0", takes_batch=takes_batch, connect=connect)

    def begin(self) -> Share:
        assert self.feed.begin(WAIT_S)
        return self


@pytest.fixture
def share() -> Iterator[Callable[..., Share]]:
    made: list[Share] = []

    def make(handler: Callable[[Any], Any], **how: Any) -> Share:
        made.append(Share(handler, **how))
        return made[-1]

    yield make
    for one in made:
        one.feed.stop(WAIT_S)


def test_messages_are_acknowledged_when_their_calls_have_returned(share: Any) -> None:
    seen: list[bytes] = []
    one = share(lambda message: seen.append(message.body)).begin()
    one.engine.give(leased_messages(40, 3))
    eventually(lambda: sorted(one.engine.acked) == [40, 41, 42], "the acknowledgements", WAIT_S)
    assert sorted(seen) == [b"body 40", b"body 41", b"body 42"]
    assert one.connection.announced[0].consume_mode == "share"
    eventually(lambda: one.feed.status()["buffered"] == 0, "the end of all messages", WAIT_S)
    assert (one.feed.status()["consumed"], one.feed.status()["failures"]) == (3, 0)


def test_failed_messages_return_after_the_interval_and_the_last_attempt_is_a_letter(share: Any) -> None:
    one = share(lambda message: ConsumeStatus.RECONSUME_LATER).begin()
    one.engine.give(leased_messages(40, 1))
    one.engine.give(leased_messages(50, 1, attempts=3, retry_max_times=2))
    eventually(lambda: one.engine.returned == [(40, 10.0, True)], "the return", WAIT_S)
    eventually(lambda: one.engine.letters, "the letter", WAIT_S)
    assert one.engine.letters == [(50, 3, "the listener answered RECONSUME_LATER")]
    assert one.engine.acked == []
    assert one.feed.status()["last_error"] == "the listener answered RECONSUME_LATER"


def test_the_listener_sees_the_number_of_earlier_deliveries(share: Any) -> None:
    seen: list[MessageExt] = []
    one = share(seen.append).begin()
    one.engine.give(leased_messages(40, 1, attempts=3))
    eventually(lambda: one.engine.acked, "the acknowledgement", WAIT_S)
    assert [message.reconsume_times for message in seen] == [2]


def test_a_listener_of_lists_gets_the_messages_of_one_lease(share: Any) -> None:
    seen: list[list[int]] = []
    handler = lambda messages: seen.append(offsets_of(messages))  # noqa: E731
    one = share(handler, takes_batch=True, consume_message_batch_max_size=2).begin()
    one.engine.give(leased_messages(40, 3))
    eventually(lambda: sorted(one.engine.acked) == [40, 41, 42], "the acknowledgements", WAIT_S)
    assert sorted(seen) == [[40, 41], [42]]


def test_in_order_a_failure_stops_its_message_group_only(share: Any) -> None:
    seen: list[int] = []

    def handler(message: MessageExt) -> None:
        seen.append(message.queue_offset)
        if message.queue_offset == 40:
            raise ValueError("no")

    one = share(handler, orderly=True).begin()
    one.engine.give(leased_messages(40, 4, groups=["a", "b", "a", "b"]))
    eventually(lambda: sorted(one.engine.acked) == [41, 43], "the other group", WAIT_S)
    eventually(lambda: len(one.engine.returned) == 2, "the failed group", WAIT_S)
    assert one.engine.returned == [(42, 10.0, False), (40, 10.0, True)]
    assert 42 not in seen
    assert [offset for offset in seen if offset != 40] == [41, 43]


def test_no_more_is_received_than_the_threads_can_begin(share: Any) -> None:
    go = threading.Event()
    one = share(lambda message: go.wait(WAIT_S) and None, threads=2).begin()
    try:
        one.engine.give(leased_messages(40, 2))
        eventually(lambda: one.feed.status()["buffered"] == 2, "the messages", WAIT_S)
        asked = len(one.engine.asked)
        assert {count for count, _, _ in one.engine.asked} == {2}
        one.engine.give(leased_messages(60, 1))
        assert (len(one.engine.asked), one.engine.batches != []) == (asked, True)
    finally:
        go.set()
    eventually(lambda: sorted(one.engine.acked) == [40, 41, 60], "all messages", WAIT_S)


def test_a_stop_ends_running_calls_and_returns_the_rest_uncounted(share: Any) -> None:
    begun, go = threading.Event(), threading.Event()

    def handler(message: MessageExt) -> None:
        begun.set()
        assert go.wait(WAIT_S)

    one = share(handler, threads=1, prefetch_messages=3).begin()
    one.engine.give(leased_messages(40, 3))
    assert begun.wait(WAIT_S)
    assert not one.feed.stop(0.0)
    go.set()
    assert one.feed.stop(WAIT_S)
    assert one.engine.acked == [40]
    assert one.engine.returned == [(41, 0.0, False), (42, 0.0, False)]
    assert one.connection.closed


def test_messages_that_arrive_while_suspended_go_back_uncounted(share: Any) -> None:
    seen: list[object] = []
    one = share(seen.append)
    one.feed.suspend(suspended=True)
    one.begin()
    assert one.feed.status()["suspended"]
    assert one.engine.asked == []
    one.feed._begin(one.connection, leased_messages(40, 2))
    eventually(lambda: one.engine.returned == [(40, 0.0, False), (41, 0.0, False)], "the return", WAIT_S)
    one.feed.suspend(suspended=False)
    one.engine.give(leased_messages(50, 1))
    eventually(lambda: one.engine.acked == [50], "a message after the resume", WAIT_S)
    assert len(seen) == 1


def test_no_call_begins_after_the_lease_has_ended(share: Any) -> None:
    begun, go, seen = threading.Event(), threading.Event(), []

    def handler(message: MessageExt) -> None:
        seen.append(message.queue_offset)
        begun.set()
        assert go.wait(WAIT_S)

    one = share(handler, threads=1, prefetch_messages=2).begin()
    one.engine.give(leased_messages(40, 2))
    assert begun.wait(WAIT_S)
    one.engine.valid_s = 0.0
    [request] = one.feed._running
    eventually(lambda: request.lease_until_s == 0.0, "the end of the lease", WAIT_S)
    go.set()
    eventually(lambda: one.feed.status()["buffered"] == 0, "the end of all messages", WAIT_S)
    assert seen == [40]
    assert one.engine.returned == [(41, 0.0, False)]


def test_an_acknowledgement_is_repeated_until_a_broker_answers(share: Any) -> None:
    one = share(lambda message: None).begin()
    one.engine.failures = [ServiceNotAvailableError("the broker restarts"), ServiceNotAvailableError("again")]
    one.engine.give(leased_messages(40, 1))
    eventually(lambda: one.engine.acked == [40], "the acknowledgement", WAIT_S)
    assert one.engine.released == []


def test_messages_of_a_deleted_group_are_let_go(share: Any) -> None:
    one = share(lambda message: None).begin()
    one.engine.failures = [GroupNotExistError("billing")]
    one.engine.give(leased_messages(40, 1))
    eventually(lambda: one.engine.released == [40], "the release", WAIT_S)
    eventually(lambda: one.feed.status()["buffered"] == 0, "the end of all messages", WAIT_S)


def test_a_stop_before_the_start_ends_at_once(share: Any) -> None:
    one = share(lambda message: None)
    assert one.feed.stop(WAIT_S)
    assert not one.feed.begin(0.0)
