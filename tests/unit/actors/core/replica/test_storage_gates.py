"""Tests of the appends that a storage actor refuses before they reach its store: appends to deleted topics, and appends
above the limit on running appends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.core.replica import deleted_topics
from actors.core.replica.append_limit import AppendLimit
from actors.core.replica.deleted_topics import CLOSED_TOPICS_FILE, DeletedTopics
from raymq.common.errors import SystemBusyError, TopicNotExistError
from raymq.common.message import Message
from raymq.common.names import SCHEDULE_TOPIC
from raymq.records.format.encode import EncodedBatch, WaitingBatch, encode_batch
from tests.support.stores.stores import make_batch


class Disk(dict):
    def read(self, name):
        return self.get(name)

    def write(self, name, text):
        self[name] = text


@pytest.fixture
def disk():
    return Disk()


def reopen(disk) -> DeletedTopics:
    return DeletedTopics(disk.read, disk.write)


def test_a_deleted_topic_is_refused_also_after_a_restart_until_it_is_created(disk):
    batches = [make_batch([b"x"], topic="bills"), make_batch([b"x"])]
    deleted = reopen(disk)
    deleted.check(batches)
    deleted.add("orders")
    for one in (deleted, reopen(disk)):
        assert "orders" in one
        with pytest.raises(TopicNotExistError, match="orders"):
            one.check(batches)
        one.check(batches[:1])
    deleted.remove(["orders"])
    for one in (deleted, reopen(disk)):
        one.check(batches)


def test_a_new_master_agrees_on_topics_deleted_and_created_under_other_masters(disk):
    deleted = reopen(disk)
    # the topic "orders" was deleted while this replica was the master, and was created again under another master
    deleted.add("orders")
    deleted.agree({"orders", "bills"}, ["orders", "bills", "parcels"])
    for one in (deleted, reopen(disk)):
        one.check([make_batch([b"x"]), make_batch([b"x"], topic="bills")])
        with pytest.raises(TopicNotExistError, match="parcels"):
            one.check([make_batch([b"x"], topic="parcels")])


def test_a_delayed_message_for_a_deleted_topic_is_refused_too(disk):
    deleted = reopen(disk)
    deleted.add("orders")

    def delayed(*topics: str) -> EncodedBatch:
        waiting = WaitingBatch(SCHEDULE_TOPIC, [0 for _ in topics])
        messages, ids = [Message(topic, b"x", delay_level=3) for topic in topics], ["A" for _ in topics]
        host = ("10.0.0.1", 1)
        return encode_batch(messages, 2, born_host=host, born_timestamp_ms=1, message_ids=ids, waiting=waiting)

    deleted.check([delayed("bills", "bills")])
    with pytest.raises(TopicNotExistError, match="orders"):
        deleted.check([delayed("bills", "orders")])
    damaged = delayed("orders")
    # the check for deleted topics raises no error for a damaged batch, because the store itself reports the damage
    # later
    deleted.check([replace(damaged, records=b"x" * len(damaged.records))])


def test_a_deletion_that_cannot_be_noted_is_not_carried_out(disk):
    def fail(name, text):
        raise OSError("no room")

    deleted = DeletedTopics(disk.read, fail)
    with pytest.raises(OSError, match="no room"):
        deleted.add("orders")
    assert "orders" not in deleted


def test_the_table_is_bounded_and_forgets_the_oldest(disk, monkeypatch):
    monkeypatch.setattr(deleted_topics, "CLOSED_TOPICS_MAX", 2)
    deleted = reopen(disk)
    for topic in ("a", "b", "a", "c"):
        deleted.add(topic)
    assert disk[CLOSED_TOPICS_FILE] == '["a", "c"]'


def test_an_append_over_the_limit_is_refused_with_the_setting():
    limit = AppendLimit(2)
    with limit.enter(), limit.enter(), pytest.raises(SystemBusyError, match="send_queue_capacity"), limit.enter():
        raise AssertionError("it was let in")
    with limit.enter():
        pass


def test_an_append_that_fails_gives_its_turn_back():
    limit = AppendLimit(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="disk"), limit.enter():
            raise ValueError("disk")
    with limit.enter():
        pass
