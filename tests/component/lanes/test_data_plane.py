"""Tests of a storage actor's data plane (sends and reads). The results are equal over Unix, TCP and TLS
sockets."""

from __future__ import annotations

import os
import select
import shutil
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from actors.core.consume.records_in_place import RecordsInPlace
from raymq.common.config.store import FlushDiskType
from raymq.common.errors import (
    ClientStateError,
    FilterExpressionError,
    InvalidArgumentError,
    MessageIllegalError,
    NotMasterError,
    ServiceNotAvailableError,
    StoreNotWritableError,
    SystemBusyError,
    TopicNotExistError,
)
from raymq.common.message import PullStatus, SendStatus
from raymq.common.protocol.store import Boundary, FetchRequest, FetchResult, QueryResult, QueueBounds, QueueEnds
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.hashing import tags_code
from raymq.records.format.message_id import IdRange
from raymq.remoting import storage_client, storage_lane
from raymq.remoting.lane import appends
from raymq.remoting.lane.appends import encode_append
from raymq.remoting.lane.calls import decode_result, encode_call
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane.reads import decode_ends, encode_queues, encode_wait
from raymq.remoting.storage_client import FoundInPlace, StorageClient
from raymq.remoting.storage_lane import StorageLane
from storage.append.appender import Appender
from storage.running_flags import RunningFlag
from tests.support.clients.fakes import WAIT_S, FakeActor, description
from tests.support.clients.lanes import StorageDouble, make_certificates
from tests.support.history.waiting import eventually
from tests.support.stores.stores import bodies_of, make_batch, open_store

WAYS = ["unix", "tcp", "tls"]


@pytest.fixture
def no_flushes(monkeypatch):
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(params=[FlushDiskType.SYNC_FLUSH, FlushDiskType.ASYNC_FLUSH])
def flush(request):
    return request.param


@pytest.fixture
def double(tmp_path, no_flushes, flush):
    """Return a function that creates a stand-in for a storage actor. The function's arguments are the settings of the
    stand-in's store."""
    made = []

    def make(*, capacity=10_000, host="127.0.0.1", tls=None, **settings):
        store = open_store(tmp_path / f"store-{len(made)}", flush_disk_type=flush, **settings)
        made.append(StorageDouble(store, capacity=capacity, host=host, tls=tls))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def connect(monkeypatch, tmp_path, double, way):
    """Return a function that creates a stand-in for a storage actor, and a client connected over the transport
    `way`."""
    clients = []

    def connect(*, on_node=None, **settings):
        tls = tls_files(tmp_path, monkeypatch) if way == "tls" else None
        actor = double(tls=tls, **settings)
        here = on_node if on_node is not None else way == "unix"
        root = str(tmp_path / "not-readable-from-here") if on_node is None else str(actor.store.status().root)
        where = description(actor.lanes.address, node_id="here" if here else "elsewhere", root=root)
        fake = FakeActor({"describe": lambda: where})
        monkeypatch.setattr(storage_client, "ActorRef", lambda name: fake)
        clients.append(StorageClient("storage-a-0", "here"))
        return actor, clients[-1], fake

    yield connect
    for one in clients:
        one.close()


def tls_files(directory, monkeypatch):
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command that makes the certificates is not installed")
    files = make_certificates(directory)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", files.certificate)
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", files.key)
    monkeypatch.setenv("RAY_TLS_CA_CERT", files.authority)
    return files


def test_appended_messages_are_read_without_actor_calls(connect):
    actor, client, fake = connect()
    assert [result.queue_offset for result in client.append([make_batch([b"one", b"two"])], WAIT_S)] == [0]
    [first, second] = client.append([make_batch([b"three"]), make_batch([b"x"] * 40, queue_id=7)], WAIT_S)
    assert (first.queue_offset, second.queue_offset, first.status) == (2, 0, SendStatus.SEND_OK)
    assert second.physical_offset > first.physical_offset > 0
    assert bodies_of(actor.store) == [b"one", b"two", b"three"]
    assert bodies_of(actor.store, queue_id=7) == [b"x"] * 40
    requests = [FetchRequest("orders", 0, 1, 100), FetchRequest("orders", 7, 9, 3), FetchRequest("orders", 1, 0, 1)]
    assert client.fetch(requests, 1 << 20, 0.0, WAIT_S) == actor.store.fetch(requests, max_bytes=1 << 20, wait_s=0.0)
    assert client.queue_bounds("orders", 7, WAIT_S) == actor.queue_bounds("orders", 7)
    assert client.offset_by_time("orders", 7, 0, WAIT_S) == 0
    late = client.offset_by_time("orders", 7, 2**62, WAIT_S, Boundary.UPPER)
    assert late == actor.offset_by_time("orders", 7, 2**62, Boundary.UPPER)
    assert fake.calls == ["describe"]


