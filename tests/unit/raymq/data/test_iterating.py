"""Tests of the plans that iter_topic makes: the offset range of each dataset, and the time of the next check for
messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import ClientStateError, DataLossError, IllegalNameError, InvalidArgumentError
from raymq.common.message import ConsumeFromWhere, MessageQueue
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset, StartOffsetQuery
from raymq.data import iterating
from raymq.data.iterating import BatchProgress, iter_topic, plans
from tests.unit.raymq.data.fake_source import FakeSource

A0, A1 = MessageQueue("orders", "broker-a", 0), MessageQueue("orders", "broker-a", 1)
BEGIN = StartOffsetQuery(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
END = StartOffsetQuery(ConsumeFromWhere.CONSUME_FROM_END)


class FakeOffsets:
    """Fake brokers with a group's committed offsets. `fenced`: queues that a group member holds, so that the brokers
    refuse commits for them."""

    def __init__(self, group: str) -> None:
        self.committed: dict[MessageQueue, int] = {}
        self.groups: list[str] = []
        self.fenced: frozenset[MessageQueue] = frozenset()
        self.versions: dict[MessageQueue, int] = {}
        self.ends: dict[MessageQueue, tuple[int, int]] = {}
        """The minimum offset and the end offset of each queue in this fake. A group without committed offsets starts at
        the end offset if its setting is CONSUME_FROM_END."""

    def ensure_group(self, broker_name: str) -> None:
        self.groups.append(broker_name)

    def start_offsets(self, generations: dict[MessageQueue, int], query: StartOffsetQuery) -> dict[Any, QueueOffset]:
        assert query in (BEGIN, END)
        assert set(generations.values()) == {0}
        assert self.groups
        starts = {queue: self.ends[queue][1] if query == END else 0 for queue in generations}
        return {
            queue: QueueOffset(self.committed.get(queue, start), self.versions.get(queue, 0))
            for queue, start in starts.items()
        }

    def commit_offsets(self, commits: dict[MessageQueue, OffsetCommit]) -> CommitAnswer:
        for queue, commit in commits.items():
            assert commit.queue_offset is not None
            if queue not in self.fenced and commit.reset_version == self.versions.get(queue, 0):
                self.committed[queue] = commit.queue_offset
        return CommitAnswer(fenced=self.fenced & commits.keys())


class Clock:
    """Fake clock that only sleeping advances. `on_sleep` is called with each pause."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []
        self.on_sleep: Any = lambda: None

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 3))
        self.now_s += seconds
        self.on_sleep()


@pytest.fixture
def offsets(monkeypatch: pytest.MonkeyPatch) -> FakeOffsets:
    fake = FakeOffsets("g")
    monkeypatch.setattr(iterating, "GroupOffsets", lambda group: fake)
    return fake


def planned(source: FakeSource, progress: BatchProgress, clock: Clock, **options: Any) -> Iterator[list[OffsetRange]]:
    merged = {"interval_s": 2.0, "max_rows": None, "lenient": False, **options}
    return plans(source, progress, ["orders"], sleep=clock.sleep, clock=clock, **merged)


def spans(ranges: Sequence[OffsetRange]) -> dict[int, tuple[int, int]]:
    return {one.queue_id: (one.start_offset, one.end_offset) for one in ranges}


