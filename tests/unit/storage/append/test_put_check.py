"""Tests of the checks before an append and their results (spec/storage.md §1), and of the store's running flags (§9).
Also tests property CRC and hosts from the append to the read."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from raymq.common.errors import MessageIllegalError, ServiceNotAvailableError, StoreNotWritableError, SystemBusyError
from raymq.common.message import Message, SendStatus
from raymq.common.names import HALF_TOPIC
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.check import record_starts
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.crc import PROPERTY_CRC_PREFIX, property_crc
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import ProducerSequence, encode_batch
from raymq.records.format.inner_batch_encode import encode_inner_batch
from raymq.records.format.layout import encode_properties
from raymq.records.kernels.check import BatchFacts, validate_batch
from raymq.records.kernels.stamp import with_property_crc
from storage.append.put_check import PutMessageStatus, StoreState, refuse_batch, refuse_store
from storage.message_store import MessageStore
from storage.running_flags import RunningFlag, RunningFlags
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually
from tests.support.stores.lying_bodies import lying_batch, lying_bodies, stored_body, with_stored_body
from tests.support.stores.stores import (
    bodies_of,
    intact_bodies,
    killed_copy,
    make_batch,
    open_store,
    read_queue,
    small_settings,
)

FACTS = BatchFacts(2, 200, 100, 50, 0, b"TAGS\x01a\x02")


def test_the_statuses_are_rocketmqs_in_its_order():
    assert [status.name for status in PutMessageStatus] == (
        "PUT_OK FLUSH_DISK_TIMEOUT FLUSH_SLAVE_TIMEOUT SLAVE_NOT_AVAILABLE SERVICE_NOT_AVAILABLE "
        "CREATE_MAPPED_FILE_FAILED MESSAGE_ILLEGAL PROPERTIES_SIZE_EXCEEDED OS_PAGE_CACHE_BUSY UNKNOWN_ERROR "
        "IN_SYNC_REPLICAS_NOT_ENOUGH PUT_TO_REMOTE_BROKER_FAIL LMQ_CONSUME_QUEUE_NUM_EXCEEDED WHEEL_TIMER_FLOW_CONTROL "
        "WHEEL_TIMER_MSG_ILLEGAL WHEEL_TIMER_NOT_ENABLE"
    ).split()
    assert PutMessageStatus.FLUSH_DISK_TIMEOUT.send_status is SendStatus.FLUSH_DISK_TIMEOUT
    assert PutMessageStatus.MESSAGE_ILLEGAL.send_status is None


@pytest.mark.parametrize(
    ("changes", "status", "error"),
    [
        ({}, None, None),
        ({"closed": True, "not_writable_reason": "x"}, "SERVICE_NOT_AVAILABLE", ServiceNotAvailableError),
        ({"not_writable_reason": "x", "append_ms": 2000}, "SERVICE_NOT_AVAILABLE", StoreNotWritableError),
        ({"append_ms": 1000}, None, None),
        ({"append_ms": 1001}, "OS_PAGE_CACHE_BUSY", SystemBusyError),
        ({"append_ms": 10_000_000}, None, None),
    ],
)
def test_a_stores_state_decides_the_status(changes, status, error):
    values = {"closed": False, "not_writable_reason": "", "append_ms": 0, "busy_timeout_ms": 1000, **changes}
    refused = refuse_store(StoreState("/store", **values))
    assert (refused.status.name if refused else None) == status
    assert (type(refused.error) if refused else None) is error


INNER_ONE = b"INNER_NUM\x011\x02INNER_BASE\x01" + b"0" * 19 + b"\x02"
INNER = b"INNER_NUM\x013\x02INNER_BASE\x01" + b"0" * 19 + b"\x02"


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (FACTS, None),
        (BatchFacts(1, 200, 100, 50, 0x80, b""), "MESSAGE_ILLEGAL"),
        (BatchFacts(1, 200, 100, 50, 0, b"INNER_NUM\x013\x02"), "MESSAGE_ILLEGAL"),
        (BatchFacts(1, 200, 100, 50, 0x80, b"INNER_NUM\x013\x02"), "MESSAGE_ILLEGAL"),
        (BatchFacts(1, 200, 100, 50, 0x80, INNER), None),
        (
            BatchFacts(1, 200, 100, 50, 0x88, INNER),
            "MESSAGE_ILLEGAL",
        ),
        (
            BatchFacts(2, 200, 100, 50, 0x80, INNER),
            "MESSAGE_ILLEGAL",
        ),
        (BatchFacts(2, 200, 100, 50, 0x4, b""), "MESSAGE_ILLEGAL"),
        (BatchFacts(1, 200, 100, 50, 0x4, b""), "MESSAGE_ILLEGAL"),
        (BatchFacts(1, 200, 100, 50, 0xC, b""), "MESSAGE_ILLEGAL"),
        (BatchFacts(1, 200, 100, 50, 0x8, b""), "MESSAGE_ILLEGAL"),
        (BatchFacts(1, 99_999, 100, 32768, 0, b""), "PROPERTIES_SIZE_EXCEEDED"),
        (BatchFacts(1, 70_000, 1001, 50, 0, b""), "MESSAGE_ILLEGAL"),
        (BatchFacts(1, 1200, 1001, 50, 0, b""), "MESSAGE_ILLEGAL"),
        (BatchFacts(1, 1200, 1000, 50, 0, b""), None),
        (BatchFacts(1, 1300, 1001, 50, 0x80, INNER), "MESSAGE_ILLEGAL"),
        (BatchFacts(1, 1300, 1001, 50, 0x80, INNER_ONE), None),
        (BatchFacts(1, 66_536, 66_537, 50, 0x80, INNER_ONE), "MESSAGE_ILLEGAL"),
    ],
)
def test_the_messages_of_a_batch_decide_the_status(facts, status):
    refused = refuse_batch(facts, max_message_size_bytes=1000, record_max_bytes=66_536)
    assert (refused.status.name if refused else None) == status
    assert refused is None or isinstance(refused.error, MessageIllegalError)


def test_flags_have_rocketmqs_numbers_and_a_reason_if_they_forbid_writing():
    flags = RunningFlags()
    assert (flags.bits, flags.readable, flags.not_writable_reason) == (0, True, "")
    for flag in RunningFlag:
        assert flags.set_flag(flag, flag.name or "")
        assert not flags.set_flag(flag, "again")
    assert flags.bits == 255  # all of RocketMQ's flags (127), and raymq's flag DISK_CRITICAL
    assert flags.not_writable_reason == "NOT_WRITABLE; QUEUE_ERROR; INDEX_ERROR; DISK_FULL; FENCED; QUEUE_DISK_FULL"
    assert not flags.readable
    assert flags.clear_flag(RunningFlag.NOT_READABLE)
    assert not flags.clear_flag(RunningFlag.NOT_READABLE)


@pytest.mark.usefixtures("no_flushes")
class TestStore:
    def test_flags_stop_reading_and_writing_until_they_are_cleared(self, tmp_path):
        store = open_store(tmp_path / "store")
        store.flags.set_flag(RunningFlag.FENCED, "another replica is master")
        with pytest.raises(StoreNotWritableError, match="another replica"):
            store.append([make_batch([b"x"])])
        store.flags.clear_flag(RunningFlag.FENCED)
        store.append([make_batch([b"x"])])
        store.flags.set_flag(RunningFlag.NOT_READABLE, "by hand")
        with pytest.raises(ServiceNotAvailableError):
            bodies_of(store)
        store.flags.clear_flag(RunningFlag.NOT_READABLE)
        assert bodies_of(store) == [b"x"]
        store.close()

    def test_a_body_over_the_limit_is_refused_by_the_store_too(self, tmp_path):
        store = open_store(tmp_path / "store", max_message_size_bytes=1000)
        store.append([make_batch([b"x" * 1000])])
        with pytest.raises(MessageIllegalError, match="1001 bytes"):
            store.append([make_batch([b"x" * 1001])])
        assert store.statistics().runtime["putMessageFailedTimes"] == "1"
        store.close()

    @pytest.mark.parametrize("name", lying_bodies())
    def test_a_store_that_checks_refuses_compressed_bodies_that_cannot_be_read(self, tmp_path, name):
        liar, good = lying_bodies()[name], (zlib.compress(b"good" * 1000), 0x301)
        with closing(open_store(tmp_path / "store", check_compressed_body=True)) as store:
            store.append([lying_batch([good])])
            store.append([lying_batch([good, (b"plain", 0)])])
            for stored, which in [([liar], "1 of 1"), ([good, liar], "2 of 2")]:
                with pytest.raises(MessageIllegalError, match=f"message {which}.*check_compressed_body"):
                    store.append([make_batch([b"before"]), lying_batch(stored)])
                half = lying_batch(stored, topic=HALF_TOPIC)
                with pytest.raises(MessageIllegalError, match="cannot be decompressed"):
                    store.append([half])
            assert bodies_of(store) == [b"good" * 1000, b"good" * 1000, b"plain"]

    def test_a_store_that_checks_refuses_a_body_that_is_longer_than_it_takes(self, tmp_path):
        with closing(open_store(tmp_path / "store", check_compressed_body=True, max_message_size_bytes=1000)) as store:
            store.append([lying_batch([(zlib.compress(bytes(1000)), 0x301)])])
            with pytest.raises(MessageIllegalError, match="more than 1000 bytes"):
                store.append([lying_batch([(zlib.compress(bytes(1001)), 0x301)])])

    def test_a_store_that_does_not_check_takes_them(self, tmp_path):
        liars = list(lying_bodies().values())
        with closing(open_store(tmp_path / "store", mapped_file_size_commit_log_bytes=1 << 20)) as store:
            [result] = store.append([lying_batch(liars)])
            assert store.queues.bounds("orders", 0).max_offset == len(liars)
            assert result.status is SendStatus.SEND_OK

    @pytest.mark.parametrize("damage", [b"no items", bytes(20), bytes(8 << 20), None])
    def test_a_store_that_checks_opens_the_bodies_of_inner_batches(self, tmp_path, damage):
        messages = [Message("orders", b"item %d" % index * 50) for index in range(10)]
        batch = encode_inner_batch(
            messages, 0, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=["A" * 32] * 10,
            producer=ProducerSequence("p", 1, 0), compression=Compression(CompressionType.ZLIB, 1),
        )  # fmt: skip
        with closing(open_store(tmp_path / "store", check_compressed_body=True)) as store:
            assert store.append([batch])[0].status is SendStatus.SEND_OK
            items = zlib.decompress(stored_body(bytes(batch.records))) if damage is None else b""
            lie = items[: len(items) // 10 * 9] if damage is None else damage
            with pytest.raises(MessageIllegalError, match="cannot be decompressed"):
                store.append([with_stored_body(batch, zlib.compress(lie))])
            assert store.queues.bounds("orders", 0).max_offset == 10

    def test_every_record_gets_a_property_crc_and_recovery_verifies_it(self, tmp_path):
        root = tmp_path / "store"
        store = open_store(root, enabled_append_prop_crc=True)
        batches = [make_batch([b"a", b"bb"]), make_batch([b"c"], extra_properties={"TAGS": "t", "CLUSTER": "c"})]
        sealed = encode_batch([Message("orders", b"d")], 0, born_host=("127.0.0.1", 1), born_timestamp_ms=1,
                              message_ids=[""], append_prop_crc=True)  # fmt: skip
        for batch in [*batches, sealed]:
            store.append([batch])
        data = store.chunks.read_chunk(0, 1 << 20)
        starts = record_starts(data).tolist()
        assert len(starts) == 4
        for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
            assert data[start:end].endswith(property_crc(data[start:end]))
            assert data[start:end].count(PROPERTY_CRC_PREFIX) == 1
        assert [m.body for m in decode_records(data)] == [b"a", b"bb", b"c", b"d"]
        flipped = killed_copy(root, tmp_path / "flipped")
        store.close()
        again = open_store(root, force_verify_prop_crc=True)
        assert bodies_of(again) == [b"a", b"bb", b"c", b"d"]
        again.close()
        self.flip_a_property(flipped)
        damaged = open_store(flipped, force_verify_prop_crc=True)
        [hole] = damaged.mender.holes
        assert (hole.offset, hole.size) == (starts[2], starts[3] - starts[2])
        assert intact_bodies(damaged) == [b"a", b"bb", None, b"d"]
        damaged.close()

    @staticmethod
    def flip_a_property(root: Path) -> None:
        [path] = [path for path in (root / "commitlog").iterdir() if b"CLUSTER" in path.read_bytes()]
        path.write_bytes(path.read_bytes().replace(b"CLUSTER\x01c", b"CLUSTER\x01d"))

    def test_a_crc_of_another_producer_is_replaced(self):
        batch = make_batch([b"a"])
        foreign = encode_properties({"__CRC32#": "123", "k": "v"})
        record = bytes(batch.records)
        at = record.index(b"orders") + len(b"orders")
        size = at + 2 + len(foreign)
        record = size.to_bytes(4) + record[4:at] + len(foreign).to_bytes(2) + foreign
        changed = with_property_crc(
            type(batch)("orders", 0, record, np.array([size], np.int32), batch.tag_codes, None, ())
        )
        validate_batch(changed)
        assert bytes(changed.records).count(PROPERTY_CRC_PREFIX) == 1
        assert with_property_crc(changed) is changed

    @pytest.mark.parametrize("born", ["10.1.2.3", "2001:db8::7"])
    def test_hosts_of_either_family_and_a_long_topic(self, tmp_path, born):
        topic = "%RETRY%" + "g" * 140
        settings = small_settings(tmp_path / "store")
        store = MessageStore.open(settings, broker_name="broker-a", store_host=("2001:db8::1", 10911))
        batch = encode_batch([Message(topic, b"a"), Message(topic, b"b")], 0, born_host=(born, 5), born_timestamp_ms=1,
                             message_ids=["one", "two"], store_host_ipv6=True)  # fmt: skip
        store.append([batch])
        store.close()
        other = open_store(tmp_path / "ipv4")
        with pytest.raises(MessageIllegalError, match="store host"):
            other.append([batch])
        other.close()
        store = MessageStore.open(settings, broker_name="broker-a", store_host=("2001:db8::1", 10911))
        messages = read_queue(store, topic)
        assert [m.body for m in messages] == [b"a", b"b"]
        assert {m.store_host for m in messages} == {"[2001:db8::1]:10911"}
        assert born in messages[0].born_host
        assert len(messages[1].offset_message_id) == 56
        assert decode_records(store.queries.by_unique_id(topic, "two").records)[0].body == b"b"
        store.close()

    def test_statistics_count_puts_and_gets(self, tmp_path):
        store = open_store(tmp_path / "store")
        batch = make_batch([b"a", b"b"])
        for _ in range(3):
            store.append([batch])
        bodies_of(store)
        statistics = store.statistics()
        assert statistics.topics["orders"].messages == 6
        assert statistics.topics["orders"].bytes == 3 * len(batch.records)
        assert sum(statistics.put_latency_buckets) == 3
        assert len(statistics.put_latency_buckets) == 13
        assert set(statistics.runtime) == set(
            """bootTimestamp runtime putMessageEntireTimeMax putMessageTimesTotal putMessageFailedTimes
            putMessageSizeTotal putMessageDistributeTime putMessageAverageSize dispatchMaxBuffer getMessageEntireTimeMax
            putTps getFoundTps getMissTps getTotalTps getTransferredTps putLatency99 putLatency999 commitLogDiskRatio
            consumeQueueDiskRatio commitLogMinOffset commitLogMaxOffset commitLogYoungFilesDeleted
            msgPutTotalYesterdayMorning msgPutTotalTodayMorning msgPutTotalTodayNow
            msgGetTotalYesterdayMorning msgGetTotalTodayMorning msgGetTotalTodayNow""".split()
        )
        assert store.stats._transferred == 6
        assert statistics.runtime["putMessageTimesTotal"] == "6"
        assert statistics.runtime["commitLogMaxOffset"] == str(3 * len(batch.records))
        assert len(statistics.runtime["putTps"].split()) == 3
        store.close()

    def test_messages_of_a_long_poll_are_counted(self, tmp_path):
        store = open_store(tmp_path / "store")
        with ThreadPoolExecutor(1) as pool:
            request = FetchRequest("orders", 0, 0, 10)
            waiting = pool.submit(store.fetch, [request], max_bytes=1000, wait_s=WAIT_S)
            eventually(lambda: store.status().waiting_fetches == 1, "a fetch that waits")
            store.append([make_batch([b"a", b"b"])])
            assert waiting.result(WAIT_S)[0].count == 2
        assert (store.stats._gets_found, store.stats._transferred) == (1, 2)
        store.close()

    def test_replicated_messages_are_counted_by_topic_and_not_as_appends(self, tmp_path):
        store, slave = open_store(tmp_path / "store"), open_store(tmp_path / "slave")
        store.append([make_batch([b"x"] * 300)])
        for number in range(3):
            store.append([make_batch([b"%d" % number], topic="other", queue_id=number)])
        while slave.log.end_offset < store.log.end_offset:
            slave.chunks.append_chunk(slave.log.end_offset, store.chunks.read_chunk(slave.log.end_offset, 1000))
        assert slave.statistics().topics == store.statistics().topics
        assert sum(slave.statistics().put_latency_buckets) == 0
        slave.close()
        store.close()
