"""Tests of a group's committed offsets on several brokers. Any broker may fail alone."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from raymq.client.consumer import group_offsets as module
from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.common.errors import GroupNotExistError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset, StartOffsetQuery

A, B, C = (MessageQueue("orders", broker, 0) for broker in "abc")

COMMITS_AT_ITS_END = """
import atexit
from types import SimpleNamespace
from raymq.client.consumer import group_offsets
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import CommitAnswer, OffsetCommit

def call(name, method, *args, timeout_s):
    calls.append((name, method))
    return CommitAnswer()

calls = []

group_offsets.broker_client = lambda name: SimpleNamespace(call=lambda *args, **more: call(name, *args, **more))
commits = {MessageQueue("orders", broker, 0): OffsetCommit(5, 1, 0) for broker in "ab"}
atexit.register(lambda: print(sorted(calls)))
atexit.register(group_offsets.GroupOffsets("g").commit_offsets, commits)
"""


class Brokers:
    """Fake of all brokers. It has an answer for each broker name and method, and records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.answers: dict[str, list] = {}
        self._lock = threading.Lock()

    def actor(self, name: str) -> Brokers:
        self_, outer = self, name

        class One:
            def call(self, method, *args, timeout_s):
                return self_.call(outer, method, *args)

        return One()

    def call(self, name, method, *args):
        with self._lock:
            self.calls.append((name, method, *args))
            answer = self.answers[name].pop(0) if self.answers.get(name) else CommitAnswer()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def brokers(monkeypatch):
    brokers = Brokers()
    monkeypatch.setattr(module, "broker_client", brokers.actor)
    return brokers


def test_each_broker_gets_the_commits_of_its_queues(brokers):
    commits = {queue: OffsetCommit(5, 1, 0) for queue in (A, B, MessageQueue("bills", "a", 3))}
    assert GroupOffsets("g").commit_offsets(commits) == CommitAnswer()
    assert sorted(brokers.calls, key=lambda call: call[0]) == [
        ("a", "commit_offsets", "g", {"orders": {0: commits[A]}, "bills": {3: commits[A]}}),
        ("b", "commit_offsets", "g", {"orders": {0: commits[B]}}),
    ]


def test_a_program_that_ends_can_still_commit_at_several_brokers():
    done = subprocess.run(
        [sys.executable, "-c", COMMITS_AT_ITS_END], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[('a', 'commit_offsets'), ('b', 'commit_offsets')]\n"
    assert done.stderr == ""


def test_nothing_to_commit_asks_nobody(brokers):
    assert GroupOffsets("g").commit_offsets({}) == CommitAnswer()
    assert brokers.calls == []


def test_the_brokers_answers_are_one(brokers):
    brokers.answers = {
        "a": [CommitAnswer(reset={A: QueueOffset(3, 1)})],
        "b": [CommitAnswer(fenced=frozenset([B]))],
        "c": [CommitAnswer(gone=frozenset([C]))],
    }
    answer = GroupOffsets("g").commit_offsets({queue: OffsetCommit(5, 1, 0) for queue in (A, B, C)})
    assert answer == CommitAnswer({A: QueueOffset(3, 1)}, frozenset([B]), frozenset([C]))


def test_a_broker_that_is_restarted_is_asked_again(brokers):
    brokers.answers = {"a": [ServiceNotAvailableError("restarting"), CommitAnswer(fenced=frozenset([A]))]}
    assert GroupOffsets("g").commit_offsets({A: OffsetCommit(5, 1, 0)}).fenced == {A}


def test_one_brokers_failure_is_raised_and_the_others_have_committed(brokers):
    brokers.answers = {"a": [GroupNotExistError("g")]}
    with pytest.raises(GroupNotExistError):
        GroupOffsets("g").commit_offsets({queue: OffsetCommit(5, 1, 0) for queue in (A, B)})
    assert {call[0] for call in brokers.calls} == {"a", "b"}


def test_a_start_is_asked_of_the_queues_broker(brokers):
    brokers.answers = {"b": [QueueOffset(7, 2)]}
    assert GroupOffsets("g").start_offset(B, StartOffsetQuery(), 9) == QueueOffset(7, 2)
    assert brokers.calls == [("b", "start_offset", "g", B, StartOffsetQuery(), 9)]


def test_the_starts_of_many_queues_are_asked_with_one_call_to_each_broker(brokers):
    other = MessageQueue("orders", "a", 3)
    brokers.answers = {"a": [{"orders": {0: QueueOffset(7, 2), 3: QueueOffset(0)}}], "b": [{}]}
    starts = GroupOffsets("g").start_offsets({A: 4, other: 5, B: 6}, StartOffsetQuery())
    # Queue B is missing from the result: broker "b" does not have its topic, and so returned no start offset.
    assert starts == {A: QueueOffset(7, 2), other: QueueOffset(0)}
    assert brokers.calls == [
        ("a", "start_offsets", "g", {"orders": {0: 4, 3: 5}}, StartOffsetQuery()),
        ("b", "start_offsets", "g", {"orders": {0: 6}}, StartOffsetQuery()),
    ]


def test_the_starts_of_more_queues_than_one_call_takes_are_asked_in_several(brokers, monkeypatch):
    monkeypatch.setattr(module, "STARTS_PER_CALL", 3)
    queues = [MessageQueue(topic, "a", queue_id) for topic in ("x", "y", "z") for queue_id in (0, 1)]
    brokers.answers = {"a": [{"x": {0: QueueOffset(1)}}, {"z": {1: QueueOffset(2)}}]}
    starts = GroupOffsets("g").start_offsets(dict.fromkeys(queues, 1), StartOffsetQuery())
    assert starts == {queues[0]: QueueOffset(1), queues[5]: QueueOffset(2)}
    assert [sorted(call[3]) for call in brokers.calls] == [["x", "y"], ["z"]]


def test_the_committed_offsets_of_many_queues_take_one_call_for_each_topic_and_broker(brokers):
    other = MessageQueue("payments", "a", 0)
    brokers.answers = {"a": [{0: 7, 999: 1}, {}], "b": [{0: 9}]}
    assert GroupOffsets("g").committed_offsets([A, other, B]) == {A: 7, B: 9}
    assert brokers.calls == [
        ("a", "committed_offsets", "g", "orders"),
        ("a", "committed_offsets", "g", "payments"),
        ("b", "committed_offsets", "g", "orders"),
    ]