def test_large_batches_arrive_whole(connect):
    actor, client, _ = connect(mapped_file_size_commit_log_bytes=8 << 20)
    bodies = [os.urandom(1000) for _ in range(3000)]
    [result] = client.append([make_batch(bodies)], WAIT_S)
    assert result.status is SendStatus.SEND_OK
    assert bodies_of(actor.store) == bodies
    [fetched] = client.fetch([FetchRequest("orders", 0, 0, 5000)], 64 << 20, 0.0, WAIT_S)
    assert fetched.count == 3000


def test_a_repeat_is_recognised_and_a_fenced_producer_gets_an_error(connect):
    _, client, _ = connect()
    batch = make_batch([b"a", b"b"], producer=("p1", 3, 10))
    [first] = client.append([batch], WAIT_S)
    [again] = client.append([batch], WAIT_S)
    assert again.duplicate
    assert not first.duplicate
    assert (again.queue_offset, again.physical_offset) == (first.queue_offset, first.physical_offset)
    with pytest.raises(ClientStateError, match="fenced"):
        client.append([make_batch([b"c"], producer=("p1", 2, 12))], WAIT_S)


def test_a_result_lists_offsets_that_are_not_consecutive(connect):
    """The result of an append lists each offset if the offsets of the batch are not consecutive. This happens if the
    batch crosses the end of a log file, or if its first message was already stored."""
    _, client, _ = connect()
    [over_the_end] = client.append([make_batch([b"x" * 30_000] * 4)], WAIT_S)
    assert over_the_end.physical_offsets is not None
    assert len(over_the_end.physical_offsets) == 4
    client.append([make_batch([b"1"], queue_id=1, producer=("p", 0, 0))], WAIT_S)
    client.append([make_batch([b"other"], queue_id=1)], WAIT_S)
    [rest] = client.append([make_batch([b"1", b"2", b"3"], queue_id=1, producer=("p", 0, 0))], WAIT_S)
    assert rest.queue_offsets == (0, 2, 3)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"topic": "payments"}, MessageIllegalError),
        ({"queue_id": -1}, MessageIllegalError),
        ({"queue_id": 2**40}, MessageIllegalError),
        ({"sizes": np.array([1], np.int32)}, MessageIllegalError),
        ({"sizes": np.array([], np.int32), "tag_codes": np.array([], np.int64)}, MessageIllegalError),
        ({"records": b""}, MessageIllegalError),
        ({"topic": "?"}, MessageIllegalError),
    ],
)
def test_illegal_appends_are_refused_and_nothing_is_stored(connect, change, error):
    actor, client, _ = connect()
    good = make_batch([b"one"])
    fields = {name: getattr(good, name) for name in EncodedBatch.__dataclass_fields__} | change
    with pytest.raises(error):
        client.append([EncodedBatch(**fields)], WAIT_S)
    assert actor.store.log.end_offset == 0
    [result] = client.append([good], WAIT_S)
    assert result.queue_offset == 0


def test_deleted_topics_full_stores_and_limits_raise_their_own_errors(connect):
    actor, client, _ = connect(capacity=0)
    with pytest.raises(SystemBusyError, match="send_queue_capacity"):
        client.append([make_batch([b"one"])], WAIT_S)
    actor.limit.capacity = 1
    actor.deleted.add("orders")
    with pytest.raises(TopicNotExistError):
        client.append([make_batch([b"one"])], WAIT_S)
    actor.deleted.remove(["orders"])
    actor.store.flags.set_flag(RunningFlag.DISK_FULL, "the disk is full")
    with pytest.raises(StoreNotWritableError, match="the disk is full"):
        client.append([make_batch([b"one"])], WAIT_S)
    actor.store.flags.clear_flag(RunningFlag.DISK_FULL)
    for _ in range(3):  # Failed appends no longer count towards the limit of waiting appends.
        client.append([make_batch([b"one"])], WAIT_S)


