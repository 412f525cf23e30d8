"""Tests of the repeated messages that a store still recognises after damage has made its snapshot useless
(docs/design.md, "Repeats after damage")."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.common.errors import MessageIllegalError
from raymq.common.protocol.store import AppendResult
from storage.message_store import MessageStore
from tests.support.stores.stores import make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

FILE_BYTES = 16_384


def append(store: MessageStore, producer: str) -> AppendResult:
    """Append the first message of `producer`. A second call for the same producer repeats the message."""
    [result] = store.append([make_batch([b"first"], producer=(producer, 0, 0))])
    return result


def fill(store: MessageStore, end_offset: int) -> None:
    """Append messages without a producer until the log's end reaches `end_offset`."""
    while store.log.end_offset < end_offset:
        store.append([make_batch([b"x" * 1000])])


def lose_snapshot(root: Path) -> None:
    for path in root.glob("dedup*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def test_repeats_of_the_last_two_files_are_recognised_and_older_ones_may_be_stored_again(tmp_path):
    root = tmp_path / "store"
    store = open_store(root, mapped_file_size_commit_log_bytes=FILE_BYTES)
    append(store, "old")
    fill(store, 2 * FILE_BYTES + 3000)
    append(store, "in the file before")
    fill(store, 3 * FILE_BYTES + 3000)
    append(store, "in the last file")
    store.close()
    store = open_store(root, mapped_file_size_commit_log_bytes=FILE_BYTES)
    # the store recognises the repeat of the oldest batch, because the snapshot contains the producer's sequence number
    assert append(store, "old").duplicate
    store.close()
    lose_snapshot(root)
    store = open_store(root, mapped_file_size_commit_log_bytes=FILE_BYTES)
    assert append(store, "in the last file").duplicate
    assert append(store, "in the file before").duplicate
    assert not append(store, "old").duplicate
    store.close()


def test_an_older_repeat_of_a_producer_that_sent_since_is_refused_and_not_stored(tmp_path):
    root = tmp_path / "store"
    store = open_store(root, mapped_file_size_commit_log_bytes=FILE_BYTES)
    append(store, "goes on")
    fill(store, 3 * FILE_BYTES + 3000)
    store.append([make_batch([b"later"], producer=("goes on", 0, 1))])
    store.close()
    lose_snapshot(root)
    store = open_store(root, mapped_file_size_commit_log_bytes=FILE_BYTES)
    end = store.log.end_offset
    with pytest.raises(MessageIllegalError, match="too old to check"):
        append(store, "goes on")
    assert store.log.end_offset == end
    store.close()
