"""The store beside a model of it: a list per queue. Append, repeat, delete, stop or kill: the two agree."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raymq.config import FlushDiskType
from raymq.hashing import tags_code
from raymq.message import PullStatus
from raymq.record import EncodedBatch, decode_records
from raymq.store_api import FetchRequest
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
        self.store = open_store(self.root, **self.changes)

    @property
    def root(self) -> Path:
        return self.directory / str(self.generation)

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
        killed_copy(self.root, self.directory / str(self.generation + 1))
        self.store.close()
        shutil.rmtree(self.root)
        self.generation += 1
        self.store = open_store(self.root, **self.changes)
        assert self.store.status().cut_bytes == 0

    @invariant()
    def every_queue_is_as_in_the_model(self) -> None:
        if hasattr(self, "store"):
            for queue, messages in self.model.items():
                assert bodies_of(self.store, *queue) == [body for body, _ in messages]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.directory)


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