def test_an_append_that_waits_while_its_topic_is_deleted_gets_an_error(connect, flush, monkeypatch):
    if flush is FlushDiskType.ASYNC_FLUSH:
        pytest.skip("such an append does not wait")
    actor, client, _ = connect()
    under_way, go_on = threading.Event(), threading.Event()

    def slow_flush(descriptor):
        if threading.current_thread().name == "raymq-flush":
            under_way.set()
            go_on.wait(WAIT_S)

    outcome = []

    def append():
        try:
            outcome.append(client.append([make_batch([b"one"])], WAIT_S))
        except TopicNotExistError as error:
            outcome.append(error)

    monkeypatch.setattr(os, "fdatasync", slow_flush)
    thread = threading.Thread(target=append)
    thread.start()
    try:
        assert under_way.wait(WAIT_S)
        actor.deleted.add("orders")
    finally:
        go_on.set()
    thread.join(WAIT_S)
    assert isinstance(outcome[0], TopicNotExistError)


def test_a_slow_disk_shows_in_the_send_status(connect, flush, monkeypatch):
    if flush is FlushDiskType.ASYNC_FLUSH:
        pytest.skip("such an append does not wait for the disk")
    _, client, _ = connect(sync_flush_timeout_ms=300)
    go_on = threading.Event()
    monkeypatch.setattr(
        os, "fdatasync", lambda _: threading.current_thread().name != "raymq-flush" or go_on.wait(WAIT_S)
    )
    try:
        [result] = client.append([make_batch([b"slow"])], WAIT_S)
        assert result.status is SendStatus.FLUSH_DISK_TIMEOUT
    finally:
        go_on.set()


