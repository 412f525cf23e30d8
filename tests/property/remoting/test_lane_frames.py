"""Tests of the frame format of lanes (direct socket connections). Client and server decode each other's frames, and
invalid bytes from one client do not harm other clients."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from raymq.common.errors import InvalidArgumentError, RaymqError, ServiceNotAvailableError
from raymq.common.message import PullStatus, SendStatus
from raymq.common.protocol.store import AppendResult, FetchRequest, FetchResult, QueueEnds, ReadsInPlace
from raymq.records.format.encode import EncodedBatch, LoneRecord, ProducerSequence
from raymq.records.format.message_id import IdRange
from raymq.remoting.lane import handshake
from raymq.remoting.lane.appends import (
    ClientHandles,
    ServerHandles,
    decode_append,
    decode_result as decode_append_result,
    decode_results,
    encode_append,
    encode_one,
    encode_results,
)
from raymq.remoting.lane.calls import decode_result
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane.connection import SMALL_FRAME_BYTES
from raymq.remoting.lane.frames import (
    ProtocolError,
    decode_error,
    encode_error,
    pack_header,
    unpack_header,
)
from raymq.remoting.lane.reads import (
    decode_ends,
    decode_fetch,
    decode_fetched,
    decode_queues,
    decode_wait,
    encode_ends,
    encode_fetch,
    encode_fetched,
    encode_queues,
    encode_wait,
)
from raymq.remoting.lane.server import LaneServer
from tests.support.cases import ERRORS, any_error
from tests.support.clients.fakes import WAIT_S
from tests.support.clients.lanes import ECHO, StorageDouble, echo_server
from tests.support.history.waiting import eventually
from tests.support.stores.stores import bodies_of, make_batch, open_store

LONG = st.integers(-(2**63), 2**63 - 1)
INT = st.integers(-(2**31), 2**31 - 1)
COUNT = st.integers(0, 2**31 - 1)
TOPICS = st.sampled_from(["orders", "a", "ü%-|", "t" * 300])
GARBAGE = st.binary(max_size=400)


@st.composite
def batches(draw: st.DrawFn) -> EncodedBatch:
    count = draw(st.integers(0, 5))
    sizes = np.array(draw(st.lists(INT, min_size=count, max_size=count)), np.int32)
    codes = np.array(draw(st.lists(LONG, min_size=count, max_size=count)), np.int64)
    producer = draw(st.none() | st.builds(ProducerSequence, st.text(max_size=16), LONG, LONG))
    ids = draw(
        st.just(())
        | st.builds(IdRange, st.text("0123456789ABCDEF", max_size=56), st.integers(0, 65535), st.just(count))
    )
    records = draw(st.binary(max_size=300))
    return EncodedBatch(draw(TOPICS), draw(LONG), records, sizes, codes, producer, ids, draw(st.booleans()))


def fields(batch: EncodedBatch) -> tuple[object, ...]:
    columns = batch.sizes.tolist(), batch.tag_codes.tolist()
    rest = batch.producer, tuple(batch.message_ids), batch.wait_store_msg_ok
    return batch.topic, batch.queue_id, bytes(batch.records), *columns, *rest


@given(st.lists(st.lists(batches(), max_size=4), max_size=4))
def test_appends_are_read_as_they_were_written(frames):
    client, server = ClientHandles(), ServerHandles()
    for frame in frames:
        encoded = encode_append(frame, client)
        assert encoded is not None
        opens, parts = encoded
        for one in opens:
            server.open(one)
        payload = memoryview(b"".join(parts))
        assert list(map(fields, decode_append(payload, len(frame), server))) == list(map(fields, frame))


@st.composite
def lone_records(draw: st.DrawFn) -> LoneRecord:
    parts = tuple(draw(st.lists(st.binary(max_size=60), max_size=4)))
    producer_id, stem = draw(st.text(max_size=16)), draw(st.text("0123456789ABCDEF", max_size=56))
    size, sequence, counter = sum(map(len, parts)), draw(LONG), draw(st.integers(0, 65535))
    code, waits = draw(st.just(0) | LONG), draw(st.booleans())
    return LoneRecord(draw(TOPICS), draw(LONG), parts, size, code, producer_id, sequence, stem, counter, waits)


@given(lone_records())
def test_a_lone_record_is_sent_as_its_batch_is(record):
    handles, server = ClientHandles(), ServerHandles()
    opens, parts = encode_append([record.batch()], handles) or ([], [])
    handle = handles.known(record.topic, record.queue_id)
    assert handle is not None
    lone, size = encode_one(record, handle)
    assert b"".join(lone) == b"".join(parts)
    assert size == len(b"".join(parts))
    server.open(opens[0])
    assert list(map(fields, decode_append(memoryview(b"".join(lone)), 1, server))) == [fields(record.batch())]


@given(st.lists(batches(), min_size=1, max_size=3), st.data())
def test_an_append_that_is_cut_or_damaged_is_refused_and_reads_no_foreign_bytes(frame, data):
    client, server = ClientHandles(), ServerHandles()
    opens, parts = encode_append(frame, client) or ([], [])
    for one in opens:
        server.open(one)
    whole = bytearray(b"".join(parts))
    cut = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    with pytest.raises((InvalidArgumentError, ProtocolError)):
        decode_append(memoryview(whole)[:cut], len(frame), server)
    whole[cut] ^= data.draw(st.integers(1, 255))
    try:
        read = decode_append(memoryview(whole), len(frame), server)
    except (InvalidArgumentError, ProtocolError):
        return
    assert sum(len(batch.records) for batch in read) <= len(whole)


@given(GARBAGE, st.integers(0, 65535))
def test_garbage_is_refused_by_every_reader_of_requests(data, count):
    payload, server = memoryview(data), ServerHandles()
    for read in (
        lambda: decode_append(payload, count, server),
        lambda: server.open(payload),
        lambda: decode_fetch(payload, count),
        lambda: decode_queues(decode_wait(payload, count)[0], count),
        lambda: decode_queues(data, count),
    ):
        try:
            read()
        except (InvalidArgumentError, ProtocolError):
            continue


@given(GARBAGE, st.integers(0, 65535))
def test_garbage_is_refused_by_every_reader_of_answers(data, count):
    payload = memoryview(data)
    for read in (
        lambda: decode_results(payload, count),
        lambda: decode_append_result(payload),
        lambda: decode_fetched(payload, count),
        lambda: decode_ends(payload, count),
        lambda: decode_result(payload, QueueEnds),
    ):
        try:
            read()
        except ServiceNotAvailableError:
            continue
    assert isinstance(decode_error(payload), RaymqError)


OFFSETS = st.none() | st.lists(LONG, max_size=4).map(tuple)


@given(
    st.lists(st.builds(AppendResult, st.sampled_from(SendStatus), LONG, LONG, LONG, st.booleans(), OFFSETS), max_size=4)
)
def test_results_are_read_as_they_were_written(results):
    assert decode_results(memoryview(b"".join(encode_results(results))), len(results)) == results
    for result in results:
        [answer] = encode_results([result])
        assert decode_append_result(memoryview(answer)) == result


REQUESTS = st.lists(
    st.builds(
        FetchRequest,
        TOPICS,
        INT,
        LONG,
        LONG,
        st.none() | st.frozensets(LONG, max_size=3),
        st.sampled_from([None, "price > 5", "region = 'ü'", "TRUE"]),
    ),
    max_size=5,
)


@given(REQUESTS, LONG, st.floats(0, 100), st.builds(ReadsInPlace, st.integers(0, 1 << 40), st.integers(0, 1 << 40)))
def test_fetches_and_waits_are_read_as_they_were_written(requests, max_bytes, wait_s, reads):
    payload = memoryview(encode_fetch(requests, max_bytes, wait_s, reads))
    fitting = tuple(min(count, (1 << 32) - 1) for count in reads)
    assert decode_fetch(payload, len(requests)) == (requests, max_bytes, wait_s, fitting)
    queues = [(one.topic, one.queue_id) for one in requests]
    offsets = tuple(one.queue_offset for one in requests)
    named, read_offsets, read_wait_s, read_reads = decode_wait(
        memoryview(encode_wait(encode_queues(queues), offsets, wait_s, reads)), len(requests)
    )
    assert read_reads == fitting
    assert (decode_queues(named, len(requests)), read_offsets, read_wait_s) == (queues, offsets, wait_s)


@given(
    st.lists(
        st.builds(FetchResult, st.sampled_from(PullStatus), LONG, LONG, LONG, GARBAGE, COUNT, st.text(max_size=20)),
        max_size=4,
    ),
    st.lists(st.builds(QueueEnds, LONG, LONG, st.text(max_size=20)), max_size=4),
)
def test_answers_to_reads_are_read_as_they_were_written(results, ends):
    assert decode_fetched(memoryview(b"".join(encode_fetched(results))), len(results)) == results
    assert decode_ends(memoryview(encode_ends(ends)), len(ends)) == ends


@given(st.sampled_from(["QueueEnds", "RaymqError", "print", "SystemBusyError"]), st.lists(st.integers() | st.text()))
def test_an_error_of_any_name_and_arguments_becomes_one_of_raymqs(name, arguments):
    error = decode_error(
        msgspec.msgpack.encode((name, [one if isinstance(one, str) else one % 2**60 for one in arguments], "text"))
    )
    assert isinstance(error, RaymqError)
    assert str(error) is not None


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_of_raymq_arrives_as_it_is(kind):
    error = any_error(kind)
    again = decode_error(encode_error(error))
    # The frame format has lists but no tuples, so a decoded error has lists as arguments.
    arguments = [list(one) if isinstance(one, tuple) else one for one in error.args]
    assert (type(again), list(again.args), str(again)) == (kind, arguments, str(error))


@given(st.binary(min_size=20, max_size=20), st.integers(0, 159))
def test_a_damaged_header_on_tcp_is_noticed(data, bit):
    header = bytearray(pack_header(*unpack_header(data, 0, checked=False), checked=True))
    assert unpack_header(header, 0, checked=True) == unpack_header(data, 0, checked=False)
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        unpack_header(header, 0, checked=True)


# Tests of a server that receives bytes that no raymq client would send


@pytest.fixture(scope="module")
def server() -> Iterator[LaneServer]:
    server = echo_server(host="127.0.0.1")
    yield server
    server.close()


@pytest.fixture(params=[False, True], ids=["unix", "tcp"])
def remote(request):
    return request.param


def raw(server: LaneServer, *, remote: bool) -> socket.socket:
    """Open a socket to the server of lanes (direct socket connections) without a handshake."""
    stream = socket.socket(socket.AF_INET if remote else socket.AF_UNIX)
    stream.settimeout(WAIT_S)
    stream.connect((server.address.host, server.address.port) if remote else server.address.name)
    return stream


def check_others(server: LaneServer) -> None:
    lane = Lane(server.address, timeout_s=WAIT_S)
    assert bytes(lane.call(ECHO, (b"still there",), WAIT_S).payload) == b"still there"
    lane.close()


@settings(max_examples=30)
@given(data=GARBAGE, authenticated=st.booleans())
def test_garbage_ends_at_most_its_own_connection(server, data, authenticated):
    for remote in (False, True):
        if authenticated:
            lane = Lane(server.address, remote=remote, timeout_s=WAIT_S)
            lane._stream.sendall(data)
            lane.close()
        else:
            with raw(server, remote=remote) as stream:
                stream.sendall(data)
    check_others(server)
    eventually(lambda: not server.connections, "all of them are gone")


def test_a_replayed_handshake_is_refused(server, remote):
    with raw(server, remote=remote) as first:
        hello = first.recv(handshake.HELLO_BYTES)
        reply = handshake.make_reply(server.address.secret, hello)
        first.sendall(reply)
        assert first.recv(1)[0] == handshake.HandshakeStatus.OPEN
        with raw(server, remote=remote) as second:
            second.recv(handshake.HELLO_BYTES)
            second.sendall(reply)
            assert second.recv(1000) == b""


@pytest.mark.parametrize("size", [0, 30, SMALL_FRAME_BYTES + 1])
def test_a_frame_may_come_in_pieces_cut_anywhere(server, remote, size):
    lane = Lane(server.address, remote=remote, timeout_s=WAIT_S)
    body = os.urandom(size)
    frame = pack_header(size, ECHO, 0, 0, 7, checked=remote) + body
    lane._correlation = 7
    near = 60
    for cut in [*range(1, min(len(frame), near)), *range(max(near, len(frame) - 5), len(frame))]:
        lane._stream.sendall(frame[:cut])
        # Wait until the server has answered other clients. By then it has also read the first part of the frame that
        # this client cut.
        check_others(server)
        lane._stream.sendall(frame[cut:])
        assert bytes(lane.receive(float("inf")).payload) == body
    lane.close()


def test_an_oversized_frame_costs_the_server_no_memory(server, remote):
    eventually(lambda: not len(server.turns), "the turns of earlier tests to end")
    # Wait until the server has answered other clients. By then its thread has released the buffers of earlier tests,
    # which would change the number of buffered bytes.
    check_others(server)
    before = len(server.turns), server.buffers.kept_bytes
    with_header = pack_header(2**32 - 1, ECHO, 0, 0, 1, checked=remote)
    lane = Lane(server.address, remote=remote, timeout_s=WAIT_S)
    lane._stream.sendall(with_header + bytes(1_000_000))
    check_others(server)
    assert (len(server.turns), server.buffers.kept_bytes) == before
    lane.close()


def test_two_thousand_idle_connections_and_a_stuck_handshake_hurt_nobody():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 6000:
        pytest.skip(f"the limit of open files is {hard}; 2,000 connections need 6000 for both their ends")
    resource.setrlimit(resource.RLIMIT_NOFILE, (6000, hard))
    server = echo_server()
    lanes: list[Lane] = []
    try:
        stuck = raw(server, remote=False)
        stuck.sendall(b"RMQL")
        lanes = [Lane(server.address, timeout_s=WAIT_S) for _ in range(2000)]
        assert server.connections == 2000
        check_others(server)
        assert server.buffers.kept_bytes == server.unsent_bytes == len(server.turns) == 0
        for lane in lanes[::100]:
            assert bytes(lane.call(ECHO, (b"x",), WAIT_S).payload) == b"x"
        stuck.close()
    finally:
        for lane in lanes:
            lane.close()
        server.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_client_that_dies_within_an_append_leaves_a_whole_batch_or_none(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    double = StorageDouble(open_store(tmp_path / "store"))
    try:
        handles = ClientHandles()
        bodies = [b"one", b"two" * 50, b"three"]
        opens, parts = encode_append([make_batch(bodies)], handles) or ([], [])
        payload = b"".join(parts)
        stream = pack_header(len(opens[0]), 1, 0, 0, 0, checked=False) + opens[0]
        stream += pack_header(len(payload), 2, 0, 1, 1, checked=False) + payload
        whole = 0
        for cut in [*range(0, len(stream), 17), len(stream) - 1, len(stream)]:
            lane = Lane(double.lanes.address, timeout_s=WAIT_S)
            lane._stream.sendall(stream[:cut])
            lane.close()
            whole += cut == len(stream)
            eventually(lambda: not double.lanes.server.connections, "the server has noticed")
            if not whole:
                assert bodies_of(double.store) == []
        assert whole == 1
        eventually(lambda: bodies_of(double.store) == bodies, "the flush behind the last append shows it")
    finally:
        double.close()
