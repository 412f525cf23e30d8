"""Tests of the long polls of the Fetcher while stores fail and routes disappear."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import pytest

from raymq.client.consumer import fetcher as fetcher_module
from raymq.client.consumer.fetcher import (
    FETCH_CALL_TIMEOUT_S,
    FETCH_LONG_POLL_S,
    OTHERS_TIMEOUT_S,
    READERS_MAX,
    Fetcher,
)
from raymq.common.errors import DataLossError, QuotaExceededError, ServiceNotAvailableError, TopicNotExistError
from raymq.common.message import MessageQueue, PullStatus
from raymq.common.protocol.store import FetchRequest, FetchResult
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually

Q0, Q1, OTHER = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1), MessageQueue("other", "b", 0)


class Owner:
    """Fake consumer that owns a Fetcher. It keeps the positions to fetch from, and the delivered messages.

    `answer` determines the answers of its store. Two threads may fetch from the same position: the fake consumer
    ignores the result that arrives second.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.offsets: dict[MessageQueue, int] = {}
        self.full: set[MessageQueue] = set()
        self.delivered: list[tuple[MessageQueue, int]] = []
        self.waits: list[tuple[str, float, int]] = []
        self.routes: dict[str, Callable[[], str]] = {}
        self.answer = lambda request: FetchResult(PullStatus.FOUND, request.queue_offset + 1, 0, 99, b"x", 1)
        self.failures: list[Exception] = []
        self.asked_anew: list[str] = []
        self.gone: set[str] = set()
        self.slaves: list[str] = []
        self.pull_from: dict[str, str] = {}
        self.timeouts: set[tuple[str, float]] = set()
        self.lost: list[tuple[MessageQueue, int, str]] = []
        self.end = 3
        self.polling = False
        self.found: Callable[[MessageQueue, str], None] = lambda queue, name: None
        self.fetcher = Fetcher(
            wanted=self.wanted,
            assigned=lambda: frozenset(self.offsets),
            deliver=self.deliver,
            request=lambda queue, offset: FetchRequest(queue.topic, queue.queue_id, offset, 10),
            storages=self.storages,
            storage=lambda name: _Storage(self, name),
            outdated=self.outdated,
            lost=lambda queue, offset, error: self.lost.append((queue, offset, str(error))),
            found=self.note_found,
        )

    def note_found(self, queue: MessageQueue, name: str) -> None:
        self.found(queue, name)

    def storages(self, queue: MessageQueue) -> list[str]:
        master = self.routes.get(queue.topic, lambda: f"storage-{queue.broker_name}-0")()
        return [master, *self.slaves]

    def outdated(self, queue: MessageQueue) -> None:
        with self.changed:
            self.asked_anew.append(queue.topic)

    def wanted(self):
        with self.changed:
            return {q: at for q, at in self.offsets.items() if at < self.end and q not in self.full}

    def deliver(self, queue, offset, result) -> None:
        with self.changed:
            if self.failures:
                raise self.failures.pop()
            if (queue, offset) not in self.delivered:  # like a consumer, ignore a message that was already delivered
                self.delivered.append((queue, offset))
            self.offsets[queue] = result.next_offset
            self.changed.notify_all()

    def wait_for(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), self.delivered


class _Storage:
    def __init__(self, owner: Owner, name: str) -> None:
        self.owner, self.name = owner, name

    def fetch(self, requests, max_bytes, wait_s, timeout_s):
        with self.owner.changed:
            self.owner.waits.append((self.name, wait_s, len(requests)))
            self.owner.timeouts.add((self.name, timeout_s))
            if self.name in self.owner.gone:
                raise ServiceNotAvailableError(f"{self.name} is gone")
        pull_from = self.owner.pull_from.get(self.name, "")
        return [replace(self.owner.answer(request), pull_from=pull_from) for request in requests]


@pytest.fixture
def owner():
    owner = Owner()
    yield owner
    owner.fetcher.stop()


