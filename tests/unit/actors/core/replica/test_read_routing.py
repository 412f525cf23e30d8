"""Tests of the rule that chooses the replica from which a client reads."""

from __future__ import annotations

import pytest

from actors.core.replica.read_routing import ReadRouting
from raymq.common.message import PullStatus
from raymq.common.protocol.store import FetchRequest, FetchResult


def guided(routing: ReadRouting, *, in_memory: bool, queue_id: int = 0, next_offset: int = 50) -> str:
    result = FetchResult(PullStatus.NO_NEW_MESSAGE, next_offset, 10, 90, b"", 0)
    answer = routing.route(FetchRequest("orders", queue_id, 40, 10), result, in_memory=in_memory)
    assert (answer.status, answer.next_offset) == (result.status, next_offset)
    return answer.pull_from


def test_a_master_sends_readers_of_old_messages_to_its_slaves():
    routing = ReadRouting(True, ["slave-1", "slave-2"])
    assert [guided(routing, in_memory=False, queue_id=q) for q in range(3)] == ["slave-1", "slave-2", "slave-1"]
    assert guided(routing, in_memory=True) == ""


def test_a_slave_keeps_readers_of_old_messages_and_sends_others_to_the_master():
    routing = ReadRouting(False, ["master"])
    assert guided(routing, in_memory=False) == ""
    assert guided(routing, in_memory=True) == "master"


@pytest.mark.parametrize("offset", [9, 91])
def test_a_reader_of_offsets_that_a_slave_lacks_goes_to_the_master(offset):
    assert guided(ReadRouting(False, ["master"]), in_memory=False, next_offset=offset) == "master"


@pytest.mark.parametrize("is_master", [True, False])
def test_where_there_is_nobody_else_readers_stay(is_master):
    assert guided(ReadRouting(is_master), in_memory=not is_master) == ""
