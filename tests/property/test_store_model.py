"""Tests of the store, compared with a model that is a list of messages per queue.

The test's rules append messages, repeat appends, fetch, delete topics, delete old files, stop or kill the store, cut
the power, and truncate the log. After each step the store and the model must agree.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raymq.common.config.store import FlushDiskType
from raymq.common.errors import RaymqError
from raymq.common.message import PullStatus
from raymq.common.protocol.store import AppendResult, FetchRequest
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.hashing import tags_code
from storage.replication.log_chunks import truncate_log
from storage.retention import cleaner
from tests.support.cases import examples
from tests.support.stores.clocks import let_pass
from tests.support.stores.damage import flip
from tests.support.stores.power import LossyDisk
from tests.support.stores.stores import bodies_of, intact_bodies, killed_copy, make_batch, open_store, small_settings

TOPICS = ["alpha", "beta"]
QUEUES = [(topic, queue_id) for topic in TOPICS for queue_id in (0, 1)]
TAGS = [None, "red", "blue"]

DETECTED = ("size", "magic", "physical offset", "body size", "body", "topic size")
"""Record fields in which recovery or a reader always detects damage."""

queues = st.sampled_from(QUEUES)
tags = st.sampled_from(TAGS)


class Stored(NamedTuple):
    """A message in the model, the test's own record of what the store must contain. The message's queue offset is its
    index in the model's list for the queue."""

    body: bytes
    tag: str | None
    physical_offset: int


def physical_offsets(batch: EncodedBatch, result: AppendResult) -> list[int]:
    if result.physical_offsets is not None:
        return list(result.physical_offsets)
    return (result.physical_offset + np.cumsum(batch.sizes) - batch.sizes).tolist()


