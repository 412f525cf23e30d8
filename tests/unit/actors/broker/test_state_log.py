"""Tests of a broker's state log when the master of its broker group changes. Reads work, unsafe writes are refused, and
no acknowledged change is lost.

The tests run with changes that the log's writer thread stores, and with changes that the thread of the broker's lane
(direct socket connection) stores directly.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from actors.broker import state_log as module, stored_state
from actors.broker.state_log import StateLog
from actors.broker.state_records import StoredRecords
from actors.core.broker.snapshot import GROUPS_FILE, OFFSETS_FILE, POSITION_FILE, TOPICS_FILE
from actors.core.broker.state import BrokerState, encode_change
from actors.core.replica.deleted_topics import CLOSED_TOPICS_FILE
from raymq.common.errors import (
    ClientStateError,
    MessageIllegalError,
    NotMasterError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    StoreCorruptError,
    SystemBusyError,
    TopicExistsError,
    TopicNotExistError,
)
from raymq.common.message import PullStatus
from raymq.common.names import STATE_TOPIC
from raymq.common.protocol.store import FetchResult, QueueBounds
from storage.retention.cleaner import HOLDS_FILE
from tests.support.history.waiting import eventually
from tests.support.stores.stores import make_batch

WAIT_S = 30.0


class Store:
    """Fake storage actor with config files and a log of state records.

    The last `hidden` records are not readable yet. While `away` is set, the actor does not answer. The actor refuses
    the methods named in `broken`.
    """

    def __init__(self, name: str) -> None:
        self.name, self.away, self.replaced = name, False, False
        self.broken: set[str] = set()
        self.asked: list[str] = []
        self.files: dict[str, str] = {}
        self.log: list[bytes] = []
        self.hidden = 0
        self.first = 0
        """The offset of the first state record that retention has kept."""
        self.damaged: set[str] = set()
        """Names of config files that cannot be used, in both copies."""
        self.on_fetch: Callable[[], None] = lambda: None

    def _answer(self, what: str) -> None:
        if self.away or what in self.broken:
            raise ServiceNotAvailableError(f"{self.name} is away")

    def control(self, method: str, *args: Any, timeout_s: float) -> Any:
        self._answer(method)
        self.asked.append(method)
        if self.replaced:
            raise NotMasterError("broker-a", 7)
        if method == "write_config":
            self._answer(args[0])
            self.damaged.discard(args[0])
            self.files[args[0]] = args[1]
            return None
        if method == "read_config" and args[0] in self.damaged:
            raise StoreCorruptError(f"file {args[0]} is damaged, and its second copy is damaged")
        return self.files.get(args[0]) if method == "read_config" else None

    @property
    def shown(self) -> int:
        return len(self.log) - self.hidden

    def queue_bounds(self, topic: str, queue_id: int, timeout_s: float) -> QueueBounds:
        self._answer("queue_bounds")
        return QueueBounds(self.first, self.shown, 0)

    def fetch(self, requests: Any, max_bytes: int, wait_s: float, timeout_s: float) -> list[FetchResult]:
        self._answer("fetch")
        [request] = requests
        bodies = self.log[request.queue_offset : self.shown]
        self.on_fetch()
        if not bodies:
            return [FetchResult(PullStatus.NO_NEW_MESSAGE, request.queue_offset, 0, self.shown, b"", 0)]
        records = bytes(make_batch(bodies, topic=STATE_TOPIC).records)
        return [FetchResult(PullStatus.FOUND, request.queue_offset + len(bodies), 0, self.shown, records, len(bodies))]


class Sender:
    """Fake sender that stores the state log's appends in `store`. The appends are durable if `durable` is set. If
    `outcome` is set, the sender raises this error once, after an append was stored."""

    def __init__(self, store: Store) -> None:
        self.store, self.durable = store, True
        self.outcome: Exception | None = None
        self.refused: dict[bytes, Exception] = {}
        self.before: Callable[[], None] = lambda: None
        self.writes: list[list[bytes]] = []

    def __call__(self, bodies: Sequence[bytes]) -> StoredRecords:
        self.before()
        for text, error in self.refused.items():
            if any(text in body for body in bodies):
                raise error
        self.writes.append(list(bodies))
        first = len(self.store.log)
        self.store.log += bodies
        if self.outcome is not None:
            outcome, self.outcome = self.outcome, None
            raise outcome
        return StoredRecords(first, first + len(bodies), self.durable)


class Sent:
    """A group of state records that was sent directly to the store, with the outcome of the send."""

    def __init__(self, outcome: StoredRecords | RaymqError) -> None:
        self.outcome = outcome
        self.stored = outcome if isinstance(outcome, StoredRecords) else None

    def finish(self) -> StoredRecords:
        if isinstance(self.outcome, StoredRecords):
            return self.outcome
        raise self.outcome


class Direct:
    """Fake direct path to the store: sends state records in order, from any thread. A separate thread delivers the
    store's answers."""

    is_own_thread = True

    def __init__(self, send: Sender) -> None:
        self._send = send
        self._answers = ThreadPoolExecutor(1)
        self._storage: Any = None
        self.sent = 0

    def connect(self, storage: Any) -> None:
        self._storage = storage

    def leads_to(self, storage: Any) -> bool:
        return self._storage is storage

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._answers.submit(callback)

    def send(self, storage: Any, bodies: Sequence[bytes], done: Callable[[Any], None]) -> bool:
        if self._storage is not storage:
            return False
        self.sent += 1
        self._answers.submit(self._store, bodies, done)
        return True

    def _store(self, bodies: Sequence[bytes], done: Callable[[Any], None]) -> None:
        try:
            outcome: StoredRecords | RaymqError = self._send(bodies)
        except RaymqError as error:
            outcome = error
        done(Sent(outcome))

    def close(self) -> None:
        self._answers.shutdown()


