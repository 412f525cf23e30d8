"""Tests of the request frames with which replicas read and append the log. They check when a replica answers a frame,
and that waiting requests block no thread."""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from actors.core.replica.orders import Follow
from actors.replica.data_plane import READ_THREADS
from actors.replica.log_carrier import LogCarrier
from actors.replica.log_lanes import READ_LOG_WAIT_MAX_S
from raymq.common.errors import InvalidArgumentError, NotMasterError, ServiceNotAvailableError
from raymq.remoting.lane.client import Answer, Lane
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane.log_chunks import (
    ChunkHead,
    ReadLog,
    decode_chunk,
    decode_copied,
    encode_append_log,
    encode_chunk_head,
    encode_read_log,
)
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually
from tests.support.replicas.local_replicas import LocalReplicas
from tests.support.stores.stores import make_batch

pytestmark = pytest.mark.usefixtures("no_flushes")
MASTER, SLAVE = 0, 1


@pytest.fixture
def group(tmp_path: Path) -> Iterator[LocalReplicas]:
    group = LocalReplicas(tmp_path, 2)
    group.settle()
    yield group
    group.end()


@pytest.fixture
def lanes(group: LocalReplicas) -> Iterator[dict[int, list[Lane]]]:
    """Yield open lanes (direct socket connections) to each replica, by replica. Each replica has two more lanes than
    read threads."""
    with ExitStack() as stack:
        opened: dict[int, list[Lane]] = {MASTER: [], SLAVE: []}
        for replica in (MASTER, SLAVE):
            for _ in range(READ_THREADS + 2):
                opened[replica].append(Lane(group.planes[replica].address))
                stack.callback(opened[replica][-1].close)
        yield opened


def position(group: LocalReplicas, **changed: object) -> ReadLog:
    """Return the READ_LOG request that the slave sends next, with the fields in `changed` replaced."""
    following = group.replicas[SLAVE].following(0.0)
    assert following is not None
    end = following.position or 0
    asked = ReadLog(SLAVE, following.store_id, False, following.epoch, end, end, 1, 1 << 20, WAIT_S)
    return asked._replace(**changed)


def ask(lane: Lane, request: ReadLog) -> None:
    lane.send(FrameKind.READ_LOG, (encode_read_log(request),), time.monotonic() + WAIT_S)


def answer(lane: Lane) -> Answer:
    return lane.receive(time.monotonic() + WAIT_S)


def test_waiting_reads_hold_no_thread_and_are_answered_by_the_next_append(group, lanes):
    threads = threading.active_count()
    for follower, lane in enumerate(lanes[MASTER], start=7):
        ask(lane, position(group, follower=follower, learner=True))
    group.master.start_append([make_batch([b"one"])])
    chunks = [decode_chunk(answer(lane).payload) for lane in lanes[MASTER]]
    assert threading.active_count() <= threads
    assert len({bytes(data) for _, data in chunks}) == 1
    assert b"one" in bytes(chunks[0][1])


def test_a_read_that_waits_in_vain_gets_an_empty_chunk(group, lanes):
    ask(lanes[MASTER][0], position(group, wait_s=0.01))
    head, data = decode_chunk(answer(lanes[MASTER][0]).payload)
    assert head.physical_offset == head.end_offset == group.master.account().end_offset
    assert not data


def test_a_read_of_an_older_epoch_is_refused_and_an_acknowledgement_of_it_is_left_out(group, lanes):
    lane, old = lanes[MASTER][0], position(group, epoch=1)
    lane.send_unanswered(FrameKind.ACK_LOG, encode_read_log(old), time.monotonic() + WAIT_S)
    ask(lane, old)
    with pytest.raises(NotMasterError):
        answer(lane)


def test_a_read_that_waits_is_refused_when_another_replica_leads(group, lanes):
    ask(lanes[MASTER][0], position(group))
    eventually(lambda: group.master.account().lags, "the request")
    epoch = group.master.account().epoch
    group.master.obey(Follow("broker-a", MASTER, epoch + 1, SLAVE), None)
    with pytest.raises(NotMasterError):
        answer(lanes[MASTER][0])