class StoreAgainstModel(RuleBasedStateMachine):
    """Random operations on a store and on its model. Messages that retention deleted stay in the model.

    The store must return a message if its record is at or after the log's first byte. The store must never reuse an
    offset.
    """

    def __init__(self) -> None:
        super().__init__()
        self.no_pause = mock.patch.object(cleaner, "DELETE_PAUSE_S", 0.0)
        self.no_pause.start()
        self.directory = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.generation = 0
        self.model: dict[tuple[str, int], list[Stored]] = {queue: [] for queue in QUEUES}
        self.next_sequence = dict.fromkeys(QUEUES, 0)
        self.last_batch: dict[tuple[str, int], tuple[EncodedBatch, int]] = {}
        self.bodies: dict[tuple[str, int], list[bytes]] = {}
        self.log_start = 0
        self.counter = 0

    @initialize(flush=st.sampled_from(FlushDiskType), log_file_bytes=st.sampled_from([4096, 16384]))
    def start(self, flush: FlushDiskType, log_file_bytes: int) -> None:
        self.changes = {
            "flush_disk_type": flush,
            "mapped_file_size_commit_log_bytes": log_file_bytes,
            "mapped_file_size_consume_queue_bytes": 400,
        }
        self.sync = flush is FlushDiskType.SYNC_FLUSH
        self.power_on()

    def power_on(self) -> None:
        """Open the store on a fake disk that can lose all bytes that were not flushed."""
        self.root.parent.mkdir(exist_ok=True)
        dice = random.Random(self.generation)
        self.disk = LossyDisk(self.root.parent, dice, lose_at=-1, on_loss=lambda: None)
        self.plug = self.disk.installed()
        self.plug.__enter__()
        self.store = open_store(self.root, **self.changes)

    def power_off(self) -> None:
        """Close the store and remove the fake disk, as at the end of a process."""
        self.store.close()
        self.plug.__exit__(None, None, None)

    def go_on_with(self, prepare: Callable[[Path], None]) -> None:
        """Continue with a changed store directory: `prepare` makes a new directory from the present one. This method
        closes the store before, and opens it in the new directory afterwards."""
        old = self.root.parent
        self.generation += 1
        prepare(self.root)
        self.power_off()
        shutil.rmtree(old)
        self.power_on()

    @property
    def root(self) -> Path:
        return self.directory / str(self.generation) / "store"

    def batch(self, queue: tuple[str, int], lengths: list[int], tag: str | None) -> EncodedBatch:
        bodies = []
        for length in lengths:
            bodies.append(b"%d." % self.counter + b"x" * length)
            self.counter += 1
        self.bodies[queue] = bodies
        batch = make_batch(
            bodies, topic=queue[0], queue_id=queue[1], tags=tag, producer=("p", 0, self.next_sequence[queue])
        )
        self.next_sequence[queue] += len(bodies)
        return batch

    @rule(
        work=st.lists(
            st.tuples(queues, st.lists(st.integers(0, 900), min_size=1, max_size=12), tags),
            min_size=1, max_size=4, unique_by=lambda item: item[0],
        )
    )  # fmt: skip
    def append(self, work: list[tuple[tuple[str, int], list[int], str | None]]) -> None:
        before = {queue: len(self.model[queue]) for queue, _, _ in work}
        batches = [self.batch(*item) for item in work]
        results = self.store.append(batches)
        for (queue, _, tag), batch, result in zip(work, batches, results, strict=True):
            assert result.queue_offset == before[queue]
            assert not result.duplicate
            offsets = zip(self.bodies[queue], physical_offsets(batch, result), strict=True)
            self.model[queue] += [Stored(body, tag, offset) for body, offset in offsets]
            self.last_batch[queue] = batch, before[queue]

    # This rule has no Hypothesis precondition; it returns early instead. A precondition could depend on records that
    # the store's threads have written, and so have another value when Hypothesis repeats the example.
    @rule(queue=queues)
    def send_again(self, queue: tuple[str, int]) -> None:
        if queue not in self.last_batch:
            return
        batch, offset = self.last_batch[queue]
        [result] = self.store.append([batch])
        assert result.duplicate
        assert result.queue_offset == offset

    @rule(queue=queues, wanted=st.sampled_from(["red", "blue", "none of them"]), limit=st.integers(1, 40))
    def fetch_by_tag(self, queue: tuple[str, int], wanted: str, limit: int) -> None:
        expected = [message.body for message in self.readable(queue) if message.tag == wanted]
        found, offset = [], self.min_offset(queue)
        while True:
            request = FetchRequest(*queue, offset, limit, frozenset([tags_code(wanted)]))
            [result] = self.store.fetch([request], max_bytes=3000, wait_s=0)
            found += [message.body for message in decode_records(result.records)]
            if result.status is not PullStatus.FOUND:
                break
            assert 0 < result.count <= limit
            offset = result.next_offset
        assert found == expected

    @rule()
    def age_passes(self) -> None:
        """Let retention delete old log files, and check that only the messages in these files disappear."""
        starts = self.store.log.starts
        before = self.store.status().min_physical_offset
        clean = self.store.cleaner
        clean._by_hand = 1
        let_pass(self.store)
        deleted = clean.run_once(datetime.now() + timedelta(hours=100))
        self.log_start = self.store.status().min_physical_offset
        assert self.log_start == before + deleted * self.changes["mapped_file_size_commit_log_bytes"]
        assert self.store.log.starts == starts[deleted:]
        for queue, (_, offset) in list(self.last_batch.items()):
            if self.model[queue][offset].physical_offset < self.log_start:
                # The batch's log file was deleted. From now on, the store recognizes a repeat of the batch only as long
                # as a snapshot contains the batch. So the test must not repeat the batch.
                del self.last_batch[queue]

    @rule(queue=queues, back=st.integers(1, 100))
    def fetch_what_is_gone(self, queue: tuple[str, int], back: int) -> None:
        min_offset = self.min_offset(queue)
        for offset in (min_offset - back, len(self.model[queue]) + back):
            [result] = self.store.fetch([FetchRequest(*queue, offset, 10)], max_bytes=3000, wait_s=0)
            assert result.status is PullStatus.OFFSET_ILLEGAL
            assert result.next_offset == (min_offset if offset < min_offset else len(self.model[queue]))
            assert (result.min_offset, result.max_offset) == (min_offset, len(self.model[queue]))

    @rule(topic=st.sampled_from(TOPICS))
    def delete_topic(self, topic: str) -> None:
        self.store.topics.delete(topic)
        for queue in QUEUES:
            if queue[0] == topic:
                self.model[queue] = []
                self.last_batch.pop(queue, None)

    @rule()
    def stop_and_open(self) -> None:
        self.store.close()
        self.store = open_store(self.root, **self.changes)
        assert self.store.status().cut_bytes == 0

    @rule()
    def kill_and_open(self) -> None:
        """Open a copy of the store's directory in the state that SIGKILL leaves. The killed store never writes to the
        copy."""
        root = self.root
        self.go_on_with(lambda target: killed_copy(root, target) and None)
        assert self.store.status().cut_bytes == 0

    @rule()
    def lose_power_and_open(self) -> None:
        """Cut the power and open the store. With SYNC_FLUSH no message is lost; with ASYNC_FLUSH each queue keeps a
        prefix of its messages."""
        self.disk.lose_now()
        disk = self.disk

        def write(root: Path) -> None:
            root.parent.mkdir()
            disk.write_image(root.parent)

        self.go_on_with(write)
        if self.store.status().holes:
            # The store reports a damaged range (hole) if unflushed bytes were lost although later bytes are on disk.
            # Only ASYNC_FLUSH allows this.
            assert not self.sync
            self.check_what_is_left()
            self.begin_anew()
        elif not self.sync:
            self.forget_what_is_behind_the_end()

    def check_what_is_left(self) -> None:
        """After a loss of unflushed bytes, read each message of the model from the store, by its physical offset. If
        the store still has the message, it must equal the model's message."""
        for message in chain.from_iterable(self.model.values()):
            try:
                record = self.store.queries.by_physical_offset(message.physical_offset)
                [found] = decode_records(record, broker_name="broker-a")
            except RaymqError:
                continue
            assert found.body == message.body

    def begin_anew(self) -> None:
        """Replace the store and the model by empty ones."""
        self.model = {queue: [] for queue in QUEUES}
        self.last_batch.clear()
        self.log_start = 0
        self.go_on_with(lambda root: None)

    @rule(share=st.floats(0, 1))
    def cut_the_log_and_open(self, share: float) -> None:
        """Damage all bytes from a random record to the log's end. Each queue must keep its messages before that
        record."""
        end = self.store.status().max_physical_offset
        self.store.close()
        file_bytes = self.changes["mapped_file_size_commit_log_bytes"]
        # Recovery after a clean stop reads only the last log file, so the test damages only records in that file. If
        # the last file contains only records of a deleted topic, the test damages nothing.
        last = [offset for offset in self.offsets_left() if offset // file_bytes == (end - 1) // file_bytes]
        if last:
            offset = last[min(int(len(last) * share), len(last) - 1)]
            path = self.root / "commitlog" / f"{offset - offset % file_bytes:020d}"
            data = bytearray(path.read_bytes())
            damaged = slice(offset % file_bytes, (end - 1) % file_bytes + 1)
            data[damaged] = bytes(byte ^ 0xFF for byte in data[damaged])
            path.write_bytes(data)
        self.store = open_store(self.root, **self.changes)
        self.forget_what_is_behind_the_end()

    @rule(share=st.floats(0, 1))
    def truncate_the_log_and_open(self, share: float) -> None:
        """Truncate the log at a random record, as a replica does if its log is longer than its master's log."""
        end = self.store.status().max_physical_offset
        offsets = [*self.offsets_left(), end]
        self.store.close()
        truncate_log(
            small_settings(self.root, **self.changes), offsets[min(int(len(offsets) * share), len(offsets) - 1)]
        )
        self.store = open_store(self.root, **self.changes)
        assert self.store.status().cut_bytes == 0
        self.forget_what_is_behind_the_end()

    @rule(share=st.floats(0, 1), field=st.sampled_from(DETECTED), killed=st.booleans())
    def damage_one_record_and_mend_it(self, share: float, field: str, killed: bool) -> None:
        """Flip a bit of a record while the store is closed, and restore the bit later.

        While the bit is flipped, all other messages are readable, and the damaged message is correct or reported as
        damaged. After the bit is restored, all messages are readable.
        """
        offsets = self.offsets_left()
        if not offsets:
            return
        offset = offsets[min(int(len(offsets) * share), len(offsets) - 1)]
        if not killed:
            self.store.close()
        self.go_on_with_flipped(offset, field)
        self.forget_repeats(damaged=offset)
        if offset >= self.store.status().max_physical_offset:
            assert offset == offsets[-1], "only the last record may be taken for a torn one"
            self.forget_what_is_behind_the_end()
            return
        for queue in QUEUES:
            expected = self.readable(queue)
            found = intact_bodies(self.store, *queue)
            assert len(found) == len(expected)
            for body, message in zip(found, expected, strict=True):
                assert body == message.body or (body is None and message.physical_offset == offset)
        self.store.close()
        self.go_on_with_flipped(offset, field)
        self.forget_repeats()

    def go_on_with_flipped(self, offset: int, field: str) -> None:
        """Open a copy of the store's directory in which a bit of a record is flipped, and continue the test with the
        copy."""
        root, file_size = self.root, self.changes["mapped_file_size_commit_log_bytes"]
        self.go_on_with(lambda target: flip(killed_copy(root, target), offset, field, file_size=file_size))

    def offsets_left(self) -> list[int]:
        """Return the physical offsets of all messages that are still in the log, in ascending order."""
        return sorted(message.physical_offset for queue in QUEUES for message in self.readable(queue))

    def min_offset(self, queue: tuple[str, int]) -> int:
        return sum(message.physical_offset < self.log_start for message in self.model[queue])

    def readable(self, queue: tuple[str, int]) -> list[Stored]:
        return self.model[queue][self.min_offset(queue) :]

    def forget_what_is_behind_the_end(self) -> None:
        """Remove from the model the messages that the log has lost. First checks that each queue lost only messages
        after the log's end."""
        log_end = self.store.status().max_physical_offset
        for queue, messages in self.model.items():
            end = self.store.queues.bounds(*queue).max_offset
            assert end == sum(message.physical_offset < log_end for message in messages)
            if end < len(messages):
                del messages[end:]
                # Skip sequence numbers, as if the producer had given up some messages.
                self.next_sequence[queue] += 1000
        self.forget_repeats()

    def forget_repeats(self, damaged: int = -1) -> None:
        """Remove batches from `last_batch`, the batches that the test may send again. Without a usable snapshot, the
        store may not recognize their repeats.

        The removed batches lie outside of the last two files of the log (docs/design.md, "Repeats after damage"). A
        batch with a damaged record is removed, too, because the record's producer id may be unreadable.
        """
        known_from = min(self.store.log.starts[-2:], default=0)
        for queue, (batch, offset) in list(self.last_batch.items()):
            places = [message.physical_offset for message in self.model[queue][offset : offset + len(batch)]]
            if len(places) < len(batch) or min(places) < known_from or damaged in places:
                del self.last_batch[queue]

    @invariant()
    def every_queue_is_as_in_the_model(self) -> None:
        if hasattr(self, "store"):
            # The log's first byte never moves forward by itself. It may move back after a power cut, because old log
            # files that retention deleted may exist again.
            log_start = self.store.status().min_physical_offset
            assert log_start <= self.log_start
            self.log_start = log_start
            for queue, messages in self.model.items():
                bounds = self.store.queues.bounds(*queue)
                assert (bounds.min_offset, bounds.max_offset) == (self.min_offset(queue), len(messages))
                assert bodies_of(self.store, *queue) == [message.body for message in self.readable(queue)]

    def teardown(self) -> None:
        self.no_pause.stop()
        if hasattr(self, "store"):
            self.power_off()
        shutil.rmtree(self.directory)


TestStoreAgainstModel = StoreAgainstModel.TestCase
# On a busy machine the Hypothesis examples take several minutes. The usual timeout would end the test, and the report
# would wrongly blame the last example.
TestStoreAgainstModel.pytestmark = [pytest.mark.timeout(1800)]
TestStoreAgainstModel.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