class Scene:
    """A state log with two fake stores. The first store leads at the start."""

    def __init__(self, *, direct: bool) -> None:
        self.first, self.second = Store("storage-broker-a-0"), Store("storage-broker-a-1")
        self.send = Sender(self.first)
        self.log = StateLog("broker-a", self.first, self.send, [self.second])  # type: ignore[arg-type,list-item]
        self.direct = Direct(self.send) if direct else None
        if self.direct is not None:
            self.log.write_by(self.direct)
        self.log.load()

    def close(self) -> None:
        self.log.close()
        if self.direct is not None:
            self.direct.close()

    def make_group(self, group: str) -> bool:
        return self.log.change(lambda state: state.decide_group(group))

    def fail_over(self) -> None:
        """Simulate a failover: the second store becomes the master. Its log has all records that were visible at the
        first store."""
        self.second.log = self.first.log[: self.first.shown]
        self.send.store = self.second
        self.log.move(self.second, [self.first])  # type: ignore[arg-type,list-item]

    def reloaded(self, store: Store) -> set[str]:
        """Return the groups that a newly started broker loads from `store`."""
        log = StateLog("broker-a", store, Sender(store))  # type: ignore[arg-type]
        log.load()
        return set(log.ready().groups)


@pytest.fixture(params=["writer", "direct"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(direct=request.param == "direct")
    yield scene
    scene.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class CallGate:
    """A function object whose calls block until the test opens the gate."""

    def __init__(self) -> None:
        self._entered, self._opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._entered.set()
        assert self._opened.wait(WAIT_S)

    def wait(self) -> None:
        assert self._entered.wait(WAIT_S)

    def open(self) -> None:
        self._opened.set()


def test_a_master_that_cannot_be_read_is_tried_once_so_that_another_may_be_asked_for(scene: Scene) -> None:
    assert scene.log.is_ready
    scene.second.away = True
    scene.fail_over()
    with pytest.raises(ServiceNotAvailableError):
        scene.log.load()
    assert not scene.log.is_ready
    assert "storage-broker-a-1 is away" in scene.log.waiting_for
    scene.second.away = False
    scene.log.load()
    assert scene.log.is_ready


def test_no_snapshot_of_the_old_masters_state_is_written_to_the_new_one_before_its_own_was_read(scene: Scene) -> None:
    scene.make_group("g")
    scene.fail_over()
    scene.log.snapshot()
    assert scene.second.files == {}


def test_a_change_does_not_hold_up_the_move_to_another_master_by_asking_the_old_one_again(scene: Scene) -> None:
    scene.first.replaced = True
    with pytest.raises(NotMasterError):
        scene.log.change(lambda state: state.decide_topic("orders", 1, 1))
    assert scene.first.asked.count("open_topics") == 1
    scene.fail_over()
    scene.log.load()
    assert "orders" not in scene.log.ready().topics


def test_a_change_that_waits_for_a_store_that_stands_still_ends_when_another_is_to_lead(
    scene: Scene, threads: ThreadPoolExecutor
) -> None:
    gate = CallGate()
    scene.first.broken.add("open_topics")
    answer = scene.first.control

    def control(method: str, *args: Any, timeout_s: float) -> Any:
        if method == "open_topics":
            gate()
        return answer(method, *args, timeout_s=timeout_s)

    scene.first.control = control  # type: ignore[method-assign]
    change = threads.submit(scene.make_group, "g")
    gate.wait()
    moved = threads.submit(scene.fail_over)
    assert scene.log._replaced.wait(WAIT_S)
    gate.open()
    moved.result(WAIT_S)
    with pytest.raises(ServiceNotAvailableError, match="is being replaced"):
        change.result(WAIT_S)


def test_a_change_during_a_move_is_decided_on_the_new_masters_state(scene: Scene, threads: ThreadPoolExecutor) -> None:
    """If a broker's state is changed while the master moves, the change waits until the broker has read the new
    master's records. Otherwise the state computed from these records would overwrite the change."""
    scene.make_group("before")
    sending, reading = CallGate(), CallGate()
    scene.send.before = sending
    under_way = threads.submit(scene.make_group, "underway")
    sending.wait()
    # Submit a second change while the first change is being written. The second change was computed from the state
    # before the first change, and must be stored only after the first write has ended.
    waiting = threads.submit(scene.log.change, lambda state: {"kind": "group", "group": "waiting"})
    scene.second.on_fetch = reading
    ready = scene.log._ready

    def move() -> None:
        scene.send.store, scene.second.log = scene.second, list(scene.first.log)
        scene.log.move(scene.second, [])  # type: ignore[arg-type]
        scene.log.load()

    moved = threads.submit(move)
    assert scene.log._replaced.wait(WAIT_S)
    scene.send.before = lambda: None
    sending.open()
    reading.wait()
    assert not ready.is_set()
    scene.second.on_fetch = lambda: None
    reading.open()
    done: list[Future[Any]] = [under_way, waiting, moved]
    for one in done:
        one.result(WAIT_S)
    assert {"before", "underway", "waiting"} <= set(scene.log.ready().groups)
    scene.log.snapshot()
    assert {"before", "underway", "waiting"} <= scene.reloaded(scene.second)


def test_a_change_whose_copies_are_late_is_answered_once_it_can_be_read(scene: Scene) -> None:
    scene.make_group("first")
    scene.send.durable = False
    scene.make_group("late")
    assert "late" in scene.log.ready().groups
    scene.fail_over()
    scene.log.load()
    assert "late" in scene.log.ready().groups


def test_a_change_that_has_no_copies_is_not_answered_nor_known(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_state, "CONFIRM_WAIT_S", 0.01)
    scene.make_group("first")
    shown = len(scene.first.log)
    scene.send.durable = False
    scene.send.before = lambda: setattr(scene.first, "hidden", 10**6)
    with pytest.raises(RequestTimeoutError):
        scene.make_group("alone")
    assert "alone" not in scene.log.ready().groups
    scene.first.hidden = len(scene.first.log) - shown
    scene.fail_over()
    scene.send.durable, scene.send.before = True, lambda: None
    scene.log.load()
    assert set(scene.log.ready().groups) == {"first"}


def test_a_change_of_unknown_outcome_that_is_stored_counts_for_the_next_one(scene: Scene) -> None:
    scene.log.change(lambda state: state.decide_topic("orders", 1, 1))
    scene.send.outcome = RequestTimeoutError("storage-broker-a-0", 20.0)
    with pytest.raises(RequestTimeoutError):
        scene.log.change(lambda state: state.decide_topic_delete("orders"))
    with pytest.raises(TopicNotExistError):
        scene.log.change(lambda state: state.decide_topic_delete("orders"))
    assert scene.log.change(lambda state: state.decide_topic("orders", 1, 1))
    scene.log.snapshot()
    log = StateLog("broker-a", scene.first, scene.send)  # type: ignore[arg-type]
    log.load()
    assert "orders" in log.ready().topics


def test_records_of_another_instance_are_applied(scene: Scene) -> None:
    scene.make_group("mine")
    scene.first.log.append(encode_change({"kind": "group", "group": "other"}))
    scene.make_group("next")
    scene.log.snapshot()
    assert {"mine", "other", "next"} <= set(scene.log.ready().groups)
    assert {"mine", "other", "next"} <= scene.reloaded(scene.first)


def test_a_log_that_cannot_be_read_to_its_end_is_no_state(scene: Scene) -> None:
    for group in ("a", "b"):
        scene.make_group(group)
    scene.fail_over()
    fetch = scene.second.fetch
    scene.second.fetch = lambda *args: [FetchResult(PullStatus.NO_NEW_MESSAGE, 0, 0, 0, b"", 0)]  # type: ignore[method-assign]
    with pytest.raises(ServiceNotAvailableError, match="serves the broker's state only up to offset 0"):
        scene.log.load()
    assert not scene.log.is_ready
    scene.second.fetch = fetch  # type: ignore[method-assign]
    scene.log.load()
    assert set(scene.log.ready().groups) == {"a", "b"}


@pytest.mark.parametrize("missed", [TOPICS_FILE, GROUPS_FILE])
def test_a_copy_that_misses_a_file_of_a_snapshot_does_not_get_its_position(scene: Scene, missed: str) -> None:
    scene.make_group("known")
    scene.log.snapshot()
    scene.make_group("later")
    scene.second.broken = {missed}
    scene.log.snapshot()
    scene.second.broken = set()
    scene.fail_over()
    scene.log.load()
    assert {"known", "later"} <= set(scene.log.ready().groups)
    assert "%RETRY%later" in scene.log.ready().topics


def test_a_snapshot_is_not_written_to_a_store_that_became_master_later(
    scene: Scene, threads: ThreadPoolExecutor
) -> None:
    scene.second.broken = {"write_config"}
    for group in ("a", "b"):
        scene.make_group(group)
    gate, answer = CallGate(), scene.first.control

    def control(method: str, *args: Any, timeout_s: float) -> Any:
        if args[0] == GROUPS_FILE:
            gate()
        return answer(method, *args, timeout_s=timeout_s)

    scene.first.control = control  # type: ignore[method-assign]
    written = threads.submit(scene.log.snapshot)
    gate.wait()
    scene.fail_over()
    gate.open()
    written.result(WAIT_S)
    assert scene.second.files == {}
    scene.second.broken = set()
    scene.log.load()
    assert set(scene.log.ready().groups) == {"a", "b"}


def test_retention_on_a_copy_keeps_records_that_its_snapshots_lack(scene: Scene) -> None:
    scene.second.broken = {"write_config"}
    scene.make_group("a")
    scene.log.snapshot()
    scene.second.broken = set()
    scene.make_group("b")
    scene.log.snapshot()
    # The second store has a first snapshot, but no previous one (no .bak copies), so no file yet limits its retention:
    # it keeps all state records.
    assert HOLDS_FILE not in scene.second.files
    position = json.loads(scene.second.files[POSITION_FILE])["queueOffset"]
    scene.make_group("c")
    scene.log.snapshot()
    assert json.loads(scene.second.files[HOLDS_FILE]) == {STATE_TOPIC: {"0": position}}


def held(storage: Any) -> int:
    """Return the log position of the oldest state record that retention must keep in a store."""
    return int(json.loads(storage.files[HOLDS_FILE])[STATE_TOPIC]["0"])


def test_retention_may_delete_all_records_once_nothing_changes_any_more(scene: Scene) -> None:
    scene.make_group("a")
    for _ in range(2):
        scene.log.snapshot()
    end = len(scene.first.log)
    assert [held(scene.first), held(scene.second)] == [end, end]
    writes = scene.first.asked.count("write_config")
    scene.log.snapshot()
    assert scene.first.asked.count("write_config") == writes


def test_a_copy_that_missed_the_last_snapshots_gets_them_without_another_change(scene: Scene) -> None:
    scene.make_group("a")
    scene.second.broken = {"write_config"}
    for _ in range(3):
        scene.log.snapshot()
    scene.second.broken = set()
    for _ in range(2):
        scene.log.snapshot()
    assert held(scene.second) == len(scene.first.log)
    assert scene.reloaded(scene.second) == {"a"}


def test_a_new_copy_gets_the_snapshot_without_another_change(scene: Scene) -> None:
    scene.make_group("a")
    for _ in range(2):
        scene.log.snapshot()
    scene.second.files.clear()
    scene.log.change_copies([scene.second])
    for _ in range(2):
        scene.log.snapshot()
    assert scene.reloaded(scene.second) == {"a"}
    writes = scene.second.asked.count("write_config")
    scene.log.snapshot()
    assert scene.second.asked.count("write_config") == writes


def test_a_restarted_broker_still_frees_records_in_its_snapshots(scene: Scene) -> None:
    scene.make_group("a")
    scene.log.snapshot()
    log = StateLog("broker-a", scene.first, scene.send)  # type: ignore[arg-type]
    log.load()
    log.snapshot()
    assert held(scene.first) == len(scene.first.log)


def test_records_after_a_lost_log_end_do_not_count_as_in_the_snapshot(scene: Scene) -> None:
    for group in ("a", "b", "c"):
        scene.make_group(group)
    scene.log.snapshot()
    del scene.first.log[1:]
    log = StateLog("broker-a", scene.first, scene.send)  # type: ignore[arg-type]
    log.load()
    assert set(log.ready().groups) == {"a", "b", "c"}
    log.change(lambda state: state.decide_group("d"))
    assert scene.reloaded(scene.first) == {"a", "b", "c", "d"}


@pytest.mark.parametrize("lost", ["missing", "damaged"])
@pytest.mark.parametrize("name", [TOPICS_FILE, GROUPS_FILE, OFFSETS_FILE, POSITION_FILE])
def test_a_snapshot_without_a_file_is_read_from_another_replica(scene: Scene, name: str, lost: str) -> None:
    for group in ("a", "b", "c"):
        scene.make_group(group)
    scene.log.snapshot()
    scene.first.first = 2  # retention has deleted the first records
    if lost == "missing":
        del scene.first.files[name]
    else:
        scene.first.damaged.add(name)
    log = StateLog("broker-a", scene.first, scene.send, [scene.second])  # type: ignore[arg-type,list-item]
    log.load()
    assert set(log.ready().groups) == {"a", "b", "c"}
    assert scene.first.files[name] == scene.second.files[name]
    assert scene.reloaded(scene.first) == {"a", "b", "c"}


@pytest.mark.parametrize("lost", ["missing", "damaged"])
def test_a_snapshot_without_a_file_is_refused_if_no_replica_has_it_and_nothing_is_changed(
    scene: Scene, lost: str
) -> None:
    for group in ("a", "b", "c"):
        scene.make_group(group)
    scene.log.snapshot()
    scene.first.first = 2
    scene.second.files.clear()
    if lost == "missing":
        del scene.first.files[GROUPS_FILE]
    else:
        scene.first.damaged.add(GROUPS_FILE)
    before = dict(scene.first.files)
    log = StateLog("broker-a", scene.first, scene.send, [scene.second])  # type: ignore[arg-type,list-item]
    with pytest.raises(StoreCorruptError, match=r"no other replica has them, .* Restore these files"):
        log.load()
    assert not log.is_ready
    assert scene.first.files == before
    assert "Restore these files" in log.waiting_for


def test_a_lost_snapshot_is_rebuilt_from_the_log_while_the_log_has_all_records(scene: Scene) -> None:
    for group in ("a", "b", "c"):
        scene.make_group(group)
    scene.log.snapshot()
    scene.first.files.clear()
    assert scene.reloaded(scene.first) == {"a", "b", "c"}


def test_nothing_is_changed_before_the_new_master_has_agreed(scene: Scene) -> None:
    scene.fail_over()

    def refuse(state: Any) -> None:
        raise ServiceNotAvailableError("storage-broker-a-1 is away")

    with pytest.raises(ServiceNotAvailableError):
        scene.log.load(refuse)
    assert not scene.log.is_ready


# Tests of state changes that arrive while another change is being stored


def submitted(scene: Scene, *decides: Callable[[BrokerState], Any]) -> list[Future[bool]]:
    """Submit state changes while another change is being stored, and wait until they have completed. Returns the
    futures of the submitted changes."""
    gate = CallGate()
    scene.send.before = gate
    first = scene.log.submit(lambda state: state.decide_group("first"))
    gate.wait()
    futures = [scene.log.submit(decide) for decide in decides]
    scene.send.before = lambda: None
    gate.open()
    first.result(WAIT_S)
    for future in futures:
        future.exception(WAIT_S)
    return futures


def connected(scene: Scene) -> Direct:
    """Make a first change, and return the direct path over which the state log sends later changes to the first store.
    The state log begins to use this path only after a first change."""
    direct = scene.direct
    assert direct is not None
    scene.make_group("before")
    idle(scene)
    assert direct.leads_to(scene.first)
    return direct


def idle(scene: Scene) -> None:
    """Wait until the state log writes nothing. A change completes slightly before its write ends."""
    eventually(lambda: not scene.log._writing, "the write to end", WAIT_S)


@pytest.mark.parametrize("scene", ["direct"], indirect=True)
def test_a_change_is_stored_directly_and_not_by_the_writer(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = connected(scene)
    monkeypatch.delattr(StateLog, "_write")
    sent = direct.sent
    for index in range(10):
        idle(scene)
        scene.log.change(group_only(f"g{index}"))
    assert direct.sent == sent + 10
    assert {f"g{index}" for index in range(10)} <= scene.reloaded(scene.first)


@pytest.mark.parametrize("scene", ["direct"], indirect=True)
def test_changes_during_a_write_are_stored_directly_after_the_write(scene: Scene) -> None:
    direct = connected(scene)
    sent = direct.sent
    # `submitted` submits these two changes while the writer thread still stores an earlier change, which opens a topic
    # at the store.
    submitted(scene, group_only("h"), group_only("i"))
    assert direct.sent == sent + 1
    assert {"h", "i"} <= scene.reloaded(scene.first)


@pytest.mark.parametrize("scene", ["direct"], indirect=True)
def test_a_direct_write_that_fails_is_followed_by_a_mark_of_the_writer(scene: Scene) -> None:
    direct = connected(scene)
    scene.send.outcome = RequestTimeoutError("storage-broker-a-0", 20.0)
    with pytest.raises(RequestTimeoutError):
        scene.make_group("g")
    idle(scene)
    sent = direct.sent
    assert scene.make_group("h")
    assert direct.sent == sent
    assert b"mark" in scene.send.writes[-2][0]
    assert {"g", "h"} <= set(scene.log.ready().groups)


@pytest.mark.parametrize("scene", ["direct"], indirect=True)
def test_another_master_is_not_written_to_before_it_is_read_nor_over_the_old_ones_way(scene: Scene) -> None:
    direct = connected(scene)
    scene.fail_over()
    change = scene.log.submit(group("g"))
    assert not change.done()
    scene.log.load()
    assert change.result(WAIT_S)
    assert "g" in scene.reloaded(scene.second)
    assert "g" not in scene.reloaded(scene.first)
    idle(scene)
    assert direct.leads_to(scene.second)


def group_only(name: str) -> Callable[[BrokerState], Any]:
    """Return a state change that creates only a group. For such a change the broker need not open a topic at a store
    with several replicas."""
    return lambda state: {"kind": "group", "group": name}


def group(name: str) -> Callable[[BrokerState], Any]:
    return lambda state: state.decide_group(name)


def test_changes_that_came_while_another_was_stored_go_together_in_one_write(scene: Scene) -> None:
    scene.make_group("before")
    written = len(scene.send.writes)
    submitted(scene, *(group(f"g{index}") for index in range(100)))
    assert [len(write) for write in scene.send.writes[written:]] == [2, 200]
    assert {f"g{index}" for index in range(100)} <= scene.reloaded(scene.first)


def test_a_change_is_decided_on_the_state_with_earlier_changes_in_flight(scene: Scene) -> None:
    def topic(nums: int) -> Callable[[BrokerState], Any]:
        return lambda state: state.decide_topic("orders", nums, nums)

    made, other, same, gone = submitted(
        scene, topic(4), topic(8), topic(4), lambda state: state.decide_topic_delete("orders")
    )
    assert made.result()
    assert isinstance(other.exception(), TopicExistsError)
    assert not same.result()
    assert gone.result()
    assert "orders" not in scene.log.ready().topics


def test_a_change_that_is_being_stored_is_neither_visible_nor_answered(scene: Scene) -> None:
    gate = CallGate()
    scene.make_group("before")
    scene.send.before = gate
    made = scene.log.submit(group("g"))
    gate.wait()
    # A second request for the same group completes only after the change of the first request is stored.
    again = scene.log.submit(group("g"))
    assert "g" not in scene.log.ready().groups
    assert scene.log.read(lambda state: "g" in state.groups) is False
    assert not made.done()
    assert not again.done()
    scene.send.before = lambda: None
    gate.open()
    made.result(WAIT_S)
    again.result(WAIT_S)
    assert "g" in scene.log.ready().groups


def test_a_refused_change_fails_alone_and_stores_nothing(scene: Scene) -> None:
    good, bad, last = submitted(scene, group("g"), lambda state: state.decide_topic_delete("nowhere"), group("h"))
    assert isinstance(bad.exception(), TopicNotExistError)
    assert good.result()
    assert last.result()


def test_a_record_that_the_store_refuses_for_good_fails_only_the_change_that_needs_it(scene: Scene) -> None:
    scene.send.refused[b"poison"] = MessageIllegalError("too long")
    first, bad, last = submitted(scene, group("g"), group("poison"), group("h"))
    assert isinstance(bad.exception(), MessageIllegalError)
    assert first.result()
    assert last.result()
    assert {"g", "h"} <= set(scene.log.ready().groups)
    assert "poison" not in scene.log.ready().groups


def test_all_changes_of_a_write_of_unknown_outcome_may_be_tried_again(scene: Scene) -> None:
    gate = CallGate()
    scene.make_group("before")
    scene.send.before = gate
    scene.send.outcome = RequestTimeoutError("storage-broker-a-0", 20.0)
    first = scene.log.submit(group("g"))
    gate.wait()
    scene.send.before = lambda: None
    gate.open()
    assert isinstance(first.exception(WAIT_S), RequestTimeoutError)
    scene.send.outcome = RequestTimeoutError("storage-broker-a-0", 20.0)
    failed = submitted_after(scene, group("h"), group("i"))
    assert {type(future.exception(WAIT_S)) for future in failed} == {RequestTimeoutError}
    assert {type(future.exception()) for future in submitted(scene, group("h"), group("i"))} == {type(None)}
    assert {"g", "h", "i"} <= set(scene.log.ready().groups)


def submitted_after(scene: Scene, *decides: Callable[[BrokerState], Any]) -> list[Future[bool]]:
    """Submit state changes while the broker stores a marker record. A marker record changes no state; it shows that the
    broker has read all earlier records. Returns the futures of the changes."""
    gate = CallGate()
    scene.send.before = gate
    futures = [scene.log.submit(decide) for decide in decides]
    gate.wait()
    scene.send.before = lambda: None
    gate.open()
    return futures


def test_a_topic_that_was_deleted_is_opened_at_the_store_before_it_is_made_again(scene: Scene) -> None:
    log = StateLog("broker-a", scene.first, scene.send)  # type: ignore[arg-type]  # the only replica
    log.load()
    make = log.change
    make(lambda state: state.decide_topic("orders", 1, 1))
    assert "open_topics" not in scene.first.asked
    make(lambda state: state.decide_topic_delete("orders"))
    make(lambda state: state.decide_topic("orders", 1, 1))
    assert scene.first.asked.count("open_topics") == 1
    make(lambda state: state.decide_topic_update("orders", 2, None, None))
    assert scene.first.asked.count("open_topics") == 1
    log.close()
    scene.first.files[CLOSED_TOPICS_FILE] = json.dumps(["old"])
    log = StateLog("broker-a", scene.first, scene.send)  # type: ignore[arg-type]
    log.load()
    log.change(lambda state: state.decide_topic("old", 1, 1))
    assert scene.first.asked.count("open_topics") == 2
    log.close()


def test_more_changes_than_may_wait_are_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHANGES_MAX", 2)
    scene.make_group("before")
    gate = CallGate()
    scene.send.before = gate
    taken = [scene.log.submit(group("g"))]
    gate.wait()
    taken += [scene.log.submit(group(name)) for name in ("h", "i")]
    with pytest.raises(SystemBusyError):
        scene.log.submit(group("j"))
    scene.send.before = lambda: None
    gate.open()
    for future in taken:
        future.result(WAIT_S)


def test_a_change_that_no_master_accepts_in_time_gets_an_error(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READY_WAIT_S", 0.01)
    scene.second.away = True
    scene.fail_over()
    futures = [scene.log.submit(group(name)) for name in ("g", "h")]
    assert {type(future.exception(WAIT_S)) for future in futures} == {ServiceNotAvailableError}
    assert scene.send.writes == []


def test_close_finishes_waiting_changes_and_refuses_new_changes(scene: Scene) -> None:
    gate = CallGate()
    scene.send.before = gate
    first = scene.log.submit(group("g"))
    gate.wait()
    waiting = scene.log.submit(group("h"))
    scene.send.before = lambda: None
    gate.open()
    scene.log.close()
    assert first.result(WAIT_S)
    assert waiting.result(WAIT_S)
    with pytest.raises(ServiceNotAvailableError, match="is stopping"):
        scene.log.submit(group("i"))


def test_a_mark_that_the_store_refuses_for_good_fails_the_changes_that_need_it(scene: Scene) -> None:
    """If the store refuses a marker record, the changes that need this record fail. A marker record changes nothing. A
    broker that has just read its state must store one before the next change. The marker then shows that the broker has
    read all earlier records."""
    scene.send.refused[b"mark"] = ClientStateError("fenced")
    futures = [scene.log.submit(group(name)) for name in ("g", "h")]
    assert {type(future.exception(WAIT_S)) for future in futures} == {ClientStateError}
    scene.send.refused.clear()
    assert scene.make_group("g")
