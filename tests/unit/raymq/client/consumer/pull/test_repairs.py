"""Tests of pull consumers that meet damaged records while another replica has intact ones: the messages arrive intact,
at the same offsets and in order, by every kind of poll."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.replica.sole_replica import SoleReplica
from raymq.client.consumer import fetcher, repair_wait
from raymq.client.consumer.assignment import offset_committer
from raymq.client.consumer.pull import engine as pull_engine, settings as pull_settings
from raymq.client.consumer.pull.engine import PullEngine
from raymq.client.consumer.pull.settings import PullSettings
from raymq.common.errors import BodyUnreadableError
from raymq.common.message import MessageQueue
from tests.support.clients.fakes import WAIT_S, FakeRoutes, topic_route
from tests.support.clients.members import QuickClient
from tests.support.clients.twins import KINDS, LoopThread, make_twin
from tests.support.clients.watches import MappedStorage
from tests.support.group_sim.pull_group import Group
from tests.support.history.waiting import eventually
from tests.support.stores.damage import flip
from tests.support.stores.stores import make_batch, open_store

Q0, Q1 = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1)
COUNT = 60
BODIES = [b"%06d" % number + b"x" * 100 for number in range(COUNT)]
DAMAGED = {20: "body", 21: "magic", 33: "queue offset", 50: "body size"}


class _Mendable(SoleReplica):
    """A master whose damaged ranges another replica may have intact."""

    def _may_be_mended(self, hole: Any) -> bool:
        return True


class MendableStorage(MappedStorage):
    """The storage client of such a master. Its store has the messages BODIES in queue 0, and some are damaged."""

    def __init__(self, store: Any, root: Path) -> None:
        super().__init__(store)
        self._root = root
        queue = store._parts.queues.get_plain("orders", 0)
        self._places = [int(queue.units(offset, 1)[0]["physical_offset"]) for offset in range(COUNT)]
        self.reported: set[int] = set()
        self.is_mendable = True

    def report_damage(self, positions: Any, timeout_s: float) -> Any:
        self.reported |= {one.queue_offset for one in positions}
        return (_Mendable if self.is_mendable else SoleReplica)(self.store).report_damage(positions)

    def damage(self) -> None:
        for offset, field in DAMAGED.items():
            flip(self._root, self._places[offset], field)

    def mend(self) -> None:
        """Repair all damage, as a Replicator does with another replica's bytes."""
        eventually(lambda: self.store.mender.holes, "the inspection", WAIT_S)
        assert self.store.reported.settle(WAIT_S)
        self.damage()  # the second flip of each bit gives the intact bytes
        log = b"".join(path.read_bytes() for path in sorted((self._root / "commitlog").iterdir()))
        self.damage()
        for hole in self.store.mender.holes:
            self.store.mender.mend(hole.offset, log[hole.offset : hole.end_offset])


@pytest.fixture
def group(monkeypatch):
    group = Group()
    monkeypatch.setattr(pull_engine, "GroupOffsets", lambda name: group)
    monkeypatch.setattr(offset_committer, "RESET_QUERY_INTERVAL_S", 0.02)
    monkeypatch.setattr(fetcher, "FETCH_LONG_POLL_S", 0.02)
    short = {name: one._replace(low=0.0) for name, one in pull_settings.RANGES.items() if name.endswith("_s")}
    monkeypatch.setattr(pull_settings, "RANGES", pull_settings.RANGES | short)
    monkeypatch.setattr(repair_wait, "READ_REPAIR_WAIT_S", 3600.0)
    return group


@pytest.fixture(params=["here", "elsewhere"])
def storage(request, tmp_path, no_flushes):
    store = open_store(tmp_path / "store")
    store.append([make_batch(BODIES)])
    storage = MendableStorage(store, tmp_path / "store")
    storage.damage()
    if request.param == "elsewhere":
        storage.reader = lambda: None
    yield storage
    store.close()


@pytest.fixture
def loop():
    loop = LoopThread()
    yield loop
    loop.stop()


