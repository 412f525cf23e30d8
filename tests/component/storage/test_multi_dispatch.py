"""Tests of messages that are also in light queues (%LMQ% topics): they are written, found after a crash, and copied to
slaves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from raymq.common.errors import MessageIllegalError
from raymq.common.message import Message, MessageExt, PullStatus
from raymq.common.names import SCHEDULE_TOPIC
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import EncodedBatch, ProducerSequence, WaitingBatch, encode_batch
from storage.message_store import MessageStore
from tests.support.history.waiting import eventually
from tests.support.stores.stores import LOG_FILE_BYTES, bodies_of, closed_copy, killed_copy, make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

ON = {"enable_lmq": True, "enable_multi_dispatch": True}
NAMES, OFFSETS = "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET"


def batch_for(names: str, *bodies: bytes, **arguments: Any) -> EncodedBatch:
    return make_batch(bodies, extra_properties={NAMES: names}, **arguments)


def messages_in(store: MessageStore, name: str) -> list[MessageExt]:
    """Return all messages of a light queue."""
    bounds = store.queues.bounds(name, 0)
    messages: list[MessageExt] = []
    while len(messages) < bounds.max_offset - bounds.min_offset:
        request = FetchRequest(name, 0, bounds.min_offset + len(messages), 1000)
        [result] = store.fetch([request], max_bytes=1 << 20, wait_s=0)
        assert result.status is PullStatus.FOUND
        messages += decode_records(result.records)
    return messages


def bodies_in(store: MessageStore, name: str) -> list[bytes]:
    return [message.body for message in messages_in(store, name)]


def offsets_said(messages: list[MessageExt]) -> list[str]:
    return [message.system_properties[OFFSETS] for message in messages]


def queue_files(root: Path) -> dict[str, bytes]:
    directory = root / "consumequeue"
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("0*") if path.is_file()}


def filled(root: Path, **changes: Any) -> MessageStore:
    """Fill a store so that it has several log files and queue files. Some of the messages are in their own queue and in
    two light queues."""
    store = open_store(root, **ON, **changes)
    for number in range(60):
        store.append([batch_for("%LMQ%a,%LMQ%b", *(b"both %d" % number for _ in range(5)), tags="red")])
        store.append([make_batch([b"%d" % number * 500], queue_id=1), batch_for("%LMQ%b", b"b %d" % number)])
    return store


def test_a_message_is_in_the_queues_that_it_names_and_says_where(tmp_path):
    store = open_store(tmp_path, **ON)
    store.append([batch_for("%LMQ%a", b"one", b"two")])
    [result, other] = store.append([batch_for("%LMQ%b,%LMQ%a", b"three", b"four", tags="red"), make_batch([b"five"])])
    assert bodies_of(store) == [b"one", b"two", b"three", b"four", b"five"]
    in_a, in_b = messages_in(store, "%LMQ%a"), messages_in(store, "%LMQ%b")
    assert [message.body for message in in_a] == [b"one", b"two", b"three", b"four"]
    assert offsets_said(in_a) == ["0", "1", "0,2", "1,3"]
    assert [message.body for message in in_b] == [b"three", b"four"]
    assert (result.queue_offset, other.queue_offset) == (2, 4)
    assert list(result.physical_offsets) == [message.physical_offset for message in in_b]
    request = FetchRequest("%LMQ%a", 0, 0, 10, frozenset({112785}))  # 112785 is the tag code (hash) of the tag "red"
    [found] = store.fetch([request], max_bytes=1 << 20, wait_s=0)
    assert found.count == 2
    assert store.queries.by_unique_id("orders", f"{1:032X}").count == 2
    store.close()


def test_batches_of_one_append_count_on(tmp_path):
    store = open_store(tmp_path, **ON)
    store.append([batch_for("%LMQ%a", b"1", queue_id=queue_id) for queue_id in range(3)])
    assert offsets_said(messages_in(store, "%LMQ%a")) == ["0", "1", "2"]
    with pytest.raises(MessageIllegalError, match="dispatches messages of other topics to it"):
        store.append([batch_for("%LMQ%a", b"x"), make_batch([b"y"], topic="%LMQ%a")])
    store.append([make_batch([b"sent there"], topic="%LMQ%a")])
    store.append([batch_for("%LMQ%a", b"4")])
    assert bodies_in(store, "%LMQ%a") == [b"1", b"1", b"1", b"sent there", b"4"]
    store.close()


@pytest.mark.parametrize("changes", [{}, {"enable_lmq": True}, {"enable_multi_dispatch": True}])
def test_unless_both_settings_are_on_the_names_mean_nothing(tmp_path, changes):
    store = open_store(tmp_path, **changes)
    store.append([batch_for("%LMQ%a", b"one")])
    assert store.topics.queue_ids() == {"orders": [0]}
    store.close()


@pytest.mark.parametrize("topic", ["%RETRY%g", "rmq_sys_x", SCHEDULE_TOPIC])
def test_messages_of_these_topics_are_in_no_other_queue(tmp_path, topic):
    store = open_store(tmp_path, **ON)
    store.append([batch_for("%LMQ%a", b"one", topic=topic)])
    assert list(store.topics.queue_ids()) == [topic]
    store.close()


@pytest.mark.parametrize("names", ["orders2", "%LMQ%a,other", "%LMQ%a/b", "%LMQ%" + "x" * 255, "%LMQ%a,,%LMQ%b"])
def test_names_that_are_no_such_queues_are_refused_and_nothing_is_stored(tmp_path, names):
    store = open_store(tmp_path, **ON)
    with pytest.raises(MessageIllegalError, match="is not a light queue"):
        store.append([make_batch([b"fine"], queue_id=1), batch_for(names, b"one")])
    assert store.log.end_offset == 0
    store.append([batch_for("%LMQ%a", b"one")])
    assert offsets_said(messages_in(store, "%LMQ%a")) == ["0"]
    store.close()


def test_producers_cannot_set_the_offsets_of_other_queues(tmp_path):
    for changes in (ON, {}):
        store = open_store(tmp_path, **changes)
        with pytest.raises(MessageIllegalError, match="only the store may set"):
            store.append([make_batch([b"x"], extra_properties={NAMES: "%LMQ%a", OFFSETS: "7"})])
        store.close()


def test_the_number_of_light_queues_is_limited(tmp_path):
    store = open_store(tmp_path, **ON, max_lmq_consume_queue_num=2)
    store.append([batch_for("%LMQ%a", b"one")])
    with pytest.raises(MessageIllegalError, match="max_lmq_consume_queue_num"):
        store.append([batch_for("%LMQ%b,%LMQ%c", b"two")])
    assert store.topics.queue_ids() == {"%LMQ%a": [0], "orders": [0]}
    store.append([batch_for("%LMQ%a,%LMQ%b", b"two")])
    assert bodies_in(store, "%LMQ%b") == [b"two"]
    store.close()


def test_a_record_that_its_offsets_make_too_long_is_refused(tmp_path):
    store = open_store(tmp_path, **ON, max_message_size_bytes=1000)
    fits = batch_for("%LMQ%a", b"x" * 700)
    store.append([fits])
    longest = batch_for("%LMQ%a", b"x" * (700 + 1000 - int(fits.sizes[0])))
    with pytest.raises(MessageIllegalError, match="offsets in other queues"):
        store.append([longest])
    names = ",".join(f"%LMQ%{number:04d}" for number in range(3200))
    with pytest.raises(MessageIllegalError, match="offsets in other queues"):
        store.append([batch_for(names, b"x")])
    assert bodies_in(store, "%LMQ%a") == [b"x" * 700]
    store.close()


def test_a_repeated_batch_is_stored_and_dispatched_once(tmp_path):
    store = open_store(tmp_path, **ON)
    store.append([batch_for("%LMQ%a", b"one", b"two", producer=("p", 0, 0))])
    [again] = store.append([batch_for("%LMQ%a", b"one", b"two", producer=("p", 0, 0))])
    assert again.duplicate
    [rest] = store.append([batch_for("%LMQ%a", b"two", b"three", producer=("p", 0, 1))])
    assert bodies_in(store, "%LMQ%a") == bodies_of(store) == [b"one", b"two", b"three"]
    places = [message.physical_offset for message in messages_in(store, "%LMQ%a")]
    assert list(rest.physical_offsets) == places[1:]
    store.close()


def test_with_a_property_crc_it_covers_the_offsets_too(tmp_path):
    changes = {"enabled_append_prop_crc": True, "force_verify_prop_crc": True}
    store = open_store(tmp_path / "a", **ON, **changes)
    store.append([batch_for("%LMQ%a", b"one", b"two")])
    killed = killed_copy(tmp_path / "a", tmp_path / "b")
    store.close()
    again = open_store(killed, **changes)
    assert again.status().cut_bytes == 0
    assert offsets_said(messages_in(again, "%LMQ%a")) == ["0", "1"]
    again.close()


def test_a_delayed_message_is_dispatched_when_it_is_delivered(tmp_path):
    store = open_store(tmp_path, **ON, message_delay_level="1s")
    batch = encode_batch(
        [Message("orders", body, delay_level=1) for body in (b"one", b"two")],
        0,
        born_host=("127.0.0.1", 1),
        born_timestamp_ms=1,
        message_ids=["0" * 32] * 2,
        producer=ProducerSequence("p", 0, 0),
        extra_properties={NAMES: "%LMQ%a"},
        waiting=WaitingBatch(SCHEDULE_TOPIC, [0, 1]),
    )
    store.append([batch])
    assert store.topics.queue_ids() == {SCHEDULE_TOPIC: [0]}
    store.schedule.start_delivery()
    eventually(lambda: store.queues.bounds("%LMQ%a", 0).max_offset == 2, "both are delivered")
    assert bodies_in(store, "%LMQ%a") == [b"one", b"two"]
    assert offsets_said(messages_in(store, "%LMQ%a")) == ["0", "1"]
    store.close()


@pytest.mark.parametrize("lost", [(), ("dedup",), ("dedup", "checkpoint"), ("dedup", "consumequeue")])
@pytest.mark.parametrize("clean", [False, True])
def test_recovery_makes_the_units_again_whatever_the_settings(tmp_path, lost, clean):
    store = filled(tmp_path / "a")
    expected = {name: bodies_in(store, name) for name in ("%LMQ%a", "%LMQ%b")}
    assert len(expected["%LMQ%b"]) == 360
    killed = closed_copy(store, tmp_path / "a", tmp_path / "b", clean=clean, lost=lost)
    again = open_store(killed)
    assert {name: bodies_in(again, name) for name in expected} == expected
    assert queue_files(killed) == queue_files(tmp_path / "a")
    again.close()
    # Check that a message that is stored after recovery gets the next offset of its light queue.
    again = open_store(killed, **ON)
    again.append([batch_for("%LMQ%b", b"new")])
    assert offsets_said(messages_in(again, "%LMQ%b"))[-1] == "360"
    again.close()


def test_a_lost_queue_is_made_again_and_a_deleted_one_is_not(tmp_path):
    filled(tmp_path).close()
    shutil.rmtree(tmp_path / "consumequeue" / "%LMQ%a" / "0")
    store = open_store(tmp_path)
    assert len(bodies_in(store, "%LMQ%a")) == 300
    store.topics.delete("%LMQ%a")
    killed = killed_copy(tmp_path, tmp_path / "killed")
    store.close()
    (killed / "dedup").unlink()
    (killed / "checkpoint").unlink()
    again = open_store(killed, **ON)
    assert list(again.topics.queue_ids()) == ["%LMQ%b", "orders"]
    again.append([batch_for("%LMQ%a", b"new")])
    assert offsets_said(messages_in(again, "%LMQ%a")) == ["0"]
    again.close()


@pytest.mark.parametrize("max_bytes", [1, 3000, 1 << 20])
def test_slaves_have_the_same_queues(tmp_path, max_bytes):
    master, slave = filled(tmp_path / "a"), open_store(tmp_path / "b")
    master.topics.delete("%LMQ%a")
    master.append([batch_for("%LMQ%a,%LMQ%b", b"new one")])
    master.append([batch_for("%LMQ%a", b"new two")])
    while data := master.chunks.read_chunk(slave.log.end_offset, max_bytes):
        slave.chunks.append_chunk(slave.log.end_offset, data)
    assert bodies_in(slave, "%LMQ%a") == [b"new one", b"new two"]
    assert bodies_in(slave, "%LMQ%b") == bodies_in(master, "%LMQ%b")
    master.close()
    slave.close()
    assert queue_files(tmp_path / "a") == queue_files(tmp_path / "b")


def test_a_slave_whose_log_begins_later_keeps_the_offsets(tmp_path):
    master, slave = filled(tmp_path / "a"), open_store(tmp_path / "b")
    slave.chunks.begin_at(LOG_FILE_BYTES)
    while data := master.chunks.read_chunk(slave.log.end_offset, 4000):
        slave.chunks.append_chunk(slave.log.end_offset, data)
    bounds = slave.queues.bounds("%LMQ%b", 0)
    assert 0 < bounds.min_offset < bounds.max_offset == 360
    assert bodies_in(slave, "%LMQ%b") == bodies_in(master, "%LMQ%b")[bounds.min_offset :]
    master.close()
    slave.close()


def test_units_of_an_extension_lead_to_the_same_tags(tmp_path):
    store = filled(tmp_path, enable_consume_queue_ext=True)
    request = FetchRequest("%LMQ%b", 0, 0, 1000, frozenset({112785}))
    [found] = store.fetch([request], max_bytes=1 << 20, wait_s=0)
    assert found.count == 300
    store.close()