def test_all_queues_of_a_storage_actor_are_read_with_one_call_and_to_their_ends(owner):
    owner.offsets = {Q0: 0, Q1: 1, OTHER: 2}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: len(set(owner.delivered)) == 6)
    assert [at for queue, at in owner.delivered if queue == Q0] == [0, 1, 2]
    assert [at for queue, at in owner.delivered if queue == Q1] == [1, 2]
    assert {name for name, _, _ in owner.waits} == {"storage-a-0", "storage-b-0"}
    assert ("storage-a-0", FETCH_LONG_POLL_S, 2) in owner.waits


def test_a_queue_that_is_granted_later_is_read_after_a_wake(owner):
    owner.offsets = {Q0: 0}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: len(set(owner.delivered)) == 3)
    owner.offsets[Q1] = 0
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: len(set(owner.delivered)) == 6)


@pytest.fixture
def polls(owner):
    """Return the queues of the fetch requests that wait in the store's long poll."""
    waiting: dict[MessageQueue, threading.Event] = {}

    def answer(request):
        gate = waiting.get(MessageQueue(request.topic, "a", request.queue_id))
        if gate is not None:
            owner.polling = True
            assert gate.wait(WAIT_S)
        return FetchResult(PullStatus.FOUND, request.queue_offset + 1, 0, 99, b"x", 1)

    owner.answer = answer
    yield waiting
    for gate in waiting.values():
        gate.set()


def test_a_queue_that_has_room_again_is_read_at_once_while_the_others_wait_in_their_poll(owner, polls):
    polls[Q0] = threading.Event()
    owner.offsets, owner.full = {Q0: 0, Q1: 0}, {Q1}
    owner.fetcher.wake_readers()
    eventually(lambda: owner.waits == [("storage-a-0", FETCH_LONG_POLL_S, 1)], "the poll", WAIT_S)
    owner.full = set()
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: [at for queue, at in owner.delivered if queue == Q1] == [0, 1, 2])
    assert {wait_s for _, wait_s, _ in owner.waits} == {FETCH_LONG_POLL_S}


def test_a_queue_that_is_full_is_not_asked_for(owner, polls):
    polls[Q0] = threading.Event()
    owner.offsets, owner.full = {Q0: 0, Q1: 0}, {Q1}
    for _ in range(10):
        owner.fetcher.wake_readers()
    eventually(lambda: owner.waits, "the poll", WAIT_S)
    assert owner.waits == [("storage-a-0", FETCH_LONG_POLL_S, 1)]


def test_an_offset_that_was_moved_is_asked_for_at_once(owner, polls):
    polls[Q0] = threading.Event()
    owner.offsets = {Q0: 0}
    owner.fetcher.wake_readers()
    eventually(lambda: owner.polling, "the poll", WAIT_S)
    gate = polls.pop(Q0)
    owner.offsets[Q0] = 1
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: owner.delivered[:2] == [(Q0, 1), (Q0, 2)])
    gate.set()


def test_a_storage_actor_is_not_asked_by_more_threads_than_allowed(owner, polls):
    queues = [MessageQueue("orders", "a", number) for number in range(READERS_MAX + 2)]
    for queue in queues:
        polls[queue] = threading.Event()
        owner.offsets[queue] = 0
        owner.fetcher.wake_readers()
        if len(owner.offsets) <= READERS_MAX:
            eventually(lambda: len(owner.waits) == len(owner.offsets), "one more poll", WAIT_S)
    assert len(owner.waits) == READERS_MAX


@pytest.mark.parametrize("failure", [ServiceNotAvailableError("restarting"), ValueError("a bug")])
def test_a_failure_to_read_is_tried_again(owner, failure):
    failures = [failure, failure]
    usual = owner.answer

    def answer(request):
        if failures:
            raise failures.pop()
        return usual(request)

    owner.answer = answer
    owner.offsets = {Q0: 0}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: len(set(owner.delivered)) == 3)


def test_a_read_over_the_quota_waits_and_asks_no_other_replica(owner):
    refusals, usual = [QuotaExceededError("team", "consumed bytes", 30)] * 3, owner.answer

    def answer(request):
        if refusals:
            raise refusals.pop()
        return usual(request)

    owner.answer = answer
    owner.offsets = {Q0: 0}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: len(set(owner.delivered)) == 3)
    assert owner.asked_anew == []