@pytest.fixture(params=KINDS)
def consumer(request, group, storage, loop, commits):
    engine = PullEngine(
        PullSettings.of("billing", auto_commit_interval_s=0.0),
        routes=FakeRoutes(topic_route(a=2)),
        storages=SimpleNamespace(get=lambda name: storage),
        rebalance=QuickClient(group.heartbeat),
        commits=commits,
        node_id="node-1",
        announce=lambda engine, data: None,
        on_close=lambda engine: None,
    )
    consumer = make_twin(request.param, engine, loop)
    consumer.engine = engine
    consumer.subscribe("orders", "*")
    yield consumer
    consumer.close()


def polled(consumer: Any) -> list[tuple[int, bytes | None]]:
    return [
        (message.queue_offset, None if message.body_error else message.body) for message in consumer.poll(timeout_s=0.2)
    ]


def polled_table(consumer: Any, **options: Any) -> list[tuple[int, bytes | None]]:
    table = consumer.poll_table(timeout_s=0.2, columns=["queue_offset", "body"], **options)
    return list(zip(table.column("queue_offset").to_pylist(), table.column("body").to_pylist(), strict=True))


def read(poll: Callable[[], list[tuple[int, bytes | None]]], count: int) -> list[bytes | None]:
    found: list[tuple[int, bytes | None]] = []
    eventually(lambda: found.extend(poll()) or len(found) >= count, "messages", WAIT_S)
    assert [offset for offset, _ in found] == list(range(found[0][0], found[0][0] + count))
    return [body for _, body in found]


@pytest.mark.parametrize("kind", ["poll", "poll_table", "raise"])
def test_all_messages_arrive_intact_after_the_repair(consumer, storage, kind):
    poll = {
        "poll": lambda: polled(consumer),
        "poll_table": lambda: polled_table(consumer),
        "raise": lambda: polled_table(consumer, unreadable="raise"),
    }[kind]
    assert read(poll, 20) == BODIES[:20]
    # The consumer waits at the first damaged message, and goes on reading another queue.
    assert poll() == []
    assert consumer.position(Q0) == 20
    storage.store.append([make_batch([b"other"], queue_id=1)])
    assert read(poll, 1) == [b"other"]
    eventually(lambda: storage.reported, "the report", WAIT_S)
    # The consumer reports the later damaged messages when it reads them, with the first at the latest.
    for offset in DAMAGED:
        storage.report_damage([SimpleNamespace(topic="orders", queue_id=0, queue_offset=offset)], 1.0)
    storage.mend()
    assert read(poll, 40) == BODIES[20:]
    assert consumer.engine.polls.unreadable.count == 0


def test_without_a_good_copy_each_damaged_message_has_an_error(consumer, storage):
    storage.is_mendable = False
    assert read(lambda: polled(consumer), COUNT) == [
        None if offset in DAMAGED else body for offset, body in enumerate(BODIES)
    ]
    assert consumer.engine.polls.unreadable.count == len(DAMAGED)


def test_an_error_is_raised_instead_of_a_table_without_a_good_copy(consumer, storage):
    storage.is_mendable = False

    def poll() -> list[tuple[int, bytes | None]]:
        return polled_table(consumer, unreadable="raise")

    assert read(poll, 20) == BODIES[:20]

    def error() -> BodyUnreadableError | None:
        try:
            poll()
        except BodyUnreadableError as raised:
            return raised
        return None

    assert eventually(error, "the error", WAIT_S).queue_offset == 20


def test_a_program_may_seek_past_a_message_that_waits_for_its_repair(consumer, storage):
    assert read(lambda: polled(consumer), 20) == BODIES[:20]
    consumer.seek(Q0, 22)
    assert read(lambda: polled(consumer), 11) == BODIES[22:33]
    storage.mend()
    consumer.seek(Q0, 20)
    assert [message.body for message in consumer.poll(2, timeout_s=WAIT_S)] == BODIES[20:22]


def test_the_wait_is_bounded(consumer, storage, monkeypatch):
    monkeypatch.setattr(repair_wait, "READ_REPAIR_WAIT_S", 0.0)
    assert read(lambda: polled(consumer), COUNT) == [
        None if offset in DAMAGED else body for offset, body in enumerate(BODIES)
    ]
