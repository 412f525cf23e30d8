"""A store with a topic in which every second message is unreadable, and an Admin for the store. A message is unreadable
because a bit of it is flipped, or because its compressed body is garbage or a decompression bomb."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from actors.replica.sole_replica import SoleReplica
from raymq.client.admin.admin import Admin
from raymq.common.errors import TopicNotExistError
from raymq.common.message import Message
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from raymq.common.protocol.store import Boundary, QueuePosition, RepairState
from raymq.records.format.encode import encode_batch
from storage.message_store import MessageStore
from tests.support.stores.damage import FIELDS, flip
from tests.support.stores.lying_bodies import lying_batch, lying_bodies
from tests.support.stores.stores import LOG_FILE_BYTES, open_store

TOPIC = "orders"
FILE_BYTES = 1 << 20
FIRST_MS = 1_700_000_000_000
STEP_MS = 1000
FLIPPED = tuple(field for field in FIELDS if field != "size")
"""Record fields in which bits are flipped. "size" is left out: a record in which only the size is wrong counts as
intact, because the store also has the size elsewhere."""


@dataclass(frozen=True, slots=True)
class DamagedTopic:
    """A topic with intact and unreadable messages in queue 0.

    `bodies`: the body at each offset, or None for an unreadable message. `kinds`: the kind of damage, by offset. Intact
    messages have the key "intact", messages with a flipped bit the key "flipped", and all messages the key "all".
    """

    store: MessageStore
    storage: SimpleNamespace
    routes: SimpleNamespace
    bodies: list[bytes | None]
    kinds: dict[int, str]

    @property
    def admin(self) -> Admin:
        """Return an Admin for the broker group of the damaged topic."""
        return Admin(self.routes, self.storages)  # type: ignore[arg-type]  # stand-ins

    @property
    def storages(self) -> Any:
        """Fake storage clients of the broker group: `get` returns the group's only storage actor for every
        name."""
        return SimpleNamespace(get=lambda name: self.storage)

    @property
    def readable(self) -> list[bytes]:
        """Return the bodies of the intact messages, in order."""
        return [body for body in self.bodies if body is not None]


class _Repairable(SoleReplica):
    """A master whose damaged ranges another replica may have intact."""

    def _may_be_mended(self, hole: Any) -> bool:
        return True


class ReportedStore:
    """The reports of damage to a master whose store is at `root`. At the second report, another replica's bytes repair
    the store.

    `flips`: the physical offset and the field of each flipped bit; a test may add entries. `positions`: the positions
    of each report. `replica`: the replica that answers the reports.
    """

    def __init__(
        self, store: MessageStore, root: Path, flips: Iterable[tuple[int, str]], *, file_size: int = LOG_FILE_BYTES
    ) -> None:
        self._store, self._root, self._file_size = store, root, file_size
        self.flips = list(flips)
        self.positions: list[list[QueuePosition]] = []
        self.replica: SoleReplica = _Repairable(store)

    def report_damage(self, positions: list[QueuePosition], timeout_s: float) -> list[RepairState]:
        states = self.replica.report_damage(positions)
        self.positions.append(list(positions))
        if len(self.positions) == 2:
            assert self._store.reported.settle(60.0)
            self._repair()
        return states

    def _repair(self) -> None:
        for place, field in self.flips:
            flip(self._root, place, field, file_size=self._file_size)
        log = b"".join(path.read_bytes() for path in sorted((self._root / "commitlog").iterdir()))
        for hole in self._store.mender.holes:
            self._store.mender.mend(hole.offset, log[hole.offset : hole.end_offset])


def repair_after_reports(damaged: DamagedTopic, root: Path) -> list[list[QueuePosition]]:
    """Let another replica repair the topic, whose store is at `root`, after its second report. Returns a list to which
    each report adds its positions."""
    queue = damaged.store._parts.queues.get_plain(TOPIC, 0)
    assert queue is not None
    places = {offset: int(queue.units(offset, 1)[0]["physical_offset"]) for offset in damaged.kinds}
    flips = [(places[offset], kind.removeprefix("flipped ")) for offset, kind in damaged.kinds.items()]
    reported = ReportedStore(damaged.store, root, flips, file_size=FILE_BYTES)
    damaged.storage.report_damage = reported.report_damage
    return reported.positions


@contextmanager
def damaged_topic(root: Path, *, lying: bool = True, flipped: tuple[str, ...] = FLIPPED) -> Iterator[DamagedTopic]:
    """Yield a damaged topic in a store at `root`. One message was stored per second."""
    times = iter(range(FIRST_MS, FIRST_MS + 10_000_000, STEP_MS))
    store = open_store(root, clock_ms=lambda: next(times), mapped_file_size_commit_log_bytes=FILE_BYTES)
    try:
        yield _filled(store, root, lying_bodies() if lying else {}, flipped)
    finally:
        store.close()


def _filled(
    store: MessageStore, root: Path, liars: dict[str, tuple[bytes, int]], flipped: tuple[str, ...]
) -> DamagedTopic:
    bodies: list[bytes | None] = []
    kinds: dict[int, str] = {}

    def put(key: str) -> int:
        body = b"intact %03d " % len(bodies) * 20
        bodies.append(body)
        batch = encode_batch([Message(TOPIC, body, keys=(key, "all"), tags="paid")], 0, born_host=("127.0.0.1", 1),
                             born_timestamp_ms=1, message_ids=[f"ID{len(bodies) - 1}"])  # fmt: skip
        return store.append([batch])[0].physical_offset

    for name, liar in liars.items():
        put("intact")
        kinds[len(bodies)] = name
        bodies.append(None)
        store.append([lying_batch([liar], tags="paid")])
    places = {}
    for field in flipped:
        put("intact")
        kinds[len(bodies)] = f"flipped {field}"
        places[field] = put("flipped")
        bodies[-1] = None
    put("intact")
    store.queries.by_key(TOPIC, "all")  # wait until the index has all messages
    for field, place in places.items():
        flip(root, place, field, file_size=FILE_BYTES)
    return DamagedTopic(store, _storage(store), one_broker_routes(), bodies, kinds)


def _storage(store: MessageStore) -> SimpleNamespace:
    """Return a stand-in for a StorageClient, with the calls that clients make to read messages. It passes the calls to
    the store in this process."""
    queries = store.queries
    return SimpleNamespace(
        fetch=lambda requests, max_bytes, wait_s, timeout_s: store.fetch(requests, max_bytes=max_bytes, wait_s=0),
        query_by_key=lambda topic, key, max_num, begin_ms, end_ms, timeout_s: queries.by_key(
            topic, key, max_num, begin_ms, end_ms
        ),
        query_by_unique_id=lambda topic, message_id, timeout_s: queries.by_unique_id(topic, message_id),
        record_at=lambda physical_offset, timeout_s: queries.by_physical_offset(physical_offset),
        offset_by_time=lambda topic, queue_id, time_ms, timeout_s, boundary=Boundary.LOWER: store.queues.offset_by_time(
            topic, queue_id, time_ms, boundary
        ),
        queue_bounds=lambda topic, queue_id, timeout_s: store.queues.bounds(topic, queue_id),
        bounds_of_queues=lambda queues, timeout_s: [store.queues.bounds(*queue) for queue in queues],
        next_sequences=lambda producer_id, epoch, queues, timeout_s: store.queues.next_sequences(
            producer_id, epoch, queues
        ),
        append=lambda batches, timeout_s: store.append(batches),
        report_damage=lambda positions, timeout_s: SoleReplica(store).report_damage(positions),
        reader=lambda: None,
    )


def one_broker_routes() -> SimpleNamespace:
    """Return routes of the damaged topic and of a topic for copies. Each topic has one queue in one broker
    group."""
    data = {"broker-a": BrokerData("c", "broker-a", {0: "storage-broker-a-0"})}
    routes = {name: TopicRoute(name, data, (QueueData("broker-a", 1, 1, 6),)) for name in (TOPIC, "copies")}

    def get(topic: str, timeout_s: float = 0.0) -> TopicRoute:
        if topic not in routes:
            raise TopicNotExistError(topic)
        return routes[topic]

    return SimpleNamespace(get=get, wait=get, invalidate=lambda topic: None)
