"""Tests of how the index gets the message ids of an appended batch. It takes them from the append if the records have
these ids; otherwise it reads the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from raymq.common.message import Message
from raymq.records.format.encode import EncodedBatch, ProducerSequence, encode_batch
from raymq.records.format.message_id import IdRange
from storage.index import index_service
from storage.index.appended_batches import RECORDS_MIN
from storage.message_store import MessageStore
from tests.support.stores.stores import LOG_FILE_BYTES, open_store

COUNT = 100


@pytest.fixture
def walked() -> Iterator[mock.Mock]:
    """Yield a mock that counts how often the index scans the log."""
    with mock.patch.object(index_service, "walk_log", side_effect=index_service.walk_log) as walks:
        yield walks


def batch_of(
    number: int,
    count: int = COUNT,
    *,
    sequence: int | None = None,
    keys: tuple[str, ...] = (),
    stem: str = "STEM",
) -> EncodedBatch:
    ids = IdRange(f"{stem}{number:04d}", 65_500, count)
    messages = [Message("orders", b"body" * (1 + index % 3), tags="ab"[index % 2], keys=keys) for index in range(count)]
    producer = None if sequence is None else ProducerSequence("p", 1, sequence)
    encoded = encode_batch(
        messages, 0, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=ids, producer=producer
    )
    return replace(encoded, message_ids=ids)


def check_found(store: MessageStore, batch: EncodedBatch) -> None:
    for message_id in list(batch.message_ids)[:: len(batch) // 20 or 1]:
        found = store.queries.by_unique_id("orders", message_id)
        assert found.complete
        assert found.count == 1, message_id


def check_put_without_a_walk(store: MessageStore, batches: list[EncodedBatch], walked: mock.Mock) -> None:
    for batch in batches:
        check_found(store, batch)
    assert store._index.entries_put == len(batches) * COUNT
    assert not walked.called


def test_ids_of_batches_are_put_without_a_walk_over_the_log(tmp_path: Path, walked: mock.Mock) -> None:
    with closing(open_store(tmp_path, mapped_file_size_commit_log_bytes=1 << 20)) as store:
        batches = [batch_of(number, sequence=number * COUNT) for number in range(12)]
        for batch in batches:
            store.append([batch])
        check_put_without_a_walk(store, batches, walked)


def test_batches_that_a_file_end_divides_are_found(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        batches = [batch_of(number, 20 * LOG_FILE_BYTES // 1000) for number in range(5)]
        for batch in batches:
            store.append([batch])
        assert store.status().max_physical_offset > 2 * LOG_FILE_BYTES
        for batch in batches:
            check_found(store, batch)


def test_claimed_ids_that_the_records_do_not_have_are_rejected(tmp_path: Path, walked: mock.Mock) -> None:
    with closing(open_store(tmp_path, mapped_file_size_commit_log_bytes=1 << 20)) as store:
        liar, truth = batch_of(1), batch_of(2)
        store.append([replace(liar, message_ids=IdRange("FALSE", 0, COUNT))])
        store.append([truth])
        check_found(store, liar)
        check_found(store, truth)
        assert store.queries.by_unique_id("orders", "FALSE0000").count == 0
        assert walked.called
        assert store._index.entries_put == 2 * COUNT


def test_batches_with_stems_of_different_lengths_are_put_without_a_walk(tmp_path: Path, walked: mock.Mock) -> None:
    with closing(open_store(tmp_path, mapped_file_size_commit_log_bytes=1 << 20)) as store:
        batches = [batch_of(number, stem="STEM" if number % 4 else "LONGER-STEM") for number in range(12)]
        with store._index._changed:  # Hold the lock that stops the index thread while the batches are appended.
            for batch in batches:
                store.append([batch])
        check_put_without_a_walk(store, batches, walked)


def test_one_batch_with_wrong_ids_among_others_is_rejected(tmp_path: Path, walked: mock.Mock) -> None:
    with closing(open_store(tmp_path, mapped_file_size_commit_log_bytes=1 << 20)) as store:
        batches = [batch_of(number) for number in range(3)]
        told = [batches[0], replace(batches[1], message_ids=IdRange("FALSE123", 0, COUNT)), batches[2]]
        # Hold the lock that the index thread needs, so that it indexes nothing while the batches are appended.
        with store._index._changed:
            for batch in told:
                store.append([batch])
        for batch in batches:
            check_found(store, batch)
        assert store.queries.by_unique_id("orders", "FALSE1230000").count == 0
        assert walked.called
        assert store._index.entries_put == 3 * COUNT


def test_keys_small_batches_and_batches_without_ids_are_read_from_the_log(tmp_path: Path, walked: mock.Mock) -> None:
    with closing(open_store(tmp_path, mapped_file_size_commit_log_bytes=1 << 20)) as store:
        keyed, small, bare = batch_of(1, keys=("k",)), batch_of(2, RECORDS_MIN - 1), batch_of(3)
        store.append([keyed])
        store.append([small])
        store.append([replace(bare, message_ids=())])
        assert store.queries.by_key("orders", "k", max_num=5).count == 5
        for batch in (keyed, small, bare):
            check_found(store, batch)
        assert store._index.entries_put == 2 * COUNT + RECORDS_MIN - 1 + COUNT
        assert walked.called


def test_the_rest_of_a_batch_sent_twice_has_its_own_ids(tmp_path: Path) -> None:
    with closing(open_store(tmp_path, mapped_file_size_commit_log_bytes=1 << 20)) as store:
        whole = batch_of(1, 2 * COUNT, sequence=0)
        half = batch_of(1, COUNT, sequence=0)
        store.append([half])
        store.append([whole])
        check_found(store, whole)
        assert store._index.entries_put == 2 * COUNT


def test_a_store_without_an_index_keeps_no_batches_for_it(tmp_path: Path) -> None:
    with closing(open_store(tmp_path, message_index_enable=False, mapped_file_size_commit_log_bytes=1 << 20)) as store:
        store.append([batch_of(1)])
        assert store._parts.appended.next_start() is None


def test_the_index_reads_batches_that_its_buffer_cannot_hold_from_the_log(tmp_path: Path, walked: mock.Mock) -> None:
    with closing(open_store(tmp_path, mapped_file_size_commit_log_bytes=1 << 20)) as store:
        store._parts.appended._records_max = COUNT
        batches = [batch_of(number) for number in range(4)]
        # While this lock is held, the index thread cannot read the appended batches.
        with store._index._changed:
            for batch in batches:
                store.append([batch])
        for batch in batches:
            check_found(store, batch)
        assert walked.called
        assert store._index.entries_put == 4 * COUNT
