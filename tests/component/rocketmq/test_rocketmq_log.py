"""Tests of logs that RocketMQ 4.9 wrote: raymq opens and copies them. No message is lost, and each message keeps its
meaning."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import pytest

import storage.recovery.log_files
import storage.replication.chunk_appender
from raymq.common.delay import TIMER_ROLL_QUEUE, TIMER_TOPIC, delivery_producer_id, timer_queue
from raymq.common.message import Message
from raymq.common.names import SCHEDULE_TOPIC
from raymq.common.protocol.store import FetchRequest, QueueBounds
from raymq.records.format.check import record_starts
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import WaitingBatch, encode_batch
from raymq.records.format.hashing import tags_code
from raymq.records.kernels.columns import decode_columns
from storage.message_store import MessageStore
from tests.support.stores.rocketmq_records import STORED_MS, Row, write_log
from tests.support.stores.stores import make_batch, open_store, read_queue

pytestmark = pytest.mark.usefixtures("no_flushes")

NUL = b"UNIQ_KEY\x01M%d\x02bin\x01C-string\0"


def offsets(store: MessageStore, topic: str = "T", queue_id: int = 0) -> list[int]:
    return [message.queue_offset for message in read_queue(store, topic, queue_id)]


@pytest.fixture(params=["in blocks", "singly"])
def walk(request):
    """Run each test twice: with recovery and replication reading the log in blocks of many records, and with both
    reading one record at a time."""
    if request.param == "singly":
        with (
            mock.patch.object(storage.recovery.log_files, "read_block", return_value=None),
            mock.patch.object(storage.replication.chunk_appender, "read_block", return_value=None),
        ):
            yield
    else:
        yield


@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("crashed", [False, True], ids=["after a clean stop", "after a crash"])
@pytest.mark.parametrize("which", ["one in the middle", "all", "the last"])
def test_a_record_whose_last_property_ends_in_nul_is_whole(tmp_path, which, crashed):
    of = {"one in the middle": {200}, "all": set(range(1000)), "the last": {999}}[which]
    rows = [Row("T", 0, i, NUL % i if i in of else b"TAGS\x01t\x02UNIQ_KEY\x01M%d" % i) for i in range(1000)]
    end = write_log(tmp_path / "store", rows, crashed=crashed)
    # Check that the NUL at the end of the last record is not the first byte of a sector. Otherwise recovery could take
    # this NUL for the result of a power failure.
    assert end % 512 != 1
    for _ in range(2):
        store = open_store(tmp_path / "store")
        assert offsets(store) == list(range(1000))
        assert (store.log.end_offset, store.status().cut_bytes) == (end, 0)
        messages = read_queue(store, "T")
        assert all(messages[i].properties.get("bin") == "C-string\0" for i in of)
        store.close()


@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("max_bytes", [1, 20_000, 1 << 20])
def test_a_replica_takes_records_whose_last_property_ends_in_nul(tmp_path, max_bytes):
    end = write_log(tmp_path / "a", [Row("T", 0, i, NUL % i) for i in range(1000)])
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    while data := source.chunks.read_chunk(target.log.end_offset, max_bytes):
        assert target.chunks.append_chunk(target.log.end_offset, data)
    assert target.log.end_offset == end
    assert offsets(target) == list(range(1000))
    source.close()
    target.close()
    again = open_store(tmp_path / "b")
    assert offsets(again) == list(range(1000))
    again.close()


def torn_log(root: Path, *, crashed: bool) -> None:
    """Write a log whose last record is incomplete: its properties cross a sector boundary, and the bytes after this
    boundary are zeros."""
    rows = [Row("T", 0, i, b"UNIQ_KEY\x01M%d" % i) for i in range(3)]
    end = write_log(root.with_name("before"), rows)
    filler = b"y" * ((-end - 91 - 1 - 9) % 512 + 512)
    write_log(root, [*rows, Row("T", 0, 3, b"UNIQ_KEY\x01M3\x02TAGS\x01t", filler)], crashed=crashed)
    file = root / "commitlog" / ("0" * 20)
    used = len(file.read_bytes().rstrip(b"\0"))
    cut = used - used % 512
    assert used - 19 < cut < used
    file.write_bytes(file.read_bytes()[:cut].ljust(file.stat().st_size, b"\0"))


@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("crashed", [False, True], ids=["after a clean stop", "after a crash"])
def test_properties_cut_at_a_sector_s_end_cost_the_last_record_after_a_crash_only(tmp_path, crashed):
    """The last record's properties end at a sector boundary. After a crash, recovery drops this record. After a clean
    stop it keeps the record, because a clean stop flushes everything."""
    torn_log(tmp_path / "store", crashed=crashed)
    store = open_store(tmp_path / "store")
    assert offsets(store) == [0, 1, 2] if crashed else [0, 1, 2, 3]
    store.close()


def test_readers_see_the_nul(tmp_path):
    rows = [Row("T", 0, i, b"UNIQ_KEY\x01M%d\x02KEYS\x01k%d\0" % (i, i)) for i in range(200)]
    rows += [Row("T", 1, i, b"UNIQ_KEY\x01N%d\x02TAGS\x01red\0" % i) for i in range(200)]
    write_log(tmp_path / "store", rows)
    store = open_store(tmp_path / "store")
    assert store.queries.by_key("T", "k17\0").count == 1
    assert store.queries.by_key("T", "k17").count == 0
    request = FetchRequest("T", 1, 0, 1000, frozenset([tags_code("red\0")]))
    [found] = store.fetch([request], max_bytes=1 << 20, wait_s=0)
    assert found.count == 200
    columns = decode_columns(found.records, record_starts(found.records), broker_name="a")
    assert set(columns["tags"].to_pylist()) == {"red\0"}
    store.close()


def lmq(queue_offset: int, *more: bytes) -> bytes:
    names = b"INNER_MULTI_DISPATCH\x01%%LMQ%%a\x02INNER_MULTI_QUEUE_OFFSET\x01%d" % queue_offset
    return b"\x02".join((b"UNIQ_KEY\x01M%d" % queue_offset, names, *more))


DELAYED = b"DELAY\x0118\x02REAL_TOPIC\x01T\x02REAL_QID\x010"


def lmq_rows(elsewhere: dict[int, str]) -> list[Row]:
    """Return the records of 21 messages that are also in the light queue %LMQ%a, at its offsets 0 to 20.

    `elsewhere`: the topics of some records, by the record's offset in the light queue. All other records belong to
    queue 0 of topic T.
    """
    rows: list[Row] = []
    counts: dict[tuple[str, int], int] = {}
    for offset in range(21):
        topic = elsewhere.get(offset, "T")
        queue = (topic, 17 if topic == SCHEDULE_TOPIC else 0)
        rows.append(Row(*queue, counts.get(queue, 0), lmq(offset, *([DELAYED] if queue[1] else []))))
        counts[queue] = counts.get(queue, 0) + 1
    return rows


ELSEWHERE = {10: SCHEDULE_TOPIC, 11: "%RETRY%g", 20: "rmq_sys_x"}


def offsets_in_lmq(store: MessageStore) -> list[str]:
    request = FetchRequest("%LMQ%a", 0, 0, 1000)
    [found] = store.fetch([request], max_bytes=1 << 20, wait_s=0)
    return [message.system_properties["INNER_MULTI_QUEUE_OFFSET"] for message in decode_records(found.records)]


@pytest.mark.parametrize("crashed", [False, True], ids=["after a clean stop", "after a crash"])
def test_delayed_and_retried_messages_are_in_other_queues_too(tmp_path, crashed):
    """Delayed and retried messages of a RocketMQ 4.9 log are also in their light queues, because RocketMQ 4.9
    dispatches messages of every topic to light queues."""
    write_log(tmp_path / "store", lmq_rows(ELSEWHERE), crashed=crashed)
    for _ in range(2):
        store = open_store(tmp_path / "store")
        assert store.queues.bounds("%LMQ%a", 0) == QueueBounds(0, 21, 0)
        assert offsets_in_lmq(store) == [str(offset) for offset in range(21)]
        store.close()


def test_a_replica_puts_them_there_too(tmp_path):
    write_log(tmp_path / "a", lmq_rows(ELSEWHERE))
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    while data := source.chunks.read_chunk(target.log.end_offset, 500):
        target.chunks.append_chunk(target.log.end_offset, data)
    assert offsets_in_lmq(target) == [str(offset) for offset in range(21)]
    source.close()
    target.close()


def test_a_clean_open_leaves_a_queue_that_ends_with_a_delayed_message_as_it_is(tmp_path):
    write_log(tmp_path / "store", lmq_rows({20: SCHEDULE_TOPIC}), crashed=True)
    open_store(tmp_path / "store").close()
    file = tmp_path / "store/consumequeue/%LMQ%a/0" / ("0" * 20)
    before = file.read_bytes()
    (tmp_path / "store/dedup").unlink()
    store = open_store(tmp_path / "store")
    assert "again" not in store.status().recovered
    assert offsets_in_lmq(store) == [str(offset) for offset in range(21)]
    store.close()
    assert file.read_bytes() == before


def test_a_stale_offset_of_a_retried_message_changes_nothing(tmp_path):
    """A retried message has a light-queue offset but is not in the light queue. RocketMQ 5 does not dispatch retried
    messages to light queues, but leaves the original message's light-queue offset in them."""
    rows = [*lmq_rows({}), Row("%RETRY%g", 0, 0, lmq(0)), Row("%RETRY%g", 0, 1, lmq(3))]
    write_log(tmp_path / "a", rows, crashed=True)
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    while data := source.chunks.read_chunk(target.log.end_offset, 500):
        target.chunks.append_chunk(target.log.end_offset, data)
    for store in (source, target):
        assert offsets_in_lmq(store) == [str(offset) for offset in range(21)]
        store.close()


