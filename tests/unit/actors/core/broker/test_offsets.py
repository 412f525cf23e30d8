"""Tests of offset commits. The broker ignores a commit that lowers the offset, comes from an earlier owner of the
queue, or was sent before a reset."""

from __future__ import annotations

import pytest

from actors.core.broker.offsets import OffsetTable, Owners, is_dead, judge_commits
from raymq.common.errors import InvalidArgumentError
from raymq.common.protocol.group import OffsetCommit, QueueOffset


def table(offset: int = 10, version: int = 0) -> OffsetTable:
    made = OffsetTable()
    made.set("g", "t", {0: offset}, {0: version})
    return made


def judge(offset: int | None, generation: int = 1, version: int = 0, *, backwards: bool = False, at=None, owners=None):
    commit = OffsetCommit(offset, generation, version, backwards)
    return judge_commits(at or table(), owners or Owners(), "g", "t", {0: commit})


@pytest.mark.parametrize(("offset", "counts"), [(9, False), (10, False), (11, True)])
def test_a_commit_never_goes_back(offset, counts):
    assert judge(offset).offsets == ({0: offset} if counts else {})


@pytest.mark.parametrize(("offset", "counts"), [(9, True), (10, False), (11, True)])
def test_a_lower_offset_is_committed_only_if_the_commit_is_marked_backwards(offset, counts):
    assert judge(offset, backwards=True).offsets == ({0: offset} if counts else {})


def test_the_first_commit_may_be_anywhere():
    assert judge(0, at=OffsetTable()).offsets == {0: 0}


def test_a_question_commits_nothing():
    verdict = judge(None)
    assert (verdict.offsets, verdict.reset, verdict.fenced) == ({}, {}, [])


def test_a_negative_offset_is_refused():
    with pytest.raises(InvalidArgumentError):
        judge(-1)


def test_an_older_owner_is_fenced_once_a_newer_one_has_begun():
    owners = Owners()
    assert judge(11, 5, owners=owners).offsets
    owners.note("g", "t", 0, 6)
    assert judge(12, 5, owners=owners).fenced == [0]
    assert judge(12, 5, backwards=True, owners=owners).fenced == [0]
    assert judge(None, 5, owners=owners).fenced == [0]
    assert judge(12, 6, owners=owners).offsets == {0: 12}


def test_commits_of_a_newer_generation_fence_as_its_start_does():
    """A commit with a newer generation fences the queue's earlier owners. Usually the new owner's request for the start
    offset has already fenced them, but after a restart the broker may have no record of this request."""
    owners = Owners()
    judge(11, 7, owners=owners)
    assert judge(12, 6, owners=owners).fenced == [0]


def test_a_consumer_outside_of_the_group_neither_fences_nor_is_fenced():
    owners = Owners()
    owners.note("g", "t", 0, 6)
    assert judge(12, 0, owners=owners).offsets == {0: 12}
    assert judge(12, 6, owners=owners).fenced == []


def test_an_owner_is_of_one_queue_of_one_group():
    owners = Owners()
    owners.note("g", "t", 0, 6)
    assert not owners.fences("g", "t", 1, 5)
    assert not owners.fences("h", "t", 0, 5)
    assert not owners.fences("g", "u", 0, 5)


@pytest.mark.parametrize("what", [{"group": "g"}, {"topic": "t"}])
def test_owners_are_forgotten_with_their_group_or_topic(what):
    owners = Owners()
    owners.note("g", "t", 0, 6)
    owners.note("h", "u", 0, 6)
    owners.forget(**what)
    assert not owners.fences("g", "t", 0, 5)
    assert owners.fences("h", "u", 0, 5)


@pytest.mark.parametrize("offset", [None, 5, 500])
def test_a_commit_from_before_a_reset_is_ignored_and_gets_the_new_offset(offset):
    verdict = judge(offset, version=0, backwards=True, at=table(3, version=1))
    assert (verdict.offsets, verdict.reset) == ({}, {0: QueueOffset(3, 1)})


def test_a_commit_of_after_a_reset_counts():
    assert judge(5, version=1, at=table(3, version=1)).offsets == {0: 5}


def test_setting_offsets_keeps_the_reset_version_unless_it_is_given():
    at = table(3, version=4)
    at.set("g", "t", {0: 9, 1: 1}, {})
    assert at.get("g", "t", 0) == QueueOffset(9, 4)
    assert at.get("g", "t", 1) == QueueOffset(1, 0)


def test_offsets_that_are_dropped_are_as_if_there_had_been_none():
    table = OffsetTable()
    table.set("billing", "orders", {0: 5, 1: 7}, {})
    table.set("billing", "bills", {0: 1}, {})
    table.set("audit", "orders", {0: 2}, {})
    table.drop("billing", "orders")
    table.drop("billing", "unknown")
    assert table.topics("billing") == ["bills"]
    assert table.committed("audit", "orders") == {0: 2}
    assert table.version("billing", "orders", 0) == 0


def test_offsets_are_dead_when_no_queue_holds_a_message_before_them():
    assert is_dead({0: 5, 1: 7}, {0: 5, 1: 9})
    assert is_dead({0: 0}, {0: 0})
    assert not is_dead({0: 5, 1: 7}, {0: 5, 1: 6})
    assert not is_dead({0: 1}, {})