def test_records_that_the_owner_cannot_decode_do_not_end_the_reading(owner):
    owner.failures = [ValueError("damaged record")]
    owner.offsets = {Q0: 0}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: [at for _, at in owner.delivered] == [0, 1, 2])


def test_a_topic_without_a_route_does_not_keep_the_others_from_being_read(owner):
    def gone():
        raise TopicNotExistError("other")

    owner.routes["other"] = gone
    owner.offsets = {Q0: 0, OTHER: 0}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: [at for queue, at in owner.delivered if queue == Q0] == [0, 1, 2])
    del owner.routes["other"]
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: [at for queue, at in owner.delivered if queue == OTHER] == [0, 1, 2])


def test_an_offset_that_is_gone_is_not_asked_for_without_a_pause(owner, monkeypatch):
    """The Fetcher pauses between two fetches of an offset whose message was deleted. The store answers such a fetch at
    once, and the consumer (the Fetcher's owner) may not be able to skip the offset yet."""
    monkeypatch.setattr(fetcher_module, "GONE_PAUSE_S", 3600.0)
    owner.answer = lambda request: FetchResult(PullStatus.OFFSET_ILLEGAL, request.queue_offset, 5, 9, b"", 0)
    owner.offsets = {Q0: 0}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: owner.delivered == [(Q0, 0)])
    owner.fetcher.stop()
    assert len(owner.waits) == 1


def test_after_stop_nothing_is_read_any_more(owner):
    owner.fetcher.stop()
    owner.offsets = {Q0: 0}
    owner.fetcher.wake_readers()
    assert owner.waits == []


def test_reading_continues_at_a_new_master_after_a_failed_read(owner):
    """After a failover, reading continues at the new master. Only a failed read reveals the new master, so the Fetcher
    then requests the route again."""
    owner.offsets = {Q0: 0, Q1: 0}
    owner.gone = {"storage-a-0"}
    owner.routes["orders"] = lambda: "storage-a-1" if owner.asked_anew else "storage-a-0"
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: len(set(owner.delivered)) == 6)
    assert set(owner.asked_anew) == {"orders"}
    assert {name for name, _, _ in owner.waits} == {"storage-a-0", "storage-a-1"}


def test_reading_continues_at_a_slave_while_the_master_does_not_answer(owner):
    owner.offsets = {Q0: 0, Q1: 0}
    owner.gone, owner.slaves = {"storage-a-0"}, ["storage-a-1", "storage-a-2"]
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: len(set(owner.delivered)) == 6)
    assert {name for name, _, _ in owner.waits} == {"storage-a-0", "storage-a-1"}
    assert ("storage-a-0", OTHERS_TIMEOUT_S) in owner.timeouts


def test_a_single_replica_gets_more_time_to_answer(owner):
    owner.offsets = {Q0: 0}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: len(set(owner.delivered)) == 3)
    assert owner.timeouts == {("storage-a-0", FETCH_CALL_TIMEOUT_S)}


def test_the_suggested_replica_is_read_next_without_a_pause(owner):
    owner.slaves = ["storage-a-1"]
    owner.pull_from = {"storage-a-0": "storage-a-1"}
    owner.offsets = {Q0: 0}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: len(set(owner.delivered)) == 3)
    # Count consecutive fetches from the same storage actor once: the Fetcher may already have begun another fetch.
    assert [name for name, _ in groupby(name for name, _, _ in owner.waits)] == ["storage-a-0", "storage-a-1"]
    owner.pull_from = {"storage-a-1": "storage-a-0"}
    owner.end = 5
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: len(set(owner.delivered)) == 5)
    asked = [name for name, _ in groupby(name for name, _, _ in owner.waits)]
    assert asked == ["storage-a-0", "storage-a-1", "storage-a-0"]
    assert owner.asked_anew == []


def lossy(owner: Owner, queue: MessageQueue, offset: int) -> None:
    usual = owner.answer

    def answer(request):
        if (request.queue_id, request.queue_offset) == (queue.queue_id, offset):
            raise DataLossError("cut short")
        return usual(request)

    owner.answer = answer


