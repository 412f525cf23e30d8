"""Tests of filter expressions in a store: in fetches, in long polls, and in reads of memory-mapped files."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest

import raymq
from raymq.common.message import Message, PullStatus
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import encode_batch
from raymq.records.logfiles import log_reader
from raymq.records.logfiles.log_reader import LogReader
from storage.message_store import MessageStore
from tests.support.stores.stores import open_store, small_settings

RARE = "price > 5 AND region = 'eu'"


def append(store: MessageStore, properties: list[dict[str, str]], first: int = 0, body_size: int = 100) -> None:
    messages = [
        Message("orders", f"{first + row}".encode().ljust(body_size), properties=one)
        for row, one in enumerate(properties)
    ]
    store.append(
        [
            encode_batch(
                messages,
                0,
                born_host=("127.0.0.1", 5000),
                born_timestamp_ms=1_700_000_000_000,
                message_ids=[f"{first + row:032X}" for row in range(len(messages))],
            )
        ]
    )


def priced(count: int, every: int) -> list[dict[str, str]]:
    """Return the properties of `count` messages. Every `every`-th message, starting with the first, passes the filter
    RARE."""
    return [{"price": str(6 if row % every == 0 else row % 6), "region": "eu"} for row in range(count)]


def read_all(store: MessageStore, sql: str, max_messages: int = 1000) -> tuple[list[int], int]:
    """Read a queue to its end with the filter `sql`. Returns the offsets of all messages that pass the filter, and the
    number of bytes that the store returned."""
    offset, found, moved = 0, list[int](), 0
    end = store.queues.bounds("orders", 0).max_offset
    while offset < end:
        request = FetchRequest("orders", 0, offset, max_messages, None, sql)
        [result] = store.fetch([request], max_bytes=1 << 20, wait_s=0)
        assert result.next_offset > offset
        assert result.status is (PullStatus.FOUND if result.count else PullStatus.NO_MATCHED_MESSAGE)
        found += [message.queue_offset for message in decode_records(result.records, broker_name="broker-a")]
        moved += len(result.records)
        offset = result.next_offset
    return found, moved


@pytest.mark.parametrize("max_messages", [1, 7, 1000])
def test_a_fetch_returns_matching_messages_and_skips_the_others(tmp_path: Path, max_messages: int) -> None:
    with closing(open_store(tmp_path)) as store:
        for first in range(0, 3_000, 500):
            append(store, priced(500, 100), first)
        found, moved = read_all(store, RARE, max_messages)
        assert found == list(range(0, 3_000, 100))
        assert moved < 10_000


def test_fetches_of_one_request_may_have_different_filters(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        append(store, priced(10, 5))
        requests = [FetchRequest("orders", 0, 0, 100, None, sql) for sql in (RARE, None, "price IS NULL", "price = x")]
        results = store.fetch(requests, max_bytes=1 << 20, wait_s=0)
        assert [result.count for result in results] == [2, 10, 0, 0]
        assert [result.next_offset for result in results] == [10, 10, 10, 10]


def test_an_expression_that_does_not_compile_is_refused(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        append(store, priced(10, 5))
        with pytest.raises(raymq.FilterExpressionError, match="character 7"):
            store.fetch([FetchRequest("orders", 0, 0, 100, None, "price != 5")], max_bytes=1 << 20, wait_s=0)


def test_one_fetch_scans_a_bounded_number_of_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "_FILTER_UNITS", 300)
    with closing(open_store(tmp_path)) as store:
        append(store, priced(1_000, 2_000))
        request = FetchRequest("orders", 0, 1, 10, None, RARE)
        # The fetch finds no matching message, but does not wait for new messages, because the queue has more messages
        # to filter.
        [result] = store.fetch([request], max_bytes=1 << 20, wait_s=60)
        assert (result.status, result.next_offset, result.count) == (PullStatus.NO_MATCHED_MESSAGE, 301, 0)


def test_one_fetch_scans_a_bounded_number_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "_FILTER_BYTES", 50_000)
    with closing(open_store(tmp_path)) as store:
        append(store, priced(1_000, 2_000))
        [result] = store.fetch([FetchRequest("orders", 0, 1, 10, None, RARE)], max_bytes=1 << 20, wait_s=0)
        assert 1 < result.next_offset < 1_000
        assert read_all(store, RARE) == ([0], result_size(store))


def result_size(store: MessageStore) -> int:
    """Return the size of the store's first record, in bytes."""
    [result] = store.fetch([FetchRequest("orders", 0, 0, 1)], max_bytes=1 << 20, wait_s=0)
    return len(result.records)


def test_a_fetch_of_no_bytes_returns_the_offset_of_the_next_match(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        append(store, priced(100, 40))
        [result] = store.fetch([FetchRequest("orders", 0, 1, 10, None, RARE)], max_bytes=0, wait_s=0)
        assert (result.status, result.next_offset, result.count) == (PullStatus.FOUND, 40, 0)


def test_a_long_poll_waits_for_a_message_that_passes(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        append(store, priced(10, 100))
        results = []
        request = FetchRequest("orders", 0, 1, 10, None, RARE)
        waiter = threading.Thread(
            target=lambda: results.extend(store.fetch([request], max_bytes=1 << 20, wait_s=60)), daemon=True
        )
        waiter.start()
        for first in range(10, 500, 10):
            append(store, [{"price": "1"}] * 10, first)
        assert not results
        append(store, priced(1, 1), 500)
        waiter.join(60)
        [result] = results
        assert (result.status, result.count) == (PullStatus.FOUND, 1)
        assert decode_records(result.records, broker_name="broker-a")[0].queue_offset == result.next_offset - 1 == 500


def test_a_long_poll_that_times_out_returns_how_far_it_has_scanned(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        append(store, priced(10, 100))
        [result] = store.fetch([FetchRequest("orders", 0, 1, 10, None, RARE)], max_bytes=1 << 20, wait_s=0.05)
        assert (result.status, result.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, 10)


def test_a_reader_of_mapped_files_returns_only_matching_messages(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        append(store, priced(1_000, 100))
        settings = small_settings(tmp_path)
        reader = LogReader(
            tmp_path,
            commit_log_file_size=settings.mapped_file_size_commit_log_bytes,
            consume_queue_file_size=settings.mapped_file_size_consume_queue_bytes,
        )
        located, next_offset = reader.find(FetchRequest("orders", 0, 1, 5, None, RARE), 1_000, 1 << 20)
        assert [offset for part in located for offset in part.offsets.tolist()] == [100, 200, 300, 400, 500]
        assert next_offset > 500
        located, next_offset = reader.find(FetchRequest("orders", 0, 7, 5, None, RARE), 8, 1 << 20)
        assert (located, next_offset) == ([], 8)
