"""Tests that appending a chunk of log bytes as a block gives the same result as appending its records one by one, for
random chunks.

The chunks contain messages of several producers, delayed messages, messages of deleted topics, inner batches, unusual
records and damage. 200 logs; RAYMQ_SOAK=1 tests 8,000 logs, RAYMQ_RAW_APPEND_SEED repeats a single log.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import storage.replication.chunk_appender
from raymq.common.errors import InvalidArgumentError
from storage.files.age_marks import AGES_FILE
from storage.files.config_files import SealedText
from storage.message_store import MessageStore
from storage.replication.chunk_appender import ChunkAppender
from tests.support.stores.random_logs import FILE_BYTES, Log
from tests.support.stores.stores import open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

ONE_SEED = os.environ.get("RAYMQ_RAW_APPEND_SEED")
SEEDS = 8000 if os.environ.get("RAYMQ_SOAK") == "1" else 200
PARTS = 4


def random_log(dice: random.Random) -> Log:
    log = Log(dice)
    for _ in range(dice.randrange(1, 5)):
        log.write(dice.choice((3, 10, 60)))
        if dice.random() < 0.3:
            log.delete(dice.choice(log.topics))
    return log


def chunks_of(log: Log, dice: random.Random) -> Iterator[tuple[int, bytes]]:
    """Yield the log in chunks of random size, each with its start offset. Each chunk ends at the end of a record or of
    a log file."""
    for index, data in enumerate(log.files):
        first, full = index * FILE_BYTES, index + 1 < len(log.files)
        file = bytes(data).ljust(FILE_BYTES, b"\0") if full else bytes(data)
        cuts = [start - first for start in log.starts if first < start < first + FILE_BYTES]
        chosen = sorted(dice.sample(cuts, min(len(cuts), dice.choice((0, 1, 3, 20)))))
        for start, end in zip([0, *chosen], [*chosen, len(file)], strict=True):
            if start < end:
                yield first + start, file[start:end]


def damaged(data: bytes, dice: random.Random) -> bytes:
    broken, at = bytearray(data), dice.randrange(len(data))
    match dice.randrange(4):
        case 0:
            broken[at] ^= 1 << dice.randrange(8)
        case 1:
            del broken[at:]
        case 2:
            broken[at : at + 20] = dice.randbytes(len(broken[at : at + 20]))
        case _:
            broken += dice.randbytes(dice.choice((1, 8, 100)))
    return bytes(broken)


def outcome(store: MessageStore, physical_offset: int, data: bytes) -> str:
    """Append a log chunk to the store from a buffer that is overwritten afterwards. Returns the error's text, or an
    empty text if the append succeeds."""
    memory = bytearray(data)
    try:
        store.chunks.append_chunk(physical_offset, memoryview(memory))
    except InvalidArgumentError as error:
        return str(error)
    finally:
        memory[:] = b"\xff" * len(memory)
    return ""


def state_of(store: MessageStore) -> dict[str, object]:
    parts, appender = store._parts, store._appender
    queues = [
        (queue.topic, queue.queue_id, queue.min_offset, queue.next_offset, queue.visible_offset)
        for queue in parts.queues
        if queue.exists
    ]
    return {
        "end": (parts.log.end_offset, appender.last_store_timestamp_ms, appender.last_record_offset),
        "queues": queues,
        "producers": parts.dedup.rows(),
        "deliveries": parts.deliveries._table,
    }


def files_of(root: Path) -> dict[str, bytes]:
    """Return the bytes of the store's files, by path. A configuration file is returned as its text, without the count
    of its writes: the checkpoint thread decides how often the file is written."""
    paths = [
        path
        for name in ("commitlog", "consumequeue", "batchconsumequeue", "config")
        for path in (root / name).rglob("*")
    ]
    # The file of ages contains the time at which it was written.
    paths = [path for path in paths if path.is_file() and not path.name.startswith(AGES_FILE)]
    files = {str(path.relative_to(root)): path.read_bytes() for path in paths}
    text = SealedText(is_json=False)
    return {name: text.decode(data).text if name.startswith("config/") else data for name, data in files.items()}


@pytest.fixture
def directory() -> Iterator[Path]:
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="raw-append-", dir=base) as name:
        yield Path(name)


def run(seed: int, directory: Path) -> int:
    """Append a random log to two stores, to one in blocks and to the other record by record, and compare the stores.
    Returns the number of appended blocks."""
    dice, taken = random.Random(seed), 0
    log = random_log(dice)
    changes = {
        "mapped_file_size_commit_log_bytes": FILE_BYTES,
        "mapped_file_size_consume_queue_bytes": 400,
        "mapper_file_size_batch_consume_queue_bytes": 460,
        "message_index_enable": False,
        "dedup_producers_max": dice.choice((1, 2, 100)),
        "flush_interval_consume_queue_ms": 60_000,
    }
    roots = [directory / "singly", directory / "together"]
    singly, together = (open_store(root, **changes) for root in roots)

    def append_singly(physical_offset: int, data: bytes) -> str:
        with mock.patch.object(storage.replication.chunk_appender, "read_block", return_value=None):
            return outcome(singly, physical_offset, data)

    append_block = ChunkAppender._append_block

    def counted(self: ChunkAppender, physical_offset: int, data: memoryview) -> bool:
        nonlocal taken
        whole = append_block(self, physical_offset, data)
        taken += whole
        return whole

    many = mock.patch.object(storage.replication.chunk_appender, "BLOCK_RECORDS_MIN", 1)
    with many, mock.patch.object(ChunkAppender, "_append_block", counted):
        for physical_offset, data in chunks_of(log, dice):
            tries = [damaged(data, dice), data] if dice.random() < 0.3 else [data]
            for chunk in tries:
                error = append_singly(physical_offset, chunk)
                assert outcome(together, physical_offset, chunk) == error
                assert state_of(together) == state_of(singly)
                if not error:
                    break
            if error or len(chunk) != len(data):
                break
    for store in (singly, together):
        store.close()
    assert files_of(roots[0]) == files_of(roots[1])
    for root in roots:
        shutil.rmtree(root)
    return taken


@pytest.mark.parametrize("part", range(PARTS))
def test_appending_a_block_equals_appending_single_records(part: int, directory: Path) -> None:
    taken = 0
    for seed in [int(ONE_SEED)] if ONE_SEED else range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS):
        try:
            taken += run(seed, directory)
        except AssertionError as error:
            raise AssertionError(f"RAYMQ_RAW_APPEND_SEED={seed}: {error}") from error
    assert taken > SEEDS // PARTS or ONE_SEED