@pytest.mark.parametrize(
    "lost", [[10], [0, 1, 2], [18, 19, 20], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [*range(20)]]
)
def test_holes_do_not_hide_the_messages_before_them(tmp_path, lost):
    """Records of a queue are lost. The queue begins at the first offset whose record exists. If a later record is lost
    too, the queue still begins at this offset."""
    others = [Row("T", 1, offset, b"UNIQ_KEY\x01O%d" % offset) for offset in range(30)]
    rows = [Row("T", 0, offset, b"UNIQ_KEY\x01M%d" % offset) for offset in range(22) if offset not in lost]
    write_log(tmp_path / "store", [*others, *rows], crashed=True)
    store = open_store(tmp_path / "store")
    left = [offset for offset in range(22) if offset not in lost]
    queue = store._parts.queues.get_plain("T", 0)
    assert store.queues.bounds("T", 0).min_offset == left[0]
    for row in range(len(left) - 1):
        [unit] = queue.units(left[row], 1)
        assert queue.first_at_or_after(int(unit["physical_offset"])) == left[row]
        assert queue.first_at_or_after(int(unit["physical_offset"]) + 1) == left[row + 1]
    assert queue.first_at_or_after(1 << 40) == 22
    store.close()


@pytest.mark.parametrize("snapshot", [True, False], ids=["with a snapshot", "without"])
@pytest.mark.parametrize("left", [True, False], ids=["an empty directory is left", "nothing is left"])
def test_a_topic_that_rocketmq_deleted_stays_deleted(tmp_path, left, snapshot):
    """A topic that RocketMQ deleted has no queues in raymq. RocketMQ 4.9 leaves the topic's directory without the
    directories of its queues; RocketMQ 5 leaves nothing.

    A store that RocketMQ has written may contain an old snapshot of raymq (producer sequences). RocketMQ does not
    update it, so it does not cover the messages that RocketMQ has stored.
    """
    own = b"RMQ_PID\x01p\x02RMQ_EPOCH\x011\x02RMQ_SEQ\x01%d"
    rows = [Row(topic, 0, i, own % i) for i in range(5) for topic in ("Gone", "Kept")]
    write_log(tmp_path / "store", rows)
    open_store(tmp_path / "store").close()
    before = (tmp_path / "store/dedup").read_bytes()
    store = open_store(tmp_path / "store")
    store.append([make_batch([b"by RocketMQ"], topic="Kept")])
    store.close()
    (tmp_path / "store/dedup").write_bytes(before)
    shutil.rmtree(tmp_path / "store/consumequeue/Gone")
    if left:
        (tmp_path / "store/consumequeue/Gone").mkdir()
    if not snapshot:
        (tmp_path / "store/dedup").unlink()
    for _ in range(2):
        store = open_store(tmp_path / "store")
        assert store.topics.queue_ids() == {"Kept": [0]}
        assert offsets(store, "Kept") == [0, 1, 2, 3, 4, 5]
        assert [row.topic for row in store._parts.dedup.rows()] == ["Kept"]
        store.close()


