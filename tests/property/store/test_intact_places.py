"""Tests that recovery never takes a record of an intact log for a damaged record, even if other files of the store are
lost.

The random stores have topics that are deleted and created again, delayed and transactional messages, inner batches,
light queues, and log files that retention deleted. They are masters or replicas, after a clean stop or a crash. Some of
their queues, snapshots, checkpoints or deletion records are lost. 24 stores; RAYMQ_SOAK=1 tests 2,000 stores.
RAYMQ_PLACES_SEED repeats a single store.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

import storage.dispatch.record_blocks
import storage.recovery.changed_places
import storage.recovery.log_files
import storage.recovery.walk
from raymq.common.message import Message
from raymq.common.names import SCHEDULE_TOPIC
from raymq.records.format.compression import Compression
from raymq.records.format.encode import EncodedBatch, ProducerSequence, WaitingBatch, encode_batch
from raymq.records.format.inner_batch_encode import encode_inner_batch
from storage.log.holes import PLACE_REASON
from storage.message_store import MessageStore
from storage.retention import cleaner
from tests.support.stores.clocks import Clock, let_pass
from tests.support.stores.random_logs import FILE_BYTES, Log
from tests.support.stores.stores import killed_copy, make_batch, open_store
from tests.support.stores.transactions import begin

pytestmark = pytest.mark.usefixtures("no_flushes")

SEEDS = 2000 if os.environ.get("RAYMQ_SOAK") == "1" else 24
ONE_SEED = os.environ.get("RAYMQ_PLACES_SEED")
SETTINGS = {
    "enable_lmq": True,
    "enable_multi_dispatch": True,
    "mapped_file_size_commit_log_bytes": 16384,
    "mapped_file_size_consume_queue_bytes": 400,
    "mapper_file_size_batch_consume_queue_bytes": 460,
    "message_index_enable": False,
}
# Some of these topic names differ in a single bit, and so do some of these queue ids. So recovery might take an intact
# record of one queue for a record of another queue with a changed bit.
QUEUES = [("orders", 0), ("orders", 1), ("orderr", 0), ("orders", 2), ("pays", 1)]
LIGHT_QUEUES = ["%LMQ%a", "%LMQ%b", "%LMQ%c", "%LMQ%a,%LMQ%b"]
Bodies = dict[tuple[str, int], dict[int, bytes]]


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(cleaner, "DELETE_PAUSE_S", 0.0)
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="intact-places-", dir=base) as name:
        yield Path(name)


class Writer:
    """Runs random operations on a store: appends of every kind, deletions of topics, and retention."""

    def __init__(self, dice: random.Random, root: Path) -> None:
        self._dice, self.root, self._clock = dice, root, Clock()
        self.store = open_store(root, clock_ms=self._clock, **SETTINGS)
        self._sequences: dict[tuple[str, int], int] = {}
        self._deletes = dice.random() < 0.6
        self._cleans = dice.random() < 0.4
        self._size = dice.choice((10, 300))
        self._number = 0

    def work(self) -> None:
        for _ in range(self._dice.choice((20, 80, 200))):
            self._do()
            self._clock.now_ms += self._dice.choice((0, 1, 5000))

    def _do(self) -> None:
        dice = self._dice
        match dice.randrange(12):
            case 0:
                delayed = Message("orders", self._body(), delay_level=dice.randrange(1, 4))
                queue_id = (delayed.delay_level or 1) - 1
                waiting = WaitingBatch(SCHEDULE_TOPIC, [dice.randrange(3)])
                self._append(self._encoded(delayed, queue_id, waiting=waiting))
            case 1:
                self.store.schedule.new_scheduler().round()
            case 2:
                half = begin(self.store, self._body(), queue_id=dice.randrange(3), name=f"T{self._number}")
                if dice.random() < 0.8:
                    half.commit() if dice.random() < 0.7 else half.rollback()
            case 3:
                names = {"INNER_MULTI_DISPATCH": dice.choice(LIGHT_QUEUES)}
                self._append(make_batch([self._body()], queue_id=dice.randrange(3), extra_properties=names))
            case 4:
                count, queue_id = dice.randrange(1, 4), dice.randrange(2)
                sequence = self._next_sequence(("batched", queue_id), count)
                self._append(
                    encode_inner_batch(
                        [Message("batched", self._body()) for _ in range(count)],
                        queue_id,
                        born_host=("127.0.0.1", 5000),
                        born_timestamp_ms=1,
                        message_ids=["0"] * count,
                        producer=ProducerSequence("b", 0, sequence),
                        compression=Compression(),
                    )
                )
            case 5 if self._deletes and dice.random() < 0.5:
                self.store.topics.delete(dice.choice(["orders", "orderr", "pays", "batched"]))
            case 6 if self._cleans and self._number > 20 and dice.random() < 0.3:
                os.utime(min((self.root / "commitlog").iterdir()), (0, 0))
                self.store.cleaner._by_hand = 1
                let_pass(self.store)
                self.store.cleaner.run_once(datetime(2023, 11, 15, 3))
            case _:
                topic, queue_id = key = dice.choice(QUEUES)
                bodies = [self._body() for _ in range(dice.randrange(1, 4))]
                sequence = self._next_sequence(key, len(bodies))
                producer = None if dice.random() < 0.2 else ("p", 0, sequence)
                self._append(make_batch(bodies, topic=topic, queue_id=queue_id, producer=producer))

    def _next_sequence(self, key: tuple[str, int], count: int) -> int:
        """Return the producer's sequence number for the first of the next `count` messages of a queue. If the topic is
        deleted and created again, the numbers continue."""
        first = self._sequences.get(key, 0)
        self._sequences[key] = first + count
        return first

    def _body(self) -> bytes:
        self._number += 1
        return b"%d " % self._number + bytes(self._dice.randrange(self._size))

    def _encoded(self, message: Message, queue_id: int, *, waiting: WaitingBatch) -> EncodedBatch:
        return encode_batch(
            [message], queue_id, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=["0"], waiting=waiting
        )

    def _append(self, batch: EncodedBatch) -> None:
        self.store.append([batch])


def copied(store: MessageStore, root: Path, dice: random.Random) -> MessageStore:
    """Return a slave store that has copied the master's whole log in chunks."""
    target = open_store(root, **SETTINGS)
    if store.log.min_offset:
        target.chunks.begin_at(store.log.min_offset)
    while data := store.chunks.read_chunk(target.log.end_offset, dice.choice((500, 5000))):
        target.chunks.append_chunk(target.log.end_offset, data)
    return target


