"""Tests of the store's public methods: appends, fetches, flushes, limits, opening and closing."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from raymq.common.config.store import FlushDiskType
from raymq.common.errors import (
    ClientStateError,
    InvalidArgumentError,
    MessageIllegalError,
    ServiceNotAvailableError,
    StoreError,
    StoreFailedError,
    StoreLockedError,
    StoreNotWritableError,
    SystemBusyError,
)
from raymq.common.message import PullStatus, SendStatus
from raymq.common.protocol.store import Boundary, FetchRequest, QueueBounds
from raymq.records.format.decode import decode_records
from raymq.records.format.hashing import tags_code
from storage.files import disk
from storage.log import log_writer
from storage.message_store import MessageStore
from tests.support.history.waiting import eventually
from tests.support.stores.stores import (
    LOG_FILE_BYTES,
    PowerCuts,
    bodies_of,
    killed_copy,
    make_batch,
    open_store,
    read_queue,
)

pytestmark = pytest.mark.usefixtures("no_flushes")

WAIT_S = 30.0
"""Timeout of a wait in seconds. It is longer than any wait in these tests, so it expires only if a test fails."""


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root):
    """Yield a store without background flushes, so that only the test's own calls take its append lock."""
    store = open_store(root, flush_interval_consume_queue_ms=60_000)
    yield store
    store.close()


def fetch_one(
    store: MessageStore,
    offset: int,
    *,
    wait_s: float = 0,
    tags: str | None = None,
    max_bytes: int = 1 << 20,
    max_messages: int = 100,
):
    codes = None if tags is None else frozenset([tags_code(tags)])
    return store.fetch([FetchRequest("orders", 0, offset, max_messages, codes)], max_bytes=max_bytes, wait_s=wait_s)[0]


def open_below(root: Path) -> list[str]:
    """Return the paths of the files below `root` that this process has open, including deleted files."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        # Ignore file descriptors that were closed while /proc/self/fd was listed, such as the descriptor of the listing
        # itself.
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(entry))
    return [link for link in links if link.startswith(f"{root}/")]


def until(condition: Callable[[], object]) -> None:
    """Wait, without sleeping, until `condition` returns a true value. Fails after WAIT_S."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s


class TestAppend:
    def test_offsets_count_messages_per_queue_and_bytes_per_store(self, store):
        first, second = make_batch([b"a", b"b"]), make_batch([b"c"], queue_id=1)
        results = store.append([first, second, first])
        assert [(r.queue_offset, r.physical_offset) for r in results] == [
            (0, 0),
            (0, len(first.records)),
            (2, len(first.records) + len(second.records)),
        ]
        assert bodies_of(store) == [b"a", b"b", b"a", b"b"]
        assert bodies_of(store, queue_id=1) == [b"c"]

    def test_records_carry_the_offsets_and_the_time_they_were_stored_at(self, root):
        store = open_store(root, clock_ms=lambda: 1_700_000_000_123)
        [result] = store.append([make_batch([b"a", b"b"])])
        first, second = read_queue(store)
        assert (first.queue_offset, first.physical_offset) == (0, 0)
        assert (second.queue_offset, second.physical_offset) == (1, len(make_batch([b"a"]).records))
        assert first.store_timestamp_ms == result.store_timestamp_ms == 1_700_000_000_123
        assert first.store_host == "127.0.0.1:10911"
        store.close()

    def test_store_times_do_not_go_back_with_the_clock_not_even_over_a_restart(self, root):
        times = iter([5000, 4000, 3000])
        store = open_store(root, clock_ms=lambda: next(times))
        stored = [store.append([make_batch([b"a"])])[0].store_timestamp_ms for _ in range(2)]
        store.close()
        again = open_store(root, clock_ms=lambda: next(times))
        stored.append(again.append([make_batch([b"a"])])[0].store_timestamp_ms)
        again.close()
        assert stored == [5000, 5000, 5000]

    def test_a_batch_that_does_not_fit_goes_to_the_next_file_as_a_whole(self, store):
        batch = make_batch([b"x" * 1000] * 20)
        offsets = [store.append([batch])[0].physical_offset for _ in range(3)]
        assert offsets == [0, len(batch.records), LOG_FILE_BYTES]
        assert len(bodies_of(store)) == 60

    def test_a_batch_longer_than_a_file_is_split_between_records(self, store):
        bodies = [b"%03d" % index + b"x" * 1000 for index in range(200)]
        [result] = store.append([make_batch(bodies)])
        assert bodies_of(store) == bodies
        assert result.physical_offsets == tuple(message.physical_offset for message in read_queue(store))
        assert result.queue_offset == 0

    def test_an_append_longer_than_max_append_bytes_is_refused_as_a_whole(self, root):
        store = open_store(root, max_append_bytes=5000)
        fitting = make_batch([b"x" * 1000] * 4)
        for batches in ([fitting, make_batch([b"y" * 1000], queue_id=1)], [make_batch([b"x" * 1000] * 5)]):
            with pytest.raises(MessageIllegalError, match=r"max_append_bytes \(5000\)"):
                store.append(batches)
        assert store.status().max_physical_offset == 0
        assert store.topics.queue_ids() == {}
        store.append([fitting])
        # The limit max_append_bytes does not apply to an append of a single message, whose size has another limit.
        store.append([make_batch([b"z" * 6000])])
        assert len(bodies_of(store)) == 5
        store.close()

    def test_a_record_longer_than_a_file_is_refused(self, store):
        with pytest.raises(MessageIllegalError, match="exceeds this store's limit"):
            store.append([make_batch([b"x" * LOG_FILE_BYTES])])

    def test_one_bad_batch_in_a_call_stops_all_of_it(self, store):
        good, bad = make_batch([b"good"]), make_batch([b"bad"], queue_id=1)
        bad.sizes[0] += 1
        with pytest.raises(MessageIllegalError):
            store.append([good, bad])
        assert store.queues.bounds("orders", 0).max_offset == 0
        assert store.status().max_physical_offset == 0

    def test_threads_appending_to_one_queue_get_offsets_without_gaps(self, store):
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda i: store.append([make_batch([b"%d" % i] * 3)])[0], range(60)))
        assert sorted(result.queue_offset for result in results) == list(range(0, 180, 3))
        bodies = bodies_of(store)
        assert all(bodies[result.queue_offset] == b"%d" % i for i, result in enumerate(results))

    def test_the_callers_bytes_are_not_changed(self, store):
        batch = make_batch([b"a"])
        before = bytes(batch.records)
        store.append([batch])
        assert batch.records == before

    def test_an_append_that_does_not_get_its_turn_in_time_says_busy_and_stores_nothing(self, root, monkeypatch):
        monkeypatch.setattr(disk, "map_for_writing", lambda *arguments: None)
        store = open_store(root, wait_time_in_send_queue_ms=200)
        entered, leave = threading.Event(), threading.Event()
        pwrite = os.pwrite

        def slow_pwrite(*arguments):
            entered.set()
            leave.wait(WAIT_S)
            return pwrite(*arguments)

        monkeypatch.setattr(os, "pwrite", slow_pwrite)
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(store.append, [make_batch([b"slow"])])
            entered.wait(WAIT_S)
            with pytest.raises(SystemBusyError):
                store.append([make_batch([b"late"])], timeout_s=0)
            with pytest.raises(SystemBusyError, match="wait_time_in_send_queue_ms is 200"):
                store.append([make_batch([b"late"])])
            leave.set()
            slow.result(WAIT_S)
        assert bodies_of(store) == [b"slow"]
        store.close()