def test_reads_that_wait_end_when_the_masters_disk_fails_and_later_ones_do_not_wait(group, lanes):
    first, second = lanes[MASTER][:2]
    ask(first, position(group, follower=7, learner=True, wait_s=READ_LOG_WAIT_MAX_S))
    eventually(lambda: group.master.account().lags, "the request")
    begun_s = time.monotonic()
    group.master.any_store.gate.fail(OSError(errno.EIO, os.strerror(errno.EIO)))
    for lane in (first, second):
        if lane is second:
            ask(second, position(group, follower=8, learner=True, wait_s=READ_LOG_WAIT_MAX_S))
        with pytest.raises(ServiceNotAvailableError, match="the log no longer grows: the disk of"):
            answer(lane)
    assert time.monotonic() - begun_s < READ_LOG_WAIT_MAX_S


def test_an_acknowledgement_settles_an_append_while_a_read_waits(group, lanes):
    lane = lanes[MASTER][0]
    started = group.master.start_append([make_batch([b"one"])])
    eventually(lambda: group.master.account().end_offset, "the flush")
    end = group.master.account().end_offset
    ask(lane, position(group, next_offset=end))
    assert started.settle(time.monotonic()) is None
    told = position(group, next_offset=end, acked_offset=end)
    lane.send_unanswered(FrameKind.ACK_LOG, encode_read_log(told), time.monotonic() + WAIT_S)
    assert eventually(lambda: started.settle(time.monotonic()), "an answer")


def test_a_read_that_waits_for_more_bytes_is_answered_when_the_slave_has_the_chunk_before(group, lanes):
    lane, asked = lanes[MASTER][0], position(group, min_bytes=1 << 20)
    ask(lane, asked)
    group.master.start_append([make_batch([b"one"])])
    eventually(lambda: group.master.account().end_offset, "the flush")
    assert not select.select([lane], [], [], 0)[0]
    lane.send_unanswered(FrameKind.ACK_LOG, encode_read_log(asked), time.monotonic() + WAIT_S)
    assert b"one" in bytes(decode_chunk(answer(lane).payload)[1])


def test_a_read_that_waits_for_more_bytes_returns_fewer_bytes_at_its_timeout(group, lanes):
    ask(lanes[MASTER][0], position(group, min_bytes=1 << 20, wait_s=0.2))
    group.master.start_append([make_batch([b"one"])])
    assert b"one" in bytes(decode_chunk(answer(lanes[MASTER][0]).payload)[1])


def test_a_chunk_that_does_not_continue_the_log_is_refused_and_changes_nothing(group, lanes):
    request, lane = position(group), lanes[SLAVE][0]
    chunk = encode_chunk_head(ChunkHead(4096, 0, 5000, None)) + b"x" * 100
    lane.send(FrameKind.APPEND_LOG, (encode_append_log(request.epoch), chunk), time.monotonic() + WAIT_S)
    with pytest.raises(InvalidArgumentError, match="but the log ends at"):
        answer(lane)
    lane.send(FrameKind.APPEND_LOG, (encode_append_log(request.epoch - 1), chunk), time.monotonic() + WAIT_S)
    with pytest.raises(NotMasterError):
        answer(lane)
    assert group.replicas[SLAVE].account().end_offset == request.next_offset


def test_two_chunks_on_their_way_are_answered_in_order_once_they_are_on_disk(group, lanes):
    reader, writer, offset = lanes[MASTER][0], lanes[SLAVE][0], position(group).next_offset
    group.master.start_append([make_batch([b"one" * 100])])
    group.master.start_append([make_batch([b"two" * 100])])
    ends = []
    for _ in range(2):
        ask(reader, position(group, next_offset=offset, max_bytes=1))
        chunk = answer(reader).payload
        writer.send(FrameKind.APPEND_LOG, (encode_append_log(position(group).epoch), chunk), time.monotonic() + WAIT_S)
        offset += len(decode_chunk(chunk)[1])
        ends.append(offset)
    for end in ends:
        next_offset, acked_offset, _ = decode_copied(writer.receive_next(time.monotonic() + WAIT_S).payload)
        assert (next_offset, acked_offset >= end) == (end, True)


def test_a_carrier_without_a_master_raises(group, lanes):
    following = group.replicas[SLAVE].following(0.0)
    assert following is not None
    carrier = LogCarrier(
        *(lanes[MASTER][0], lanes[SLAVE][0], following, SLAVE, following.position or 0),
        is_followed=lambda: True,
        on_copied=lambda copied_bytes: None,
        stopping=threading.Event(),
    )
    group.planes[MASTER].close()
    with pytest.raises(ServiceNotAvailableError, match="broke"):
        carrier.run()