def lose_some(dice: random.Random, root: Path, *, crashed: bool) -> bool:
    """Delete random store files that recovery can rebuild or does not need. Returns True if the list of deleted topics
    was deleted. Without this list, recovery may restore deleted topics from the log."""
    if crashed:
        (root / "abort").write_text("1")
    for name in ("dedup", "checkpoint"):
        if dice.random() < 0.5:
            (root / name).unlink(missing_ok=True)
    queues = sorted((root / "consumequeue").glob("*/*")) + sorted((root / "batchconsumequeue").glob("*/*"))
    # After a clean stop, do not delete queue files: the store would treat a topic without queue files as a topic that
    # RocketMQ deleted.
    kind = dice.randrange(5) if crashed else None
    if kind == 0:
        shutil.rmtree(root / "consumequeue", ignore_errors=True)
    elif kind == 1 and queues:
        for queue in dice.sample(queues, dice.randrange(1, len(queues) + 1)):
            shutil.rmtree(queue)
    elif kind == 2:
        for queue in queues:  # remove the last file of each queue, as a power cut may
            if files := sorted(queue.iterdir()):  # the directory of a queue without messages may be empty
                files[-1].unlink()
    if dice.random() < 0.15:
        for path in (root / "config").glob("*eleted*"):
            path.unlink()
        return True
    return False


