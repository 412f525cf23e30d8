"""Tests of a storage actor's metrics. Each test produces known traffic on a real store, and compares the metrics with
this traffic."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from actors.replica.storage_metrics import StorageMetrics
from raymq.common.delay import TIMER_TOPIC, timer_queue
from raymq.common.errors import ServiceNotAvailableError, StoreNotWritableError
from raymq.common.message import Message
from raymq.common.protocol.stats import RequestFigures
from raymq.common.protocol.store import FetchRequest, QueuePosition
from raymq.records.format.encode import WaitingBatch, encode_batch
from raymq.telemetry.metrics.reporter import Reporter
from tests.support.history.waiting import eventually
from tests.support.metrics.fake_ray import FakeMetrics
from tests.support.stores.clocks import Clock
from tests.support.stores.stores import make_batch, open_store
from tests.support.stores.transactions import begin

pytestmark = pytest.mark.usefixtures("no_flushes")

WAITING = RequestFigures("pull", 2, 10.0, 8, 900.0, 3, 70.0, 5, 6)


@pytest.fixture
def ray_metrics(monkeypatch):
    fake = FakeMetrics()
    monkeypatch.setitem(sys.modules, "ray.util.metrics", fake.module())
    return fake


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    store = open_store(tmp_path / "store", clock_ms=clock)
    yield store
    store.close()


@pytest.fixture
def report(store, ray_metrics):
    """Return a function that makes the store report its metrics once more. The function returns the metric values that
    Ray received."""
    reporter = Reporter("c", "broker-a", "storage-broker-a-0")
    metrics = StorageMetrics(lambda: store, lambda: 3, lambda: [WAITING])

    def once():
        metrics.report(reporter)
        return ray_metrics

    return once


def test_messages_and_bytes_by_topic(store, report):
    batches = [make_batch([b"x" * 100] * 40), make_batch([b"y"] * 2, topic="bills"), make_batch([b"z"])]
    store.append(batches[:2])
    assert report().value("raymq_messages_in", topic="orders", message_type="normal", is_system="false") == 40
    store.append(batches[2:])
    assert report().value("raymq_messages_in", topic="orders") == 41
    assert report().value("raymq_messages_in", topic="bills") == 2
    stored = sum(len(batch.records) for batch in batches)
    assert sum(report().series("raymq_throughput_in")) == stored
    assert report().value("raymq_message_size_count", message_type="normal") == 43
    assert report().value("raymq_message_size_sum") == pytest.approx(stored)
    assert report().value("raymq_message_size_bucket", le="1024") == 43
    assert report().value("raymq_put_latency_milliseconds_count") == 2
    assert report().value("raymq_rpc_latency_milliseconds_count", request_code="send", response_code="SUCCESS") == 2
    store.fetch([FetchRequest("orders", 0, 0, 10)], max_bytes=1000, wait_s=0)
    assert report().value("raymq_rpc_latency_milliseconds_count", request_code="pull") == 1


def test_repeats_and_refusals(store, report):
    for _ in range(3):
        store.append([make_batch([b"a", b"b"], producer=("p", 0, 0))])
    store.fence("it follows")
    with pytest.raises(StoreNotWritableError):
        store.append([make_batch([b"c"])])
    assert report().value("raymq_duplicates_dropped") == 4
    assert report().value("raymq_put_failed") == 1


@pytest.mark.parametrize("kind", ["FIFO", "PRIORITY"])
def test_messages_of_a_topic_whose_type_chooses_the_queue(store, report, kind):
    entry = '{"topicConfigTable": {"orders": {"attributes": {"message.type": "KIND"}}}}'.replace("KIND", kind)
    store.write_config("topics.json", entry)
    store.append([make_batch([b"a"]), make_batch([b"a"], topic="bills")])
    assert report().value("raymq_messages_in", topic="orders", message_type=kind.lower()) == 1
    assert report().value("raymq_messages_in", topic="bills", message_type="normal") == 1


def test_delayed_messages(store, report, clock):
    due_ms = clock() + 300_000
    messages = [Message("orders", b"late", deliver_at_ms=due_ms)] * 2
    waiting = WaitingBatch(TIMER_TOPIC, [0, 0])
    store.append(
        [
            encode_batch(
                messages,
                timer_queue(due_ms, clock()),
                born_host=("127.0.0.1", 1),
                born_timestamp_ms=clock(),
                message_ids=["A" * 32, "B" * 32],
                producer=None,
                waiting=waiting,
            )
        ]
    )
    scheduler = store.schedule.new_scheduler()
    scheduler.round()
    store.schedule.status = scheduler.status
    seen = report()
    assert seen.value("raymq_messages_in", topic=TIMER_TOPIC, message_type="delay", is_system="true") == 2
    assert seen.value("raymq_timer_enqueue", topic=TIMER_TOPIC) == 2
    assert seen.value("raymq_timing_messages", topic="deliver_at") == 2
    assert sum(seen.series("raymq_timer_message_snapshot")) == 2
    assert seen.value("raymq_delay_message_latency_seconds_bucket", le="60") == 0
    assert seen.value("raymq_delay_message_latency_seconds_bucket", le="600") == 2
    clock.now_ms = due_ms + 1
    scheduler.round()
    assert report().value("raymq_messages_in", topic="orders", message_type="delay") == 2
    assert report().value("raymq_timer_dequeue", topic="orders") == 2


def test_transactions(store, report, clock):
    halves = [begin(store, bytes([65 + number]), clock=clock) for number in range(3)]
    assert report().value("raymq_half_messages") == 3
    clock.now_ms += 200
    halves[0].commit()
    halves[0].commit()  # Commit the same transaction again; the latency metric does not count a repeated commit.
    halves[1].rollback()
    latency = "raymq_finish_message_latency_milliseconds"
    assert report().value(f"{latency}_bucket", topic="orders", le="100") == 0
    assert report().value(f"{latency}_bucket", topic="orders", le="500") == 2
    assert report().value(f"{latency}_sum", topic="orders") == 400
    assert report().value("raymq_half_messages") == 1
    assert report().value("raymq_commit_messages", topic="orders") == 1
    assert report().value("raymq_rollback_messages") == 1
    assert report().value("raymq_messages_in", topic="orders", message_type="transaction") == 1


def test_the_state_of_the_store(store, report):
    store.append([make_batch([b"a"])])
    seen = report()
    assert seen.value("raymq_storage_size_bytes", storage_type="local") == store.log.end_offset - store.log.min_offset
    assert seen.value("raymq_storage_writable") == 1
    assert seen.value("raymq_processor_watermark", processor="append") == 3
    assert seen.value("raymq_processor_watermark", processor="pull") == 2
    assert seen.value("raymq_request_wait_milliseconds", processor="pull") == 70.0
    assert seen.value("raymq_requests_refused", processor="pull", reason="full") == 5
    assert seen.value("raymq_requests_refused", processor="pull", reason="late") == 6
    assert seen.value("raymq_recovery_cut_bytes") == 0
    assert [seen.value(f"raymq_{name}") for name in ("log_holes", "log_hole_bytes", "damaged_files")] == [0, 0, 0]
    scrub = [seen.value(f"raymq_scrub_{name}") for name in ("unrepaired", "overdue", "age_seconds")]
    assert scrub == [0, 0, 0]
    store._parts.holes.mended_bytes, store._parts.holes.mended_holes = 400, 2
    assert [report().value(f"raymq_{name}") for name in ("log_mended_bytes", "log_holes_mended")] == [400, 2]
    store.fence("it follows")
    assert report().value("raymq_storage_writable") == 0
    assert seen.value("raymq_storage_disk_failed") == 0
    store.gate.fail(OSError(errno.EIO, os.strerror(errno.EIO)))
    assert report().value("raymq_storage_disk_failed") == 1


def test_the_verification_of_the_store(store, report):
    store.append([make_batch([b"a"])])
    number = store.scrubber.verify_now()
    eventually(lambda: store.scrubber.status().completed == number, "the end of the verification")
    assert report().value("raymq_scrub_bytes") > store.log.end_offset
    assert report().value("raymq_scrub_unrepaired") == 0


def test_a_store_that_cannot_be_opened_is_not_writable(ray_metrics):
    def refuse():
        raise ServiceNotAvailableError("the disk is away")

    StorageMetrics(refuse, lambda: 0, list).report(Reporter("c", "broker-a", "s"))
    assert ray_metrics.value("raymq_storage_writable") == 0


def test_copies_from_another_replica_are_no_messages_in(store, report, tmp_path, clock):
    store.append([make_batch([b"a"] * 5)])
    chunk = store.chunks.read_chunk(0, 1 << 20)
    copy = open_store(tmp_path / "copy", clock_ms=clock)
    try:
        copy.chunks.append_chunk(0, chunk)
        assert copy.stats.topics()["orders"].messages == 5
        assert copy.stats.received() == {}
        assert copy.stats.sizes() == {}
    finally:
        copy.close()


def test_bounds_of_many_queues_and_the_times_of_their_messages(store, clock):
    store.append([make_batch([b"a"] * 3), make_batch([b"b"] * 2, queue_id=2)])
    first_ms = clock()
    clock.now_ms += 5000
    store.append([make_batch([b"c"])])
    assert store.queues.bounds_of_topics([("orders", 3), ("none", 1)]) == [[(0, 3 + 1), (0, 0), (0, 2)], [(0, 0)]]
    positions = [QueuePosition("orders", 0, 0), QueuePosition("orders", 0, 3), QueuePosition("orders", 0, 4)]
    assert store.queues.stored_times(positions) == [first_ms, first_ms + 5000, 0]
    assert store.queues.stored_times([QueuePosition("none", 0, 0)]) == [0]


def test_a_deleted_topic_has_no_series_any_more_and_stays_in_the_totals(store):
    store.append([make_batch([b"a"] * 5)])
    store.append([make_batch([b"b"] * 2, topic="bills")])
    before = store.stats.runtime(0.0, 0)
    store.topics.delete("orders")
    assert store.stats.topics().keys() == {"bills"}
    assert {topic for topic, _ in store.stats.received()} == {"bills"}
    after = store.stats.runtime(0.0, 0)
    assert after["putMessageTimesTotal"] == before["putMessageTimesTotal"] == "7"
    assert after["putMessageSizeTotal"] == before["putMessageSizeTotal"]
    store.append([make_batch([b"c"])])
    assert store.stats.topics()["orders"].messages == 1