def sent(producer: str, sequence: int, *more: bytes) -> bytes:
    return b"\x02".join((b"RMQ_PID\x01%b\x02RMQ_EPOCH\x011\x02RMQ_SEQ\x01%d" % (producer.encode(), sequence), *more))


FOR_T = b"DELAY\x011\x02REAL_TOPIC\x01T\x02REAL_QID\x010"


@pytest.mark.usefixtures("walk")
def test_messages_of_rocketmqs_scheduler_prove_no_producer_sequence(tmp_path):
    """A message that RocketMQ's scheduler delivered keeps the producer sequence that it had in the delay queue. This
    sequence must not count in the destination queue."""
    ours = delivery_producer_id(SCHEDULE_TOPIC, 0)
    rows = [Row(SCHEDULE_TOPIC, 0, i, sent("P", i, FOR_T)) for i in range(200)]
    rows.append(Row("T", 0, 0, sent("P", 0)))
    rows += [Row("T", 0, 1 + i, sent("P", i, FOR_T)) for i in range(100)]
    rows += [Row("T", 0, 101 + i, sent(ours, i, FOR_T).replace(b"EPOCH\x011", b"EPOCH\x010")) for i in range(150)]
    write_log(tmp_path / "a", rows)
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    while data := source.chunks.read_chunk(target.log.end_offset, 1 << 20):
        target.chunks.append_chunk(target.log.end_offset, data)
    for store in (source, target):
        [(producer, topic, _, _, ranges), *others] = sorted(store._parts.dedup.rows(), reverse=True)
        assert (producer, topic, ranges) == ("P", "T", [(0, 1, 0)])
        assert [(row.producer_id, row.topic, row.ranges) for row in others] == [("P", SCHEDULE_TOPIC, [(0, 200, 0)])]
        assert store._parts.deliveries.get((SCHEDULE_TOPIC, 0)).next_offset == 150
        [result] = store.append([make_batch([b"new"], topic="T", producer=("P", 1, 1))])
        assert (result.duplicate, result.queue_offset) == (False, 251)
        store.close()