def test_each_dataset_begins_where_the_last_one_was_committed(offsets: FakeOffsets) -> None:
    source, clock = FakeSource({A0: (0, 100), A1: (0, 20)}), Clock()
    progress = BatchProgress("g", ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    looks = planned(source, progress, clock, max_rows=60)
    first = next(looks)
    assert (spans(first), clock.slept) == ({0: (0, 50), 1: (0, 10)}, [])
    progress.commit(first)
    assert spans(next(looks)) == {0: (50, 100), 1: (10, 20)}
    # The group has not committed the offsets of the previous dataset. So the next dataset contains the same offset
    # ranges again.
    assert spans(next(looks)) == {0: (50, 100), 1: (10, 20)}
    assert offsets.groups == ["broker-a"]
    assert clock.slept == [2.0, 2.0]


def test_without_messages_it_looks_again_after_the_interval(offsets: FakeOffsets) -> None:
    bounds = {A0: (0, 0)}
    source, clock = FakeSource(bounds), Clock()

    def come() -> None:
        if len(clock.slept) == 3:
            source._bounds[A0] = (0, 7)

    clock.on_sleep = come
    progress = BatchProgress("g", ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    assert spans(next(planned(source, progress, clock))) == {0: (0, 7)}
    assert clock.slept == [2.0, 2.0, 2.0]


def test_time_that_the_caller_took_counts_and_there_is_always_a_pause(offsets: FakeOffsets) -> None:
    source, clock = FakeSource({A0: (0, 5)}), Clock()
    progress = BatchProgress("g", ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    looks = planned(source, progress, clock)
    next(looks)
    clock.now_s += 1.5
    next(looks)
    clock.now_s += 60.0
    next(looks)
    assert clock.slept == [0.5]
    quick = planned(source, progress, clock, interval_s=0.0)
    next(quick)
    next(quick)
    assert clock.slept[1:] == [iterating.PAUSE_MIN_S]


def test_new_queues_are_read_from_the_next_dataset_on(offsets: FakeOffsets) -> None:
    source, clock = FakeSource({A0: (0, 5)}), Clock()
    progress = BatchProgress("g", ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    looks = planned(source, progress, clock)
    progress.commit(next(looks))
    source._bounds[A1] = (0, 3)
    assert spans(next(looks)) == {1: (0, 3)}


def test_a_group_that_starts_at_the_end_gets_each_message_sent_after_its_first_look(offsets: FakeOffsets) -> None:
    source, clock = FakeSource({A0: (0, 50)}), Clock()
    offsets.ends = source._bounds

    def send() -> None:
        source._bounds[A0] = (0, source._bounds[A0][1] + 4)

    clock.on_sleep = send
    progress = BatchProgress("g", iterating._WORDS["latest"])
    first = next(planned(source, progress, clock))
    assert spans(first) == {0: (50, 54)}
    send()
    # The program ended before it committed. Its next run begins at the same offset, not at the new end.
    assert spans(next(planned(source, BatchProgress("g", iterating._WORDS["latest"]), clock))) == {0: (50, 58)}


def test_a_reset_moves_the_next_dataset(offsets: FakeOffsets) -> None:
    source, clock = FakeSource({A0: (0, 50)}), Clock()
    progress = BatchProgress("g", ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    looks = planned(source, progress, clock)
    first = next(looks)
    offsets.committed[A0], offsets.versions[A0] = 20, 1
    progress.commit(first)  # the offsets were reset after this batch was planned, so its commit must change nothing
    assert spans(next(looks)) == {0: (20, 50)}


def test_offsets_that_are_gone_are_an_error_unless_it_is_lenient(offsets: FakeOffsets) -> None:
    source, clock = FakeSource({A0: (10, 50)}), Clock()
    progress = BatchProgress("g", ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    with pytest.raises(DataLossError):
        next(planned(source, progress, clock))
    assert spans(next(planned(source, progress, clock, lenient=True))) == {0: (10, 50)}


def test_a_group_whose_members_consume_is_refused(offsets: FakeOffsets) -> None:
    source, clock = FakeSource({A0: (0, 50)}), Clock()
    progress = BatchProgress("g", ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    ranges = next(planned(source, progress, clock))
    offsets.fenced = frozenset([A0])
    with pytest.raises(ClientStateError, match="members"):
        progress.commit(ranges)


@pytest.mark.parametrize(
    "options",
    [{"max_rows": 0}, {"interval_s": -1.0}, {"start_offset": "now"}, {"columns": ["body"]}, {"timeout_ms": 0}],
)
def test_options_that_make_no_sense_are_refused_by_the_call(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        iter_topic("g", "orders", **options)
    with pytest.raises(IllegalNameError):
        iter_topic("a group", "orders")