def test_a_loss_is_reported_each_time_and_does_not_block_other_queues(owner, monkeypatch):
    monkeypatch.setattr(fetcher_module, "LOSS_PAUSE_S", 0.02)
    monkeypatch.setattr(fetcher_module, "FETCH_LONG_POLL_S", 0.02)
    usual = owner.answer
    lossy(owner, Q0, 1)
    owner.offsets = {Q0: 0, Q1: 0}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: [at for queue, at in owner.delivered if queue == Q1] == [0, 1, 2])
    eventually(lambda: len(owner.lost) > 2, "it is tried again", WAIT_S)
    assert set(owner.lost) == {(Q0, 1, "cut short")}
    owner.answer = usual
    owner.wait_for(lambda: [at for queue, at in owner.delivered if queue == Q0] == [0, 1, 2])


def test_a_lost_offset_is_requested_with_pauses_and_another_offset_at_once(owner, monkeypatch):
    monkeypatch.setattr(fetcher_module, "LOSS_PAUSE_S", 3600.0)
    lossy(owner, Q0, 0)
    owner.offsets = {Q0: 0}
    owner.fetcher.wake_readers()
    eventually(lambda: owner.lost, "the loss", WAIT_S)
    count = len(owner.waits)
    owner.offsets = {Q0: 1}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: [at for _, at in owner.delivered] == [1, 2])
    assert (count, owner.lost) == (2, [(Q0, 0, "cut short")])


def test_messages_that_a_slave_has_lost_are_read_from_the_master(owner):
    owner.slaves = ["storage-a-1"]
    owner.pull_from = {"storage-a-0": "storage-a-1"}
    at_slave = owner.waits

    def answer(request):
        if request.queue_offset == 1 and at_slave[-1][0] == "storage-a-1":
            raise DataLossError("cut short there")
        return FetchResult(PullStatus.FOUND, request.queue_offset + 1, 0, 99, b"x", 1)

    owner.answer = answer
    owner.offsets = {Q0: 0}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: [at for _, at in owner.delivered] == [0, 1, 2])
    assert owner.lost == []
    assert {name for name, _, _ in owner.waits} == {"storage-a-0", "storage-a-1"}


def test_an_unknown_route_is_requested_again_without_a_wakeup(owner):
    """The Fetcher requests a missing route again by itself, although no other thread wakes it. A route is missing if
    the consumer's process restarts while no NameServer answers."""
    failures = [ServiceNotAvailableError("no NameServer answers") for _ in range(3)]

    def away():
        if failures:
            raise failures.pop()
        return "storage-a-0"

    owner.routes["orders"] = away
    owner.offsets = {Q0: 0, Q1: 0}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: len(set(owner.delivered)) == 6)
    assert not failures


def test_a_nameserver_that_hangs_holds_up_neither_who_wakes_nor_the_other_topics(owner):
    hanging = threading.Event()

    def hangs():
        assert hanging.wait(WAIT_S)
        return "storage-b-0"

    owner.routes["other"] = hangs
    owner.offsets = {Q0: 0, OTHER: 0}
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: [at for queue, at in owner.delivered if queue == Q0] == [0, 1, 2])
    owner.end = 5
    owner.fetcher.wake_readers()
    owner.wait_for(lambda: [at for queue, at in owner.delivered if queue == Q0] == [0, 1, 2, 3, 4])
    hanging.set()
    owner.wait_for(lambda: [at for queue, at in owner.delivered if queue == OTHER] == [0, 1, 2, 3, 4])


def test_a_queue_whose_storage_actor_is_replaced_while_it_is_being_found_is_found_once_more(owner):
    """If a queue's storage actor is replaced during the call of `found` with the earlier actor, `found` is also called
    with the new actor. This happens if the polling thread gets an answer before the thread that searches for storage
    actors has recorded the earlier actor."""
    found = []

    def note(queue, name):
        found.append(name)
        if len(found) == 1:
            assert owner.fetcher.replaced(queue, name, "storage-a-1")

    owner.offsets, owner.slaves, owner.found, owner.end = {Q0: 0}, ["storage-a-1"], note, 0
    owner.fetcher.wake_readers()
    owner.fetcher.find_again(Q0)
    eventually(lambda: found[-1:] == ["storage-a-1"], "the other storage actor", WAIT_S)