class TestDeduplication:
    def test_a_batch_sent_twice_is_stored_once_and_answered_alike(self, store):
        batch = make_batch([b"a", b"b"], producer=("p", 0, 0))
        [first] = store.append([batch])
        [again] = store.append([batch])
        assert (again.queue_offset, again.physical_offset) == (first.queue_offset, first.physical_offset)
        assert again.store_timestamp_ms == first.store_timestamp_ms
        assert (first.duplicate, again.duplicate) == (False, True)
        assert bodies_of(store) == [b"a", b"b"]
        assert store.status().duplicates_dropped == 2

    @pytest.mark.parametrize("snapshot", [True, False])
    @pytest.mark.parametrize("stopped", [True, False])
    def test_a_repeat_is_recognised_after_a_restart(self, root, tmp_path, stopped, snapshot):
        store = open_store(root)
        batches = [make_batch([b"%d" % i, b"x" * 1000], producer=("p", 3, 2 * i)) for i in range(100)]
        for batch in batches:
            store.append([batch])
        killed_copy(root, tmp_path / "killed")
        last_file = store.status().max_physical_offset // LOG_FILE_BYTES
        offsets = [message.physical_offset for message in read_queue(store)]
        store.close()
        opened = root if stopped else tmp_path / "killed"
        if not snapshot:
            (opened / "dedup").unlink(missing_ok=True)
        store = open_store(opened)
        in_file_before = next(i for i in range(100) if offsets[2 * i] // LOG_FILE_BYTES == last_file - 1)
        for index in (in_file_before, 99):
            [result] = store.append([batches[index]])
            assert result.duplicate
            assert (result.queue_offset, result.physical_offset) == (2 * index, offsets[2 * index])
        assert len(bodies_of(store)) == 200
        store.close()

    def test_only_the_rest_of_a_batch_is_stored_if_its_beginning_survived_a_crash(self, root, tmp_path):
        store = open_store(root)
        store.append([make_batch([b"a", b"b"], producer=("p", 0, 10))])
        store.close()
        store = open_store(root)
        whole = make_batch([b"a", b"b", b"c", b"d"], producer=("p", 0, 10))
        [result] = store.append([whole])
        assert (result.queue_offset, result.duplicate, result.queue_offsets) == (0, False, None)
        assert bodies_of(store) == [b"a", b"b", b"c", b"d"]
        assert store.append([whole])[0].duplicate
        store.close()

    def test_when_another_producer_wrote_in_between_the_result_lists_the_offsets(self, store):
        store.append([make_batch([b"a"], producer=("p", 0, 0))])
        store.append([make_batch([b"other"], producer=("q", 0, 0))])
        whole = make_batch([b"a", b"b"], producer=("p", 0, 0))
        [result] = store.append([whole])
        assert result.queue_offsets == (0, 2)
        assert bodies_of(store) == [b"a", b"other", b"b"]
        [again] = store.append([whole])
        assert again.duplicate
        assert again.queue_offsets == (0, 2)

    def test_a_producers_older_instance_is_fenced(self, store):
        store.append([make_batch([b"new"], producer=("p", 2, 0))])
        with pytest.raises(ClientStateError, match="is fenced"):
            store.append([make_batch([b"old"], producer=("p", 1, 5))])
        assert bodies_of(store) == [b"new"]

    def test_a_newer_instance_counts_from_0_again(self, store):
        store.append([make_batch([b"a"], producer=("p", 1, 0))])
        store.append([make_batch([b"b"], producer=("p", 2, 0))])
        assert bodies_of(store) == [b"a", b"b"]

    def test_a_sequence_older_than_the_remembered_sequences_is_refused(self, store):
        for sequence in range(1, 40, 2):
            store.append([make_batch([b"%d" % sequence], producer=("p", 0, sequence))])
        with pytest.raises(MessageIllegalError, match="is too old to check"):
            store.append([make_batch([b"1"], producer=("p", 0, 1))])
        assert len(bodies_of(store)) == 20

    def test_two_batches_of_one_producer_for_one_queue_in_one_call_are_refused(self, store):
        batches = [make_batch([b"a"], producer=("p", 0, sequence)) for sequence in (0, 1)]
        with pytest.raises(MessageIllegalError, match="same producer"):
            store.append(batches)

    def test_the_table_is_bounded(self, root):
        store = open_store(root, dedup_producers_max=10)
        for index in range(30):
            store.append([make_batch([b"a"], producer=(f"p{index}", 0, 0))])
        assert store.status().known_producers == 10
        assert store.append([make_batch([b"a"], producer=("p29", 0, 0))])[0].duplicate
        store.close()


class TestFetch:
    def test_outcomes_by_offset(self, store):
        store.append([make_batch([b"a", b"b"])])
        expected = {
            -1: (PullStatus.OFFSET_ILLEGAL, 0),
            0: (PullStatus.FOUND, 2),
            1: (PullStatus.FOUND, 2),
            2: (PullStatus.NO_NEW_MESSAGE, 2),
            3: (PullStatus.OFFSET_ILLEGAL, 2),
        }
        for offset, outcome in expected.items():
            result = fetch_one(store, offset)
            assert (result.status, result.next_offset) == outcome
            assert (result.min_offset, result.max_offset) == (0, 2)

    def test_a_queue_that_does_not_exist_is_empty(self, store):
        assert fetch_one(store, 0).status is PullStatus.NO_NEW_MESSAGE
        assert fetch_one(store, 5).status is PullStatus.OFFSET_ILLEGAL
        assert store.topics.queue_ids() == {}

    def test_one_message_is_returned_however_small_max_bytes_is(self, store):
        store.append([make_batch([b"x" * 500, b"y"])])
        result = fetch_one(store, 0, max_bytes=1)
        assert (result.count, result.next_offset) == (1, 1)

    def test_max_bytes_0_returns_offsets_and_no_bytes(self, store):
        store.append([make_batch([b"a"], tags="A"), make_batch([b"b"], tags="B")])
        result = fetch_one(store, 0, max_bytes=0, tags="B")
        assert (result.status, result.next_offset, result.max_offset) == (PullStatus.FOUND, 1, 2)
        assert (result.records, result.count) == (b"", 0)

    def test_max_bytes_is_shared_among_the_queues(self, store):
        for queue_id in range(4):
            store.append([make_batch([b"x" * 100] * 50, queue_id=queue_id)])
        requests = [FetchRequest("orders", queue_id, 0, 100) for queue_id in range(4)]
        results = store.fetch(requests, max_bytes=10_000, wait_s=0)
        assert all(0 < result.count < 50 for result in results)
        assert sum(len(result.records) for result in results) <= 10_000

    def test_tags_select_across_files_and_excluded_messages_are_skipped(self, store):
        for index in range(25):
            store.append([make_batch([b"%d" % index] * 9, tags="no"), make_batch([b"%d" % index], tags="yes")])
        result = fetch_one(store, 0, tags="yes")
        assert (result.status, result.count, result.next_offset) == (PullStatus.FOUND, 25, 250)
        result = fetch_one(store, 0, tags="never")
        assert (result.status, result.count, result.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, 0, 250)

    @pytest.mark.parametrize("wait_s", [0.0, WAIT_S])
    def test_a_fetch_with_tags_scans_a_limited_number_of_messages(self, root, wait_s):
        store = open_store(root, max_filter_message_size_bytes=20 * 40)
        store.append([make_batch([b"x"] * 100, tags="no"), make_batch([b"here"], tags="yes")])
        seen = []
        offset = 0
        while not seen or seen[-1].status is not PullStatus.FOUND:
            seen.append(fetch_one(store, offset, tags="yes", wait_s=wait_s, max_messages=10))
            offset = seen[-1].next_offset
        assert [(result.status, result.next_offset) for result in seen] == [
            (PullStatus.NO_MATCHED_MESSAGE, 40),
            (PullStatus.NO_MATCHED_MESSAGE, 80),
            (PullStatus.FOUND, 101),
        ]
        assert fetch_one(store, 0, tags="yes", max_bytes=0, max_messages=10).next_offset == 40
        # RocketMQ's rule: a filter usually checks a limited number of messages per fetch. If the fetch itself requests
        # more messages than this limit, the filter checks as many as the fetch requests.
        assert fetch_one(store, 0, tags="yes", max_messages=60).next_offset == 60
        assert fetch_one(store, 0, max_messages=60).count == 60
        store.close()

    @pytest.mark.parametrize("arguments", [{"max_bytes": -1}, {"max_bytes": 1, "max_messages": 0}])
    def test_limits_that_make_no_sense_are_refused(self, store, arguments):
        with pytest.raises(InvalidArgumentError):
            store.fetch(
                [FetchRequest("orders", 0, 0, arguments.get("max_messages", 1))],
                max_bytes=arguments["max_bytes"],
                wait_s=0,
            )

    def test_more_queues_than_files_may_be_open_are_written_and_read(self, root):
        store = open_store(root, max_mapped_files=4)
        for round_number in range(3):
            store.append([make_batch([b"%d" % round_number], queue_id=queue_id) for queue_id in range(20)])
        for queue_id in range(20):
            assert bodies_of(store, queue_id=queue_id) == [b"0", b"1", b"2"]
        store.close()


class TestLongPoll:
    def test_an_append_wakes_the_fetch_that_waits_for_its_queue(self, store):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(fetch_one, store, 0, wait_s=WAIT_S)
            until(lambda: store.status().waiting_fetches)
            store.append([make_batch([b"elsewhere"], queue_id=1)])
            assert not waiting.done()
            store.append([make_batch([b"here"])])
            result = waiting.result(WAIT_S)
        assert (result.status, result.count) == (PullStatus.FOUND, 1)
        assert store.status().waiting_fetches == 0

    def test_excluded_messages_do_not_end_the_wait_and_are_not_read_again(self, store):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(fetch_one, store, 0, wait_s=WAIT_S, tags="yes")
            until(lambda: store.status().waiting_fetches)
            store.append([make_batch([b"1"] * 3, tags="no")])
            store.append([make_batch([b"2"], tags="yes")])
            result = waiting.result(WAIT_S)
        assert (result.status, result.count, result.next_offset) == (PullStatus.FOUND, 1, 4)

    def test_after_a_long_poll_the_next_offset_is_after_excluded_messages(self, store):
        store.append([make_batch([b"1"] * 3, tags="no")])
        result = fetch_one(store, 0, wait_s=0.01, tags="yes")
        assert (result.status, result.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, 3)

    def test_one_waiter_too_many_is_refused(self, root):
        store = open_store(root, fetch_waiters_max=1)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(fetch_one, store, 0, wait_s=WAIT_S)
            until(lambda: store.status().waiting_fetches)
            with pytest.raises(SystemBusyError):
                fetch_one(store, 0, wait_s=WAIT_S)
            assert fetch_one(store, 0).status is PullStatus.NO_NEW_MESSAGE
            store.append([make_batch([b"a"])])
            waiting.result(WAIT_S)
        store.close()

    def test_closing_ends_every_wait(self, store):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(fetch_one, store, 0, wait_s=WAIT_S)
            until(lambda: store.status().waiting_fetches)
            store.close()
            with pytest.raises(ServiceNotAvailableError):
                waiting.result(WAIT_S)


class TestFlush:
    def test_nothing_is_shown_before_it_is_flushed(self, store, monkeypatch):
        flushing, flush = threading.Event(), threading.Event()
        fdatasync = os.fdatasync

        def held(descriptor):
            flushing.set()
            flush.wait(WAIT_S)
            fdatasync(descriptor)

        monkeypatch.setattr(os, "fdatasync", held)
        with ThreadPoolExecutor(1) as pool:
            appending = pool.submit(store.append, [make_batch([b"a"])])
            flushing.wait(WAIT_S)
            assert fetch_one(store, 0).status is PullStatus.NO_NEW_MESSAGE
            assert store.queues.bounds("orders", 0).max_offset == 0
            assert not appending.done()
            flush.set()
            appending.result(WAIT_S)
        assert fetch_one(store, 0).status is PullStatus.FOUND

    def test_a_flush_that_takes_too_long_is_a_status_and_the_message_is_stored(self, store, monkeypatch):
        store.append([make_batch([b"the files are made"])])
        flush = threading.Event()
        fdatasync = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", lambda descriptor: flush.wait(WAIT_S) and fdatasync(descriptor))
        [result] = store.append([make_batch([b"a"])], timeout_s=0.01)
        assert result.status is SendStatus.FLUSH_DISK_TIMEOUT
        flush.set()
        assert fetch_one(store, 1, wait_s=WAIT_S).count == 1

    def test_a_message_that_does_not_wait_is_acknowledged_before_the_flush(self, store, monkeypatch):
        store.append([make_batch([b"the files are made"])])
        flush = threading.Event()
        fdatasync = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", lambda descriptor: flush.wait(WAIT_S) and fdatasync(descriptor))
        hasty = replace(make_batch([b"a"]), wait_store_msg_ok=False)
        [result] = store.append([hasty])
        assert (result.status, result.queue_offset) == (SendStatus.SEND_OK, 1)
        assert fetch_one(store, 1).status is PullStatus.NO_NEW_MESSAGE
        together = store.append([make_batch([b"b"]), hasty], timeout_s=0.01)
        assert [one.status for one in together] == [SendStatus.FLUSH_DISK_TIMEOUT, SendStatus.SEND_OK]
        flush.set()
        assert fetch_one(store, 1, wait_s=WAIT_S).count >= 1

    def test_asynchronous_flushing_shows_at_once(self, root):
        store = open_store(
            root,
            flush_disk_type=FlushDiskType.ASYNC_FLUSH,
            flush_interval_commit_log_ms=60_000,
            # Prevent a snapshot during the test, because a snapshot would also flush the log.
            flush_interval_consume_queue_ms=60_000,
        )
        [result] = store.append([make_batch([b"a"])])
        assert result.status is SendStatus.SEND_OK
        assert bodies_of(store) == [b"a"]
        assert store.status().flushed_physical_offset == 0
        store.close()
        assert store.status().flushed_physical_offset == store.status().max_physical_offset > 0

    def test_a_failed_flush_is_never_acknowledged_and_makes_the_store_read_only(self, root, monkeypatch):
        store = open_store(root, flush_interval_commit_log_ms=1)
        store.append([make_batch([b"before"])])

        def fail(descriptor):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fdatasync", fail)
        with pytest.raises(StoreNotWritableError, match="Input/output error"):
            store.append([make_batch([b"lost?"])])
        monkeypatch.undo()
        with pytest.raises(StoreNotWritableError, match="refuses appends until"):
            store.append([make_batch([b"after"])])
        # Consumers do not see the record whose flush failed, even if the disk seems to work again.
        assert fetch_one(store, 1, wait_s=0.1).status is PullStatus.NO_NEW_MESSAGE
        assert bodies_of(store) == [b"before"]
        assert not store.status().writable
        assert "Input/output error" in store.status().not_writable_reason
        store.close()
        assert (root / "abort").exists()
        again = open_store(root)
        assert bodies_of(again)[0] == b"before"
        again.close()

    def test_after_a_failed_flush_the_next_opening_writes_the_end_of_the_log_once_more(
        self, root, tmp_path, monkeypatch
    ):
        """After a failed flush, the next opening writes the end of the log again before it flushes. Linux marks the
        pages of a failed flush as written, so a second flush alone would write nothing."""
        store = open_store(root)
        store.append([make_batch([b"flushed"])])
        flushed = store.gate.stored_offset

        def fail(descriptor: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(disk, "flush", fail)
            with pytest.raises(StoreFailedError):
                store.append([make_batch([b"not flushed"])])
        end = store.log.end_offset
        store.close()
        calls: list[tuple[str, int, int]] = []
        real_write, real_flush = disk.pwrite_all, disk.flush

        def path_of(descriptor: int) -> str:
            return os.readlink(f"/proc/self/fd/{descriptor}")

        def pwrite_all(descriptor: int, position: int, data: bytes) -> None:
            calls.append((path_of(descriptor), position, position + len(data)))
            real_write(descriptor, position, data)

        def flush(descriptor: int) -> None:
            calls.append((path_of(descriptor), -1, -1))
            real_flush(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(disk, "pwrite_all", pwrite_all)
            patch.setattr(disk, "flush", flush)
            store = open_store(root)
        assert bodies_of(store) == [b"flushed", b"not flushed"]
        log = [(begin, written) for path, begin, written in calls if "/commitlog/" in path]
        [at] = [index for index, (begin, written) in enumerate(log) if 0 <= begin <= flushed and written >= end]
        assert (-1, -1) in log[at:]
        store.close()

    def test_a_failed_write_makes_the_store_read_only(self, root, monkeypatch):
        def fail(*arguments):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(disk, "map_for_writing", lambda *arguments: None)
        store = open_store(root)
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", fail)
            with pytest.raises(StoreNotWritableError):
                store.append([make_batch([b"a"])])
        with pytest.raises(StoreNotWritableError):
            store.append([make_batch([b"b"])])
        store.close()

    def test_a_failed_flush_of_a_queue_makes_the_store_read_only_too(self, root, monkeypatch):
        def fail(path):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr("storage.files.disk.flush_path", fail)
        store = open_store(root, flush_interval_consume_queue_ms=10)
        store.append([make_batch([b"a"])])
        until(lambda: not store.status().writable)
        with pytest.raises(StoreNotWritableError, match="refuses appends until"):
            store.append([make_batch([b"b"])])
        store.close()
        assert (root / "abort").exists()

    def test_a_disk_that_fails_while_the_store_closes_leaves_the_abort_file(self, store, root, monkeypatch):
        def fail(path):
            raise OSError(errno.EIO, "Input/output error")

        store.append([make_batch([b"a"])])
        monkeypatch.setattr("storage.files.disk.flush_path", fail)
        store.close()
        assert (root / "abort").exists()

    def test_a_full_disk_refuses_an_append_and_a_later_append_succeeds(self, store, monkeypatch):
        batch = make_batch([b"x" * 1000] * 50)
        store.append([batch])

        def fail(*arguments):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(StoreNotWritableError, match=r"No space left.*nothing was stored"):
            store.append([batch] * 3)
        monkeypatch.undo()
        stored = len(bodies_of(store))
        assert store.append([batch])[0].queue_offset == stored
        assert len(bodies_of(store)) == stored + 50

    @pytest.mark.parametrize("moments", [1, 7, 25, 60])
    def test_acknowledged_messages_survive_a_power_cut(self, root, tmp_path, monkeypatch, moments):
        """Acknowledged messages survive a simulated power failure, which reverts every file to its last flush. This
        includes the files of the consume queues."""
        cuts = PowerCuts(root)
        monkeypatch.setattr(os, "fdatasync", cuts.fdatasync)
        store = open_store(root)
        for index in range(moments):
            store.append([make_batch([b"%d" % index + b"x" * 1000] * 2)])
        cuts.copy_after_cut(tmp_path / "cut")
        expected = bodies_of(store)
        store.close()
        store = open_store(tmp_path / "cut")
        assert bodies_of(store) == expected
        store.close()


class TestKilledInTheMiddle:
    @pytest.mark.parametrize("half", [False, True], ids=["before the write", "in the middle of the write"])
    def test_each_batch_is_there_as_a_whole_or_not_at_all(self, root, tmp_path, monkeypatch, no_flushes, half):
        """The process is killed during an append that crosses the end of a log file: the store's directory is copied at
        every write. In each copy every batch is stored completely or not at all.

        The test uses files without memory maps, because they are written in few pieces. test_warm_up.py covers mapped
        files.
        """
        copies: list[Path] = []
        monkeypatch.setattr(disk, "map_for_writing", lambda *arguments: None)
        pwrite = os.pwrite

        def copying_pwrite(descriptor, data, position):
            if half:
                pwrite(descriptor, data[: len(data) // 2], position)
            copies.append(killed_copy(root, tmp_path / str(len(copies))))
            return pwrite(descriptor, data, position)

        store = open_store(
            root,
            flush_disk_type=FlushDiskType.ASYNC_FLUSH,
            flush_interval_consume_queue_ms=60_000,
            warm_mapped_file_enable=False,
            # Turn the index off, because its thread would write files at unpredictable times.
            message_index_enable=False,
        )
        store.append([make_batch([b"x" * 1000] * 55)])
        work = [make_batch([b"%d" % queue_id + b"y" * 500] * 6, queue_id=queue_id) for queue_id in range(1, 4)]
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", copying_pwrite)
            store.append(work)
        store.close()
        assert len(copies) == 3 * 3 + 1
        for copy in copies:
            survivor = open_store(copy)
            assert len(bodies_of(survivor)) == 55
            counts = [len(bodies_of(survivor, queue_id=queue_id)) for queue_id in range(1, 4)]
            assert counts in ([0, 0, 0], [6, 0, 0], [6, 6, 0], [6, 6, 6])
            survivor.close()


class TestOffsets:
    def test_by_time(self, root):
        now = [1000]
        store = open_store(root, clock_ms=lambda: now[0])
        for time_ms in (1000, 2000, 2000, 3000):
            now[0] = time_ms
            store.append([make_batch([b"a"] * 2)])
        by_time = {0: 0, 1000: 0, 1001: 2, 2000: 2, 2001: 6, 3000: 6, 3001: 8}
        assert {time_ms: store.queues.offset_by_time("orders", 0, time_ms) for time_ms in by_time} == by_time
        assert store.queues.offset_by_time("orders", 9, 0) == 0
        store.close()

    def test_bounds_of_a_queue(self, store):
        assert store.queues.bounds("orders", 0) == QueueBounds(0, 0, 0)
        store.append([make_batch([b"a"] * 3)])
        assert store.queues.bounds("orders", 0) == QueueBounds(0, 3, 0)


class TestTopics:
    def test_a_deleted_topic_is_gone_and_starts_at_0_when_made_again(self, store):
        store.append([make_batch([b"a"] * 3), make_batch([b"b"], topic="other")])
        store.topics.delete("orders")
        assert store.topics.queue_ids() == {"other": [0]}
        assert store.queues.bounds("orders", 0).max_offset == 0
        assert store.append([make_batch([b"new"])])[0].queue_offset == 0
        assert bodies_of(store) == [b"new"]

    @pytest.mark.parametrize("made_again", [True, False])
    @pytest.mark.parametrize("stopped", [True, False])
    def test_a_deleted_topic_stays_deleted_over_a_restart(self, root, tmp_path, stopped, made_again):
        store = open_store(root)
        store.append([make_batch([b"a"] * 3, producer=("p", 0, 0)), make_batch([b"b"], topic="other")])
        store.topics.delete("orders")
        if made_again:
            store.append([make_batch([b"new"])])
        killed_copy(root, tmp_path / "killed")
        store.close()
        store = open_store(root if stopped else tmp_path / "killed")
        assert store.topics.queue_ids() == ({"orders": [0], "other": [0]} if made_again else {"other": [0]})
        assert bodies_of(store) == ([b"new"] if made_again else [])
        assert bodies_of(store, "other") == [b"b"]
        store.close()

    def test_messages_of_a_deleted_topic_can_be_sent_again(self, store):
        batch = make_batch([b"a", b"b"], producer=("p", 0, 0))
        store.append([batch])
        store.topics.delete("orders")
        [result] = store.append([batch])
        assert (result.queue_offset, result.duplicate) == (0, False)
        assert bodies_of(store) == [b"a", b"b"]

    def test_deleting_a_topic_that_does_not_exist_does_nothing(self, store):
        store.topics.delete("orders")
        assert store.topics.queue_ids() == {}


class TestLifeCycle:
    def test_a_second_open_is_refused_and_names_the_holder(self, store, root):
        with pytest.raises(StoreLockedError, match=f"pid {os.getpid()}"):
            open_store(root)

    def test_the_lock_is_released_by_close_and_by_a_failed_open(self, root):
        open_store(root).close()
        (root / "commitlog" / "stranger").write_text("x")
        with pytest.raises(StoreError):
            open_store(root)
        (root / "commitlog" / "stranger").unlink()
        open_store(root).close()

    def test_a_directory_that_cannot_be_made_is_a_clear_error(self, tmp_path):
        (tmp_path / "file").write_text("x")
        with pytest.raises(StoreError, match=r"cannot open the store directory .* or choose another data directory"):
            open_store(tmp_path / "file" / "store")

    def test_abort_holds_the_pid_while_the_store_is_open_and_goes_with_a_clean_stop(self, root):
        store = open_store(root)
        assert (root / "abort").read_text() == str(os.getpid())
        store.close()
        assert not (root / "abort").exists()

    def test_closing_twice_is_closing_once_and_a_closed_store_serves_nothing(self, store):
        store.append([make_batch([b"a"])])
        store.close()
        store.close()
        for call in (
            lambda: store.append([make_batch([b"a"])]),
            lambda: fetch_one(store, 0),
            store.topics.queue_ids,
            lambda: store.queues.bounds("orders", 0),
            lambda: store.read_config("topics.json"),
        ):
            with pytest.raises(ServiceNotAvailableError):
                call()
        assert store.status().not_writable_reason == "the store is closed"

    def test_every_thread_ends_with_the_store(self, root):
        before = set(threading.enumerate())
        store = open_store(root)
        started = set(threading.enumerate()) - before
        store.close()
        assert started
        assert not any(thread.is_alive() for thread in started)

    def test_maps_and_descriptors_of_a_store_of_many_files_stay_within_the_limits(self, root):
        """A store with 80 queues, a dozen log files and a dozen index files keeps two limits: it maps at most 8 files,
        and has at most 8 files open for writing."""
        store = open_store(root, max_mapped_files=8, max_index_num=100, max_mapped_bytes=1 << 20)
        before = len(open_below(root))
        for queue_id in range(80):
            store.append([make_batch([b"x" * 400] * 15, queue_id=queue_id)])
        assert store.queries.by_unique_id("orders", f"{14:032X}").count == 32
        for queue_id in range(80):
            assert len(bodies_of(store, queue_id=queue_id)) == 15
        assert len(list((root / "commitlog").iterdir())) > 8
        assert len(store._parts.reader.maps._maps) <= 8
        # Besides 8 mapped files and 8 files open for writing, the store may have six descriptors: two for each of the
        # current log file, the next log file and the newest index file. Retry, because the store's threads may briefly
        # open another file.
        eventually(lambda: len(open_below(root)) <= before + 8 + 8 + 6, "so few files are open")
        store.close()

    def test_no_descriptor_is_left_open(self, root):
        store = open_store(root)
        assert open_below(root)
        for index in range(30):
            store.append([make_batch([b"x" * 1000] * 10, queue_id=index % 3)])
        bodies_of(store)
        store.close()
        assert open_below(root) == []

    def test_a_clean_stop_leaves_no_preallocated_file(self, root):
        store = open_store(root)
        store.append([make_batch([b"x" * 1000] * 40)])
        store.close()
        assert [path.name for path in (root / "commitlog").iterdir()] == ["00000000000000000000"]

    def test_views_stay_readable_after_the_file_is_deleted_and_the_store_closed(self, store, root):
        store.append([make_batch([b"kept"])])
        queue = store._parts.queues.get("orders", 0)
        [view] = store._parts.reader.views(queue.units(0, 1))
        store.close()
        (root / "commitlog" / "00000000000000000000").unlink()
        assert b"kept" in bytes(view)

    def test_config_texts_are_kept(self, store, root):
        store.write_config("topics.json", "{}")
        assert store.read_config("topics.json") == "{}"
        assert store.read_config("absent.json") is None


def test_a_time_is_found_in_a_queue_that_has_lost_messages(root):
    """A query by time finds messages in a queue with a gap at offsets 10 to 19, as after recovery of a log with damaged
    records. Later messages keep their offsets."""
    now_ms = 1000
    store = open_store(root, clock_ms=lambda: now_ms)
    store.append([make_batch([b"early"] * 10)])
    queue = store._parts.queues.get_plain("orders", 0)
    with store._parts.append_lock:
        queue.start_at(20)
    now_ms = 5000
    store.append([make_batch([b"late"] * 10)])
    found = {
        (time_ms, boundary): store.queues.offset_by_time("orders", 0, time_ms, boundary)
        for time_ms in (500, 1000, 3000, 5000, 9000)
        for boundary in Boundary
    }
    assert [found[time_ms, Boundary.UPPER] for time_ms in (500, 1000, 3000, 5000, 9000)] == [0, 9, 9, 29, 29]
    assert [found[time_ms, Boundary.LOWER] for time_ms in (500, 1000, 9000)] == [0, 0, 30]
    for time_ms in (3000, 5000):
        request = FetchRequest("orders", 0, found[time_ms, Boundary.LOWER], 1)
        [result] = store.fetch([request], max_bytes=1000, wait_s=0)
        assert decode_records(result.records)[0].queue_offset == 20
    store.close()


@pytest.mark.parametrize("flush", list(FlushDiskType))
def test_a_store_whose_directory_is_deleted_acknowledges_no_more(tmp_path, flush):
    """After its directory was deleted, a store acknowledges no more appends. A deleted file disappears when the process
    ends, even if all of its data is flushed."""
    root = tmp_path / "store"
    store = open_store(
        root,
        flush_disk_type=flush,
        flush_interval_commit_log_ms=5,
        flush_commit_log_least_pages=0,
        flush_interval_consume_queue_ms=60_000,
    )
    store.append([make_batch([b"before"])])
    eventually((root / "commitlog" / f"{LOG_FILE_BYTES:020d}").exists, "the next file is made")
    eventually(lambda: store.status().flushed_physical_offset == store.log.end_offset, "the flush")
    shutil.rmtree(root)
    if flush is FlushDiskType.SYNC_FLUSH:
        with pytest.raises(StoreFailedError, match="was deleted while the store had the file open"):
            store.append([make_batch([b"after"])])
    else:
        store.append([make_batch([b"in doubt"])])
        eventually(lambda: not store.status().writable, "the next flush notices")
    with pytest.raises(StoreNotWritableError, match="was deleted while the store had the file open"):
        store.append([make_batch([b"later"])])
    store.close()


def modes(root: Path) -> set[tuple[bool, int]]:
    return {(path.is_dir(), path.stat().st_mode & 0o777) for path in (root, *root.rglob("*"))}


def test_only_the_owner_may_read_a_store_whatever_the_umask_and_the_earlier_mode(tmp_path):
    private = {(True, 0o700), (False, 0o600)}
    root = tmp_path / "store"
    umask = os.umask(0)
    try:
        store = open_store(root)
        store.append([make_batch([b"secret"])])
        store.write_config("topics.json", "{}")
        store.close()
        assert modes(root) == private
        for path in (root, *root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        store = open_store(root)
        assert bodies_of(store) == [b"secret"]
        store.close()
        assert modes(root) == private
    finally:
        os.umask(umask)


def test_the_flush_settles_a_started_append_and_notifies_listeners(root, monkeypatch):
    store = open_store(root)
    # Create the store's files before the test blocks all flushes, because creating the files also flushes.
    store.append([make_batch([b"zero"])])
    disk_works, heard = threading.Event(), threading.Event()
    flush = disk.flush

    def slow_flush(descriptor: int) -> None:
        assert disk_works.wait(WAIT_S)
        flush(descriptor)

    monkeypatch.setattr(disk, "flush", slow_flush)
    store.gate.progress.add_listener(heard.set)
    started = store.start_append([make_batch([b"one"])])
    assert store.log.end_offset > store.visible_offset
    assert started.settle(time.monotonic()) is None
    hasty = store.start_append([replace(make_batch([b"two"]), wait_store_msg_ok=False)])
    assert [result.queue_offset for result in hasty.settle(time.monotonic()) or ()] == [2]
    disk_works.set()
    assert heard.wait(WAIT_S)
    eventually(lambda: store.gate.stored_offset == store.log.end_offset, "the flush")
    [result] = started.settle(time.monotonic()) or ()
    assert (result.status, result.queue_offset) == (SendStatus.SEND_OK, 1)
    store.close()


def test_a_started_append_does_not_look_at_its_records_again(root, monkeypatch):
    """An append that waits for the disk does not read its records again, because they may no longer be there. They are
    in the buffer of a lane (direct socket connection), and the lane's next append overwrites this buffer during the
    wait."""
    store = open_store(root)
    # Create the store's files now: creating them also flushes, and later flushes are blocked in this test.
    store.append([make_batch([b"zero"])])
    disk_works = threading.Event()
    flush = disk.flush

    def slow_flush(descriptor: int) -> None:
        assert disk_works.wait(WAIT_S)
        flush(descriptor)

    monkeypatch.setattr(disk, "flush", slow_flush)
    batch = make_batch([b"one"])
    buffer = bytearray(batch.records)
    started = store.start_append([replace(batch, records=memoryview(buffer))])
    assert started.settle(time.monotonic()) is None
    buffer[:] = b"\xff" * len(buffer)
    disk_works.set()
    eventually(lambda: store.gate.stored_offset == store.log.end_offset, "the flush")
    [result] = started.settle(time.monotonic()) or ()
    assert (result.status, result.queue_offset) == (SendStatus.SEND_OK, 1)
    assert store.statistics().topics["orders"].messages == 2
    store.close()


def test_a_started_append_gets_an_error_if_the_disk_is_too_slow_or_fails(root, monkeypatch):
    store = open_store(root)
    store.append([make_batch([b"zero"], queue_id=queue_id) for queue_id in (0, 1)])
    disk_fails, heard = threading.Event(), threading.Event()

    def failing_flush(descriptor: int) -> None:
        assert disk_fails.wait(WAIT_S)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, "flush", failing_flush)
    store.gate.progress.add_listener(heard.set)
    slow, failed = (store.start_append([make_batch([b"one"], queue_id=queue_id)]) for queue_id in (0, 1))
    [result] = slow.settle(slow.deadline_s) or ()
    assert result.status is SendStatus.FLUSH_DISK_TIMEOUT
    disk_fails.set()
    assert heard.wait(WAIT_S)
    with pytest.raises(StoreFailedError):
        failed.settle(time.monotonic())
    assert store.statistics().runtime["putMessageFailedTimes"] == "1"
    store.close()


def test_with_async_flush_a_started_append_is_settled_at_once(root):
    with contextlib.closing(open_store(root, flush_disk_type=FlushDiskType.ASYNC_FLUSH)) as store:
        started = store.start_append([make_batch([b"one"])])
        assert [result.status for result in started.settle(time.monotonic()) or ()] == [SendStatus.SEND_OK]


def test_a_disk_that_is_full_when_pages_are_made_refuses_the_append_before_anything_is_written(root, monkeypatch):
    """If the disk is full when the store prepares the log's next pages, the store refuses the append and stores
    nothing. Some file systems need new blocks even to overwrite existing bytes, and then fail with ENOSPC."""
    with contextlib.closing(open_store(root, flush_disk_type=FlushDiskType.ASYNC_FLUSH)) as store:
        store.append([make_batch([b"first"])])
        end_offset = store.log.end_offset

        def fail(*arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(log_writer, "PAGES_AHEAD_BYTES", 4096)
            store.log._easy_end = 0
            store.log._writer._pages_end = 0
            patched.setattr(disk, "pwrite_all", fail)
            for batch in (make_batch([b"one"]), make_batch([b"one", b"two"])):
                with pytest.raises(StoreNotWritableError, match=r"No space left.*nothing was stored"):
                    store.append([batch])
            assert store.log.end_offset == end_offset
        store.append([make_batch([b"second"])])
        assert bodies_of(store) == [b"first", b"second"]
