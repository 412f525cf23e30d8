"""Test of power losses: the power fails repeatedly while the store works, on a simulated disk that loses unflushed
data.

Each seed drives one store directory. Three times the store opens, works and loses the power at some disk call, perhaps
while it opens or closes. Afterwards the store is opened on a healthy disk. After each loss:

- messages that were acknowledged under SYNC_FLUSH or visible to a fetch keep their offsets; of all other messages, only
  the first ones are stored, without a gap
- no message is stored twice, and all are in order
- each tag finds its messages, configuration files hold the text written last, a deleted topic stays deleted
- messages that expire are removed from the beginning of the queues, and the new beginning survives
- batches whose outcome was unknown are sent again, and are stored once

The test runs 1,000 seeds; RAYMQ_SOAK=1 runs 20,000, and RAYMQ_POWER_SEED repeats one seed.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import pytest

import storage.checkpoint_service
import storage.log.warm_up
from raymq.common.config.store import FlushDiskType
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.decode import decode_records
from raymq.records.format.hashing import tags_code
from storage.message_store import MessageStore
from storage.retention import cleaner
from tests.support.cases import rounds
from tests.support.stores.clocks import let_pass
from tests.support.stores.power import LossyDisk
from tests.support.stores.stores import intact_bodies, make_batch, open_store

ONE_SEED = os.environ.get("RAYMQ_POWER_SEED")
SEEDS = rounds(1000, 20_000)
PARTS = 4
LIVES = 3
QUEUES = [("alpha", 0), ("alpha", 1), ("beta", 0)]
PASSING = ("passing", 0)
TAGS = ("red", "blue")

Queue = tuple[str, int]


def tag_of(sequence: int) -> str:
    return TAGS[sequence // 3 % 2]


@dataclass
class Expected:
    """The messages and the configuration that a store's clients expect in the store after a power loss. A message's
    sequence number is its queue offset, so a count of messages from the queue's start describes a set of messages.
    `gone`: the counts of expired messages."""

    stored: dict[Queue, int] = field(default_factory=lambda: dict.fromkeys(QUEUES, 0))
    recovered: dict[Queue, int] = field(default_factory=lambda: dict.fromkeys(QUEUES, 0))
    sent: dict[Queue, int] = field(default_factory=lambda: dict.fromkeys(QUEUES, 0))
    gone: dict[Queue, int] = field(default_factory=lambda: dict.fromkeys(QUEUES, 0))
    damaged: dict[Queue, set[int]] = field(default_factory=lambda: {queue: set() for queue in QUEUES})
    config: int = 0
    config_tried: int = 0
    passing: set[bytes] = field(default_factory=set)
    passing_recovered: set[bytes] = field(default_factory=set)
    passing_gone: set[bytes] = field(default_factory=set)


class Life:
    """One store directory, the steps that the test runs on it, and the content that its clients expect. One seed
    determines all steps."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.dice = random.Random(seed)
        self.directory = directory
        self.flush = FlushDiskType.SYNC_FLUSH if seed % 4 else FlushDiskType.ASYNC_FLUSH
        self.changes = {
            "flush_disk_type": self.flush,
            "mapped_file_size_commit_log_bytes": self.dice.choice((8192, 16384, 65536)),
            "mapped_file_size_consume_queue_bytes": self.dice.choice((400, 1000, 6000)),
            "flush_interval_consume_queue_ms": 60_000,
            "delete_file_batch_max": self.dice.choice((1, 2, 10)),
            "max_index_num": self.dice.choice((20, 400)),
        }
        self.log_disks = self.dice.choice((0, 0, 2, 3))
        if seed % 8 == 0:
            self.changes["transient_store_pool_enable"] = True
        self.now_ms = 1_700_000_000_000
        self.known = Expected()
        self.at_loss = dict.fromkeys(QUEUES, 0)
        self.gone_at_loss = dict.fromkeys(QUEUES, 0)
        self.config_at_loss = 0
        self.passing_at_loss: set[bytes] = set()
        self.passing_gone_at_loss: set[bytes] = set()
        self.serial = 0
        self.passing_places: dict[bytes, int] = {}
        self.deleting = self.deleting_at_loss = False
        self.store: MessageStore | None = None

    def run(self) -> None:
        root = self.directory / "0" / "store"
        root.parent.mkdir()
        for life in range(LIVES):
            following = self.directory / str(life + 1)
            following.mkdir()
            self.live_until_power_loss(root).write_image(following)
            shutil.rmtree(root.parent)
            root = following / "store"
        self.open_and_check(root)
        for _ in range(3):
            self.append()
        assert self.store is not None
        self.store.close()
        self.note()
        self.open_and_check(root)
        self.store.close()

    def live_until_power_loss(self, root: Path) -> LossyDisk:
        lose_at = self.dice.choice((self.dice.randrange(30), self.dice.randrange(100), self.dice.randrange(300)))
        disk = LossyDisk(root.parent, self.dice, lose_at=lose_at, on_loss=self.note)
        with disk.installed():
            self.open_and_check(root)
            steps = (
                [self.append] * 12 + [self.flush_queues] * 3 + [self.write_config, self.pass_by, self.repeat, self.age]
            )
            for _ in range(self.dice.randrange(60)):
                if disk.lost:
                    break
                self.dice.choice(steps)()
            if self.dice.random() < 0.5:
                disk.lose_now()
            assert self.store is not None
            self.store.close()
            disk.lose_now()
            self.store = None
        return disk

    def note(self) -> None:
        """Record which messages must survive if the power fails now: all acknowledged messages, and all messages that a
        fetch could return."""
        known, store = self.known, self.store
        if store is None:
            # The store is opening now. A power loss during the opening must not lose any of the messages that had to
            # survive before. So leave the earlier list of these messages unchanged.
            return
        self.config_at_loss = known.config
        self.deleting_at_loss = self.deleting
        self.passing_gone_at_loss = set(known.passing_gone)
        self.gone_at_loss = {queue: self.min_offset(store, queue) for queue in QUEUES}
        self.passing_at_loss = set(known.passing if self.flush is FlushDiskType.SYNC_FLUSH else known.passing_recovered)
        self.passing_at_loss -= self.aged(store)
        if self.flush is FlushDiskType.ASYNC_FLUSH:
            self.at_loss = dict(known.recovered)
            return
        self.at_loss = dict(known.stored)
        for queue in QUEUES:
            # Read the queues from the store's private field `_parts`, because a store that is closing refuses calls.
            found = store._parts.queues.get(*queue)
            if found is not None:
                self.at_loss[queue] = max(self.at_loss[queue], found.visible_offset)

    def open_and_check(self, root: Path) -> None:
        self.store = None
        at_least = self.at_loss
        logs = tuple(root.parent / f"disk-{number}" for number in range(self.log_disks))
        store = open_store(root, clock_ms=self.clock_ms, store_path_commit_log=logs, **self.changes)
        for queue, least in at_least.items():
            first, end = self.check_queue(store, queue, least)
            assert end >= least, f"{queue}: {least} were safe, {end} are there"
            assert end <= self.known.sent[queue]
            assert first <= self.gone_at_loss[queue], f"{queue}: {self.gone_at_loss[queue]} went by age, not {first}"
            # Recovery has flushed the messages that it found, and has made them visible.
            self.known.stored[queue] = self.known.recovered[queue] = end
            self.known.gone[queue] = first
        text = store.read_config("topics.json")
        config = int(text.split()[1]) if text else 0
        assert self.config_at_loss <= config <= self.known.config_tried, f"{self.config_at_loss} was safe, not {config}"
        self.known.config = config
        passing = {body for body in intact_bodies(store, *PASSING) if body is not None}
        assert not passing & self.passing_gone_at_loss, "a deleted topic is back"
        assert passing >= self.passing_at_loss or self.deleting_at_loss, "a topic is gone that was not deleted"
        self.known.passing, self.known.passing_gone = set(passing), set(self.passing_gone_at_loss)
        self.known.passing_recovered, self.deleting = set(passing), False
        self.store = store

    def check_queue(self, store: MessageStore, queue: Queue, least: int) -> tuple[int, int]:
        """Check that all messages of a queue are in order, and that a query by tag finds each message. Returns the
        queue's bounds.

        A power cut may destroy an unflushed record and spare a later record. Recovery then keeps the destroyed record
        as a damaged record. The power cut must not damage any message whose offset is below `least`.
        """
        bounds = store.queues.bounds(*queue)
        first, end = bounds.min_offset, bounds.max_offset
        bodies = intact_bodies(store, *queue)
        damaged = {first + index for index, body in enumerate(bodies) if body is None}
        torn = [index for index in damaged - self.known.damaged[queue] if index < least]
        assert torn == [], f"{queue}: {torn} were safe, and are damaged"
        self.known.damaged[queue] = damaged
        numbers = [None if body is None else body.split(b".")[0] for body in bodies]
        assert numbers == [None if index in damaged else b"%d" % index for index in range(first, end)], queue
        if damaged:
            self.check_tags_beside_damage(store, queue, [index for index in range(first, end) if index not in damaged])
        else:
            self.check_tags(store, queue, first, end)
        return first, end

    def min_offset(self, store: MessageStore, queue: Queue) -> int:
        """Return the first readable offset of a queue. Retention raises this offset before it deletes the first
        file."""
        found = store._parts.queues.get(*queue)
        return 0 if found is None else found.min_offset

    def check_tags(self, store: MessageStore, queue: Queue, first: int, end: int) -> None:
        for tag in TAGS:
            request = FetchRequest(*queue, first, 10_000, frozenset([tags_code(tag)]))
            [result] = store.fetch([request], max_bytes=1 << 24, wait_s=0)
            found = [message.queue_offset for message in decode_records(result.records)]
            assert found == [index for index in range(first, end) if tag_of(index) == tag], (queue, tag)

    def check_tags_beside_damage(self, store: MessageStore, queue: Queue, intact: list[int]) -> None:
        for index in intact:
            request = FetchRequest(*queue, index, 1, frozenset([tags_code(tag_of(index))]))
            [result] = store.fetch([request], max_bytes=1 << 24, wait_s=0)
            assert [message.queue_offset for message in decode_records(result.records)] == [index], queue

    def clock_ms(self) -> int:
        self.now_ms += self.dice.choice((0, 1, 500, 4000))
        return self.now_ms

    def batch(self, queue: Queue, first: int):
        """Return a batch whose first message has sequence number `first`. The tag of a message changes after every
        third sequence number. All messages of a batch have the same tag, so a batch ends before the tag changes."""
        count = min(self.dice.choice((1, 2, 3, 3)), 3 - first % 3)
        length = self.dice.choice((0, 10, 100, 700, 2500))
        bodies = [b"%d." % (first + index) + b"x" * self.dice.randint(length // 2, length) for index in range(count)]
        self.known.sent[queue] = max(self.known.sent[queue], first + count)
        return make_batch(
            bodies, topic=queue[0], queue_id=queue[1], tags=tag_of(first), producer=("{}-{}".format(*queue), 0, first)
        )

    def append(self) -> None:
        """Send the next messages of some random queues. After a power loss, the first of these messages are sent again,
        because it is unknown if they were stored before the power loss."""
        assert self.store is not None
        chosen = self.dice.sample(QUEUES, self.dice.choice((1, 1, 2, 3)))
        batches = [self.batch(queue, self.known.stored[queue]) for queue in chosen]
        results = self.store.append(batches)
        for queue, batch, result in zip(chosen, batches, results, strict=True):
            assert result.queue_offset == self.known.stored[queue]
            self.known.stored[queue] += len(batch)

    def repeat(self) -> None:
        """Resend the last message of a queue, and check that the store recognises it as a duplicate."""
        assert self.store is not None
        queue = self.dice.choice(QUEUES)
        first = self.known.stored[queue] - 1
        if first >= self.known.gone[queue] and first not in self.known.damaged[queue]:
            batch = make_batch(
                [b"%d." % first], topic=queue[0], queue_id=queue[1], producer=("{}-{}".format(*queue), 0, first)
            )
            [result] = self.store.append([batch])
            assert result.duplicate
            assert result.queue_offset == first

    def flush_queues(self) -> None:
        """Flush the consume queues, as the store's own thread does each second."""
        assert self.store is not None
        self.store._checkpoints.flush_queues()

    def age(self) -> None:
        """Delete old log files by retention, whatever messages they contain."""
        assert self.store is not None
        clean = self.store.cleaner
        clean._by_hand = 1
        let_pass(self.store)
        clean.run_once(datetime.now() + timedelta(hours=100))
        self.known.gone = {queue: self.min_offset(self.store, queue) for queue in QUEUES}
        self.known.passing -= self.aged(self.store)
        self.known.passing_recovered -= self.aged(self.store)

    def aged(self, store: MessageStore) -> set[bytes]:
        """Return the bodies of the messages in the short-lived topic whose log files retention has deleted."""
        return {body for body, place in self.passing_places.items() if place < store.log.min_offset}

    def write_config(self) -> None:
        assert self.store is not None
        self.known.config_tried += 1
        self.store.write_config("topics.json", f"[ {self.known.config_tried} ]" + " " * self.dice.choice((0, 900)))
        self.known.config = self.known.config_tried

    def pass_by(self) -> None:
        """Create or delete a short-lived topic."""
        assert self.store is not None
        known = self.known
        if self.dice.random() < 0.5:
            self.serial += 1
            [result] = self.store.append([make_batch([b"%d" % self.serial], topic=PASSING[0], queue_id=PASSING[1])])
            self.passing_places[b"%d" % self.serial] = result.physical_offset
            known.passing.add(b"%d" % self.serial)
        else:
            self.deleting = True
            self.store.topics.delete(PASSING[0])
            known.passing_gone |= known.passing
            known.passing.clear()
            known.passing_recovered.clear()
            self.deleting = False


@pytest.fixture
def workspace() -> Iterator[Path]:
    """Yield a temporary directory, in memory if possible. The simulated disk alone decides which data survives, so a
    real disk is not needed."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="raymq-power-", dir=base))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.timeout(rounds(600, 7200))
@pytest.mark.parametrize("part", range(1 if ONE_SEED else PARTS))
def test_a_power_loss_breaks_no_promise(part, workspace, monkeypatch):
    monkeypatch.setattr(storage.checkpoint_service, "STORE_SNAPSHOT_INTERVAL_BYTES", 5000)
    monkeypatch.setattr(cleaner, "DELETE_PAUSE_S", 0.0)
    # Make appends use prefaulted (warm) pages, even with small files and a slow writer.
    monkeypatch.setattr(storage.log.warm_up, "SEGMENT_BYTES", 4096)
    monkeypatch.setattr(storage.log.warm_up, "FAST_S", 60.0)
    seeds = [int(ONE_SEED)] if ONE_SEED else range(part, SEEDS, PARTS)
    for seed in seeds:
        directory = workspace / str(seed)
        directory.mkdir()
        life = Life(seed, directory)
        try:
            life.run()
        except Exception as error:
            raise AssertionError(f"RAYMQ_POWER_SEED={seed} ({life.flush.value}): {error!r}") from error
        finally:
            if life.store is not None:
                life.store.close()
        shutil.rmtree(directory)
    print(f"{len(seeds)} seeds, {LIVES} losses each")