@pytest.mark.parametrize("ahead_ms", [3_600_000, 3 * 86_400_000], ids=["in a timer queue", "in the roll queue"])
def test_a_message_waits_for_its_time_though_rocketmq_made_its_unit(tmp_path, ahead_ms):
    """A delayed message is delivered at its time even if RocketMQ wrote its consume-queue entry (unit) in raymq's timer
    topic. To RocketMQ this is an ordinary topic: it writes the tag's code into the field in which raymq expects the
    delivery time."""
    now_ms = STORED_MS
    at_ms = now_ms + ahead_ms
    queue_id = timer_queue(at_ms, now_ms)
    store = open_store(tmp_path, clock_ms=lambda: now_ms)
    [message] = [Message("T", b"later", tags="red", deliver_at_ms=at_ms)]
    batch = encode_batch(
        [message], queue_id, born_host=("127.0.0.1", 1), born_timestamp_ms=now_ms, message_ids=["X"],
        waiting=WaitingBatch(TIMER_TOPIC, [0]),
    )  # fmt: skip
    store.append([batch])
    before = int(store._parts.queues.get_plain(TIMER_TOPIC, queue_id).units(0, 1)[0]["tags_code"])
    store.close()
    file = tmp_path / "consumequeue" / TIMER_TOPIC / str(queue_id) / ("0" * 20)
    units = bytearray(file.read_bytes())
    units[12:20] = tags_code("red").to_bytes(8, signed=True)
    file.write_bytes(units)
    store = open_store(tmp_path, clock_ms=lambda: now_ms)
    source = (TIMER_TOPIC, queue_id)
    scheduler = store.schedule.new_scheduler()
    assert scheduler._reader.delivery_times(source, 0, 10).tolist() == [before]
    scheduler.round()
    assert store.queues.bounds("T", 0).max_offset == 0
    assert store.log.end_offset == len(batch.records)
    now_ms = before
    scheduler.round()
    assert store.log.end_offset > len(batch.records)
    if queue_id != TIMER_ROLL_QUEUE:
        assert [message.tags for message in read_queue(store, "T")] == ["red"]
    store.close()