def bodies_in(store: MessageStore) -> Bodies:
    """Return the record bytes at each offset of each queue."""
    found: Bodies = {}
    for queue in store._parts.queues.plain:
        for offset in range(queue.min_offset, queue.next_offset):
            for unit in queue.next_unit(offset, offset + 1).tolist():
                data = bytes(store._parts.reader.log_bytes(unit[0], unit[0] + unit[1]))
                found.setdefault(queue.key, {})[offset] = data
    return found


def check_one(seed: int, root: Path) -> None:
    dice, text = random.Random(seed), f"seed {seed}; RAYMQ_PLACES_SEED repeats it"
    writer = Writer(dice, root / "master")
    writer.work()
    store, name = writer.store, "master"
    if dice.random() < 0.3:
        store, name = copied(writer.store, root / "slave", dice), "slave"
    expected = bodies_in(store)
    for turn in range(2):
        crashed = dice.random() < 0.6
        if crashed:
            killed_copy(root / name, root / f"killed{turn}")
        store.close()
        name = f"killed{turn}" if crashed else name
        come_back = lose_some(dice, root / name, crashed=crashed)
        store = open_store(root / name, **SETTINGS)
        assert store.mender.holes == (), text
        found = bodies_in(store)
        if come_back:
            break
        lost = {key: rows for key, rows in expected.items() if not rows.items() <= found.get(key, {}).items()}
        assert lost == {}, text
        store.append([make_batch([b"next"], topic=key[0], queue_id=key[1]) for key in QUEUES])
        expected = bodies_in(store)
    store.close()
    writer.store.close()


def seeds(count: int) -> list[int]:
    if ONE_SEED:
        return [int(ONE_SEED)]
    dice = random.SystemRandom()
    return [dice.getrandbits(32) for _ in range(count)]


@pytest.mark.parametrize("part", range(4))
def test_every_record_of_an_intact_log_keeps_its_place(
    part: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovery changes no queue offset of an intact log. In half of the cases, recovery reads and compares the log in
    small blocks, each with only a few records."""
    if part % 2:
        monkeypatch.setattr(storage.recovery.changed_places, "SURVEY_BYTES", 5000)
        monkeypatch.setattr(storage.recovery.walk, "SURVEY_BYTES", 5000)
        monkeypatch.setattr(storage.dispatch.record_blocks, "BLOCK_BYTES", 1000)
        monkeypatch.setattr(storage.recovery.log_files, "BLOCK_BYTES", 1000)
    for seed in seeds(SEEDS // 4):
        print("seed", seed)
        check_one(seed, directory / "stores")
        shutil.rmtree(directory / "stores")


@pytest.mark.parametrize("part", range(2))
def test_every_record_of_a_log_that_rocketmq_may_have_written_keeps_its_place(part: int, directory: Path) -> None:
    """Every record keeps its queue offset in a log that RocketMQ wrote. RocketMQ does not record the deletion of a
    topic, so the log may contain records of deleted topics."""
    for seed in seeds(SEEDS):
        print("seed", seed)
        dice, root = random.Random(seed), directory / "store"
        log = Log(dice)
        log.oddity, log.disorder = 0.0, 0.0
        for _ in range(dice.randrange(1, 4)):
            log.write(dice.choice((1, 3, 30, 100)))
            if dice.random() < 0.5:
                log.delete(dice.choice(log.topics))
        log.put(root)
        for _ in range(2):
            settings = SETTINGS | {"mapped_file_size_commit_log_bytes": FILE_BYTES}
            store = open_store(root, **settings)
            # Some records of the random log have queue offsets that no store would write, so recovery may report them.
            # This test only checks that recovery does not report the queue or queue offset of a record as changed by
            # damage.
            reasons = [hole.reason for hole in store.mender.holes if hole.reason.startswith(PLACE_REASON)]
            assert reasons == [], f"seed {seed}; RAYMQ_PLACES_SEED repeats it"
            store.close()
            lose_some(dice, root, crashed=dice.random() < 0.7)
            if dice.random() < 0.3 and len(list((root / "commitlog").iterdir())) > 1:
                min((root / "commitlog").iterdir()).unlink()
        shutil.rmtree(root)