def test_many_appends_at_a_time_all_get_their_own_answers(connect):
    actor, client, _ = connect()
    results = {}

    def append(number):
        for index in range(20):
            [result] = client.append([make_batch([b"%d-%d" % (number, index)], queue_id=number)], WAIT_S)
            results[number, index] = result.queue_offset

    threads = [threading.Thread(target=append, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert results == {(number, index): index for number in range(8) for index in range(20)}
    assert bodies_of(actor.store, queue_id=3) == [b"3-%d" % index for index in range(20)]


def test_more_queues_than_a_connection_has_handles(connect, monkeypatch):
    monkeypatch.setattr(appends, "HANDLES_MAX", 4)
    monkeypatch.setattr(storage_lane, "HANDLES_MAX", 4)
    actor, client, _ = connect()
    for queue_id in [0, 1, 2, 3, 0, 4, 5, 0, 6, 7, 8, 1, 2]:
        client.append([make_batch([b"%d" % queue_id], queue_id=queue_id)], WAIT_S)
    client.append([make_batch([b"many"], queue_id=queue_id) for queue_id in range(6)], WAIT_S)
    assert bodies_of(actor.store, queue_id=0) == [b"0", b"0", b"0", b"many"]
    assert bodies_of(actor.store, queue_id=1) == [b"1", b"1", b"many"]
    assert bodies_of(actor.store, queue_id=8) == [b"8"]


def test_ids_that_are_a_range_and_tag_codes_arrive(connect, monkeypatch):
    client = connect()[1]
    batch = make_batch([b"1", b"2"], tags="paid")
    seen = []
    prepare = Appender.prepare

    def note(appender, batches):
        seen.extend(batches)
        return prepare(appender, batches)

    monkeypatch.setattr(Appender, "prepare", note)
    ids = IdRange("0" * 28, 65_535, 2)
    fields = {name: getattr(batch, name) for name in EncodedBatch.__dataclass_fields__} | {"message_ids": ids}
    client.append([EncodedBatch(**fields)], WAIT_S)
    assert list(seen[0].message_ids) == list(ids)
    assert seen[0].tag_codes.tolist() == [tags_code("paid")] * 2
    assert seen[0].wait_store_msg_ok


# Tests of reads over lanes (direct socket connections)


def test_a_fetch_waits_for_a_message_and_no_longer_than_asked(connect):
    actor, client, _ = connect()
    client.append([make_batch([b"one"])], WAIT_S)
    request = FetchRequest("orders", 0, 1, 10)
    [nothing] = client.fetch([request], 1 << 20, 0.05, WAIT_S)
    assert nothing.status is PullStatus.NO_NEW_MESSAGE
    results = []
    thread = threading.Thread(target=lambda: results.extend(client.fetch([request], 1 << 20, WAIT_S, WAIT_S)))
    thread.start()
    eventually(lambda: len(actor.store.polls) == 1, "it waits")
    actor.store.append([make_batch([b"two"])])
    thread.join(WAIT_S)
    assert (results[0].status, results[0].count) == (PullStatus.FOUND, 1)
    assert len(actor.store.polls) == 0


def test_a_fetch_with_tags_continues_after_the_excluded_messages(connect):
    actor, client, _ = connect()
    client.append([make_batch([b"no"] * 5, tags="no")], WAIT_S)
    wanted = frozenset([tags_code("yes")])
    [nothing] = client.fetch([FetchRequest("orders", 0, 0, 10, wanted)], 1 << 20, 0.05, WAIT_S)
    assert (nothing.status, nothing.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, 5)
    results = []
    request = FetchRequest("orders", 0, 0, 10, wanted)
    thread = threading.Thread(target=lambda: results.extend(client.fetch([request], 1 << 20, WAIT_S, WAIT_S)))
    thread.start()
    eventually(lambda: len(actor.store.polls) == 1, "it waits")
    actor.store.append([make_batch([b"no"], tags="no")])
    actor.store.append([make_batch([b"yes"], tags="yes")])
    thread.join(WAIT_S)
    assert (results[0].status, results[0].count, results[0].next_offset) == (PullStatus.FOUND, 1, 7)


def test_a_fetch_with_a_filter_transfers_no_excluded_body_and_continues_after_it(connect):
    actor, client, _ = connect()
    client.append([make_batch([b"x" * 1000] * 50, extra_properties={"price": "1"})], WAIT_S)
    client.append([make_batch([b"yes"], extra_properties={"price": "6"})], WAIT_S)
    request = FetchRequest("orders", 0, 0, 100, None, "price > 5")
    [found] = client.fetch([request], 1 << 20, WAIT_S, WAIT_S)
    assert (found.status, found.count, found.next_offset) == (PullStatus.FOUND, 1, 51)
    assert len(found.records) < 1000
    results = []
    request = replace(request, queue_offset=51)
    thread = threading.Thread(target=lambda: results.extend(client.fetch([request], 1 << 20, WAIT_S, WAIT_S)))
    thread.start()
    eventually(lambda: len(actor.store.polls) == 1, "it waits")
    actor.store.append([make_batch([b"no"], extra_properties={"price": "5"})])
    actor.store.append([make_batch([b"yes"], extra_properties={"price": "7"})])
    thread.join(WAIT_S)
    assert (results[0].status, results[0].count, results[0].next_offset) == (PullStatus.FOUND, 1, 53)
    with pytest.raises(FilterExpressionError, match="character 7"):
        client.fetch([replace(request, sql="price != 5")], 1 << 20, 0.0, WAIT_S)


def test_requests_that_make_no_sense_are_refused(connect):
    _, client, _ = connect()
    for request, max_bytes in ((FetchRequest("orders", 0, 0, 0), 1), (FetchRequest("orders", 0, 0, 1), -1)):
        with pytest.raises(InvalidArgumentError):
            client.fetch([request], max_bytes, 0.0, WAIT_S)
    assert client.fetch([], 1000, 0.0, WAIT_S) == []


@pytest.mark.parametrize("on_node", [True, False])
def test_reading_gives_the_same_near_the_files_and_far_from_them(connect, on_node, way):
    if on_node and way != "unix":
        pytest.skip("on the store's node lanes are Unix sockets")
    actor, client, _ = connect(on_node=on_node)
    client.append([make_batch([b"one", b"two", b"three"])], WAIT_S)
    requests = [
        FetchRequest("orders", 0, 1, 100),
        FetchRequest("orders", 0, 3, 100),
        FetchRequest("orders", 0, 7, 100),
        FetchRequest("orders", 1, 0, 100),
        FetchRequest("orders", 0, 0, 1),
    ]
    results = client.fetch(requests, 1 << 20, 0.0, WAIT_S)
    assert results == actor.store.fetch(requests, max_bytes=1 << 20, wait_s=0.0)
    assert [result.status for result in results[:3]] == [
        PullStatus.FOUND,
        PullStatus.NO_NEW_MESSAGE,
        PullStatus.OFFSET_ILLEGAL,
    ]
    assert results[0].count == 2
    actor.store.append([make_batch([b"x"], queue_id=1)])
    small = [FetchRequest("orders", 0, 0, 100), FetchRequest("orders", 1, 0, 100)]
    # A fetch returns at least one message, even if the message is larger than the byte limit. So the first fetch need
    # not contain the message of the second queue; another fetch returns it.
    assert [result.count for result in client.fetch(small, 1, 0.0, WAIT_S)] == [1, int(on_node)]
    assert [result.count for result in client.fetch(small[1:], 1, 0.0, WAIT_S)] == [1]


def in_bytes(result):
    """Convert a result of `find` (places of records in mapped files) to a result of `fetch` (bytes of records)."""
    if not isinstance(result, FoundInPlace):
        return result
    records = RecordsInPlace.of(result.files, result.mapped).data if result.mapped else b""
    return FetchResult(result.status, result.next_offset, result.min_offset, result.max_offset, records, result.count)


@pytest.mark.parametrize("limit", [1 << 20, 300, 0, -1])
def test_reading_in_place_finds_the_fetched_messages(watched, limit):
    actor, client = watched
    for number in range(30):
        tags = "even" if number % 2 == 0 else "odd"
        actor.store.append([make_batch([b"%d" % number], tags=tags), make_batch([b"x"], queue_id=1)])
    requests = [
        FetchRequest("orders", 0, 3, 100, frozenset({tags_code("odd")})),
        FetchRequest("orders", 1, 0, 7),
        FetchRequest("orders", 0, 3, 100, frozenset({tags_code("none")})),
        FetchRequest("orders", 1, 30, 7),
        FetchRequest("orders", 1, 99, 7),
    ]
    if limit < 0:
        for read in (client.fetch, client.find):
            with pytest.raises(InvalidArgumentError):
                read(requests, limit, 0.0, WAIT_S)
        return
    found = client.find(requests, limit, 0.0, WAIT_S)
    assert [in_bytes(result) for result in found] == client.fetch(requests, limit, 0.0, WAIT_S)
    assert isinstance(found[0], FoundInPlace) == (limit > 0)


# Tests of watches (requests that wait until a queue's end moves)


@pytest.fixture
def watched(double, tmp_path, monkeypatch):
    """Return a stand-in for a storage actor on this node, and a client that is connected to the stand-in."""
    actor = double()
    where = description(actor.lanes.address, root=str(actor.store.status().root))
    monkeypatch.setattr(storage_client, "ActorRef", lambda name: FakeActor({"describe": lambda: where}))
    client = StorageClient("storage-a-0", "here")
    yield actor, client
    client.close()


def answer_of(watch) -> list[QueueEnds]:
    assert select.select([watch], [], [], WAIT_S)[0]
    return watch.receive()


def test_a_watch_reports_the_ends_as_soon_as_a_queue_has_a_message(watched):
    actor, client = watched
    client.append([make_batch([b"one"])], WAIT_S)
    watch = client.open_watch()
    watch.ask([FetchRequest("orders", 0, 0, 1), FetchRequest("orders", 1, 0, 1)], WAIT_S)
    assert answer_of(watch) == [QueueEnds(0, 1), QueueEnds(0, 0)]
    watch.ask([FetchRequest("orders", 0, 1, 1), FetchRequest("orders", 1, 0, 1)], WAIT_S)
    eventually(lambda: len(actor.store.polls) == 1, "it waits")
    assert not select.select([watch], [], [], 0)[0]
    client.append([make_batch([b"else"], queue_id=5)], WAIT_S)
    assert not select.select([watch], [], [], 0)[0]
    client.append([make_batch([b"two"], queue_id=1)], WAIT_S)
    assert answer_of(watch) == [QueueEnds(0, 1), QueueEnds(0, 1)]
    watch.close()
    eventually(lambda: len(actor.store.polls) == 0, "nobody waits")


def test_the_queues_of_a_watch_stay_registered_between_its_questions(watched):
    actor, client = watched
    watch, ends = client.open_watch(), [0, 0]
    for number in range(6):
        watch.ask([FetchRequest("orders", queue, end, 1) for queue, end in enumerate(ends)], WAIT_S)
        eventually(lambda: len(actor.store.polls) == 1, "it waits")
        client.append([make_batch([b"x"], queue_id=number % 2)], WAIT_S)
        ends[number % 2] += 1
        assert answer_of(watch) == [QueueEnds(0, end) for end in ends]
        client.append([make_batch([b"unasked"], queue_id=1)], WAIT_S)
        watch.ask([FetchRequest("orders", queue, end, 1) for queue, end in enumerate(ends)], WAIT_S)
        ends[1] += 1
        assert answer_of(watch) == [QueueEnds(0, end) for end in ends]
    assert len(actor.store.polls) == 1
    watch.close()
    eventually(lambda: len(actor.store.polls) == 0, "nobody waits")


def test_a_question_that_names_other_queues_than_it_counts_is_refused(watched):
    actor, _ = watched
    lane = Lane(actor.lanes.address)
    one, two = encode_queues([("orders", 0)]), encode_queues([("orders", 0), ("orders", 1)])
    for named, offsets, count in [(one, (0,), 1), (one, (0, 0), 2), (two, (0,), 1), (two, (0, 0), 2), (one, (), 0)]:
        payload = encode_wait(named, offsets, 0.0)
        if named == (one, two)[count == 2] and count:
            assert len(decode_ends(lane.call(FrameKind.WAIT, (payload,), WAIT_S, count=count).payload, count)) == count
        else:
            with pytest.raises(InvalidArgumentError):
                lane.call(FrameKind.WAIT, (payload,), WAIT_S, count=count)
    lane.close()


def test_a_repeated_watch_request_has_its_own_timeout(watched):
    _, client = watched
    watch = client.open_watch()
    watch.ask([FetchRequest("orders", 0, 0, 1)], 0.05)
    watch.ask([FetchRequest("orders", 0, 0, 1)], 0.15)
    assert answer_of(watch) == [QueueEnds(0, 0)]
    watch.ask([FetchRequest("orders", 0, 0, 1)], 10 * WAIT_S)
    watch.ask([FetchRequest("orders", 0, 0, 1)], 0.02)
    assert answer_of(watch) == [QueueEnds(0, 0)]
    watch.close()


def test_a_watch_is_answered_for_an_offset_that_a_queue_does_not_hold_and_when_its_time_is_over(watched):
    _, client = watched
    watch = client.open_watch()
    watch.ask([FetchRequest("orders", 0, 9, 1)], WAIT_S)
    assert answer_of(watch) == [QueueEnds(0, 0)]
    for wait_s in (0.0, 0.05):
        watch.ask([FetchRequest("orders", 0, 0, 1)], wait_s)
        assert answer_of(watch) == [QueueEnds(0, 0)]
    watch.close()


def test_a_watch_request_replaces_the_previous_request(watched):
    actor, client = watched
    watch = client.open_watch()
    for queue_id in range(20):
        watch.ask([FetchRequest("orders", queue_id, 0, 1)], WAIT_S)
    eventually(lambda: len(actor.store.polls) == 1, "only the last one waits")
    client.append([make_batch([b"x"], queue_id=3)], WAIT_S)
    assert not select.select([watch], [], [], 0)[0]
    client.append([make_batch([b"x"], queue_id=19)], WAIT_S)
    assert answer_of(watch) == [QueueEnds(0, 1)]
    watch.close()


def test_an_answer_to_an_earlier_watch_request_is_ignored(watched):
    _, client = watched
    watch = client.open_watch()
    watch.ask([FetchRequest("orders", 0, 5, 1)], WAIT_S)
    assert select.select([watch], [], [], WAIT_S)[0]
    watch.ask([FetchRequest("orders", 0, 0, 1)], WAIT_S)
    assert watch.receive() == []
    client.append([make_batch([b"x"])], WAIT_S)
    assert answer_of(watch) == [QueueEnds(0, 1)]
    watch.close()


def test_a_watch_that_is_closed_waits_no_more(watched):
    actor, client = watched
    watch = client.open_watch()
    watch.ask([FetchRequest("orders", 0, 0, 1)], WAIT_S)
    eventually(lambda: len(actor.store.polls) == 1, "it waits")
    watch.close()
    eventually(lambda: len(actor.store.polls) == 0, "nobody waits")
    assert watch.closed


def test_a_watch_raises_when_the_actor_ends(watched):
    actor, client = watched
    watch = client.open_watch()
    watch.ask([FetchRequest("orders", 0, 0, 1)], WAIT_S)
    actor.lanes.close()
    with pytest.raises(ServiceNotAvailableError, match="the connection that watches storage actor storage-a-0 broke"):
        watch.receive()
    assert watch.closed
    with pytest.raises(ServiceNotAvailableError, match="the connection that watches storage actor storage-a-0 broke"):
        watch.ask([], 0.0)
    assert client.open_watch() is None


def test_a_closing_store_notifies_its_watches(watched):
    actor, client = watched
    watch = client.open_watch()
    watch.ask([FetchRequest("orders", 0, 0, 1)], WAIT_S)
    eventually(lambda: len(actor.store.polls) == 1, "it waits")
    actor.store.close()
    assert select.select([watch], [], [], WAIT_S)[0]
    with pytest.raises(ServiceNotAvailableError, match="is closed"):
        watch.receive()
    assert not watch.closed
    watch.close()


def test_from_another_node_nothing_is_watched(double, monkeypatch):
    actor = double()
    where = description(actor.lanes.address, node_id="elsewhere")
    monkeypatch.setattr(storage_client, "ActorRef", lambda name: FakeActor({"describe": lambda: where}))
    assert StorageClient("storage-a-0", "here").open_watch() is None


def test_a_failed_wait_is_reported_and_leaves_nothing_registered(watched, monkeypatch):
    """A watch of queue ends fails because its store loses the role of master while the watch waits. The client gets
    NotMasterError, and the store keeps no waiting request. The watch checks the ends twice: at its start, and when its
    timeout expires."""
    actor, client = watched
    ends, looks = actor.store.fetches.ends, []

    def fail_at_second(positions, **options):
        looks.append(positions)
        if len(looks) == 2:
            raise NotMasterError("a", 3)
        return ends(positions, **options)

    monkeypatch.setattr(actor.store.fetches, "ends", fail_at_second)
    watch = client.open_watch()
    watch.ask([FetchRequest("orders", 0, 0, 1)], 0.1)
    with pytest.raises(NotMasterError):
        answer_of(watch)
    assert len(actor.store.polls) == 0
    watch.ask([FetchRequest("orders", 0, 0, 1)], 0.0)
    assert answer_of(watch) == [QueueEnds(0, 0)]
    watch.close()


def test_a_query_finds_the_messages_that_a_dead_client_had_sent_before(connect, way):
    actor, _, _ = connect()
    dying, asking = (StorageLane(actor.lanes.address, remote=way != "unix") for _ in range(2))
    dying.append([make_batch([b"first"])], WAIT_S)
    asking.call("queue_bounds", ("orders", 0), QueueBounds, WAIT_S)
    stalled, goes_on = threading.Event(), threading.Event()

    def stall():
        stalled.set()
        assert goes_on.wait(WAIT_S)

    actor.lanes.server.loop.call_soon(stall)
    assert stalled.wait(WAIT_S)
    ids = [f"{number:032X}" for number in range(20)]
    opens, parts = encode_append([make_batch([b"body"] * 20)], dying._handles)
    assert not opens
    deadline_s = time.monotonic() + WAIT_S
    dying._lane.send(FrameKind.APPEND, parts, deadline_s, count=1)
    dying.close()
    asking._lane.send(FrameKind.CALL, (encode_call("query_by_unique_ids", ("orders", ids, 0)),), deadline_s)
    goes_on.set()
    found = decode_result(asking._lane.receive(deadline_s).payload, QueryResult)
    asking.close()
    # the first id has two messages
    assert (found.count, found.complete) == (21, True)
