"""The store beside a model of it: a list per queue. Append, repeat, fetch, delete, stop, kill, cut the power or the
log: the two agree."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raymq.config import FlushDiskType
from raymq.hashing import tags_code
from raymq.message import PullStatus
from raymq.record import EncodedBatch, decode_records
from raymq.store_api import FetchRequest
from tests.support.power import LossyDisk
from tests.support.stores import bodies_of, killed_copy, make_batch, open_store

TOPICS = ["alpha", "beta"]
QUEUES = [(topic, queue_id) for topic in TOPICS for queue_id in (0, 1)]
TAGS = [None, "red", "blue"]

queues = st.sampled_from(QUEUES)
tags = st.sampled_from(TAGS)


class StoreAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.generation = 0
        self.model: dict[tuple[str, int], list[tuple[bytes, str | None]]] = {queue: [] for queue in QUEUES}
        self.next_sequence = dict.fromkeys(QUEUES, 0)
        self.last_batch: dict[tuple[str, int], tuple[EncodedBatch, int]] = {}
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
        """Open the store on a disk that remembers what was flushed."""
        self.root.parent.mkdir(exist_ok=True)
        dice = random.Random(self.generation)
        self.disk = LossyDisk(self.root.parent, dice, lose_at=-1, on_loss=lambda: None)
        self.plug = self.disk.installed()
        self.plug.__enter__()
        self.store = open_store(self.root, **self.changes)

    def power_off(self) -> None:
        """End the process that has the store open."""
        self.store.close()
        self.plug.__exit__(None, None, None)

    def go_on_with(self, prepare: Callable[[Path], None]) -> None:
        """Leave the directory to what has it open, and open the one that `prepare` makes."""
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
        self.model[queue] += [(body, tag) for body in bodies]
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
        for (queue, _, _), batch, result in zip(work, batches, results, strict=True):
            assert result.queue_offset == before[queue]
            assert not result.duplicate
            self.last_batch[queue] = batch, before[queue]

    @precondition(lambda self: self.last_batch)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        queue = data.draw(st.sampled_from(sorted(self.last_batch)))
        batch, offset = self.last_batch[queue]
        [result] = self.store.append([batch])
        assert result.duplicate
        assert result.queue_offset == offset

    @rule(queue=queues, wanted=st.sampled_from(["red", "blue", "none of them"]), limit=st.integers(1, 40))
    def fetch_by_tag(self, queue: tuple[str, int], wanted: str, limit: int) -> None:
        expected = [body for body, tag in self.model[queue] if tag == wanted]
        found, offset = [], 0
        while True:
            request = FetchRequest(*queue, offset, limit, frozenset([tags_code(wanted)]))
            [result] = self.store.fetch([request], max_bytes=3000, wait_s=0)
            found += [message.body for message in decode_records(result.records)]
            if result.status is not PullStatus.FOUND:
                break
            assert 0 < result.count <= limit
            offset = result.next_offset
        assert found == expected

    @rule(topic=st.sampled_from(TOPICS))
    def delete_topic(self, topic: str) -> None:
        self.store.delete_topic(topic)
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
        """The directory as SIGKILL leaves it is opened; the process that was "killed" never writes to that one."""
        root = self.root
        self.go_on_with(lambda target: killed_copy(root, target) and None)
        assert self.store.status().cut_bytes == 0

    @rule()
    def lose_power_and_open(self) -> None:
        """With SYNC_FLUSH all is there. With ASYNC_FLUSH the log ends somewhere: of all queues what was sent first."""
        self.disk.lose_now()
        disk = self.disk

        def write(root: Path) -> None:
            root.parent.mkdir()
            disk.write_image(root.parent)

        self.go_on_with(write)
        if not self.sync:
            self.forget_what_is_behind_the_end()

    @rule(share=st.floats(0, 1))
    def cut_the_log_and_open(self, share: float) -> None:
        """The log's end is damaged from a record on: of each queue what was before it is left."""
        end = self.store.status().max_physical_offset
        self.store.close()
        units = sorted(
            int(unit["physical_offset"])
            for queue in QUEUES
            for unit in (self.store._queues.get(*queue).units(0, 10_000) if self.store._queues.get(*queue) else ())
        )
        file_bytes = self.changes["mapped_file_size_commit_log_bytes"]
        # Recovery after a clean stop looks at the last file only, which may hold a deleted topic's records alone.
        last = [offset for offset in units if offset // file_bytes == (end - 1) // file_bytes]
        if last:
            offset = last[min(int(len(last) * share), len(last) - 1)]
            path = self.root / "commitlog" / f"{offset - offset % file_bytes:020d}"
            data = bytearray(path.read_bytes())
            data[offset % file_bytes + 8 : offset % file_bytes + 12] = b"\xff" * 4  # the CRC: never negative
            path.write_bytes(data)
        self.store = open_store(self.root, **self.changes)
        self.forget_what_is_behind_the_end()

    def forget_what_is_behind_the_end(self) -> None:
        """The store holds a prefix of each queue, and it is a prefix of the log: take it over into the model."""
        # Files are so small here that the walk may not see a whole batch; a repeat of it is refused then, not stored.
        self.last_batch.clear()
        for queue, messages in self.model.items():
            end = self.store.queue_bounds(*queue).max_offset
            assert end <= len(messages)
            if end < len(messages):
                del messages[end:]
                self.next_sequence[queue] += 1000  # a producer that gave up

    @invariant()
    def every_queue_is_as_in_the_model(self) -> None:
        if hasattr(self, "store"):
            for queue, messages in self.model.items():
                assert bodies_of(self.store, *queue) == [body for body, _ in messages]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.power_off()
        shutil.rmtree(self.directory)


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
