"""Tests of the sweep that removes a group's offsets of topics that the group no longer consumes, on a state log with a
fake store."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from actors.broker.group_methods import GroupMethods
from actors.broker.state_log import StateLog
from raymq.common.errors import GroupNotExistError
from raymq.common.protocol.group import CommitAnswer, OffsetCommit
from raymq.common.protocol.store import QueueBounds
from tests.support.clients.fakes import WAIT_S
from tests.unit.actors.broker.test_state_log import Sender, Store


class Groups(GroupMethods):
    """The group methods of a broker on a fake store. `first`: the first offset of the queues of each topic."""

    def __init__(self) -> None:
        self.first = {"orders": 0, "bills": 0}
        self.subscriptions: dict[str, set[str]] | None = None
        state_store = Store("storage-broker-a-0")
        log = StateLog("broker-a", state_store, Sender(state_store))  # type: ignore[arg-type]  # a fake
        log.load()
        store: Any = SimpleNamespace(
            bounds_of_queues=lambda queues: [QueueBounds(self.first[topic], 50, 0) for topic, _ in queues]
        )
        settings: Any = SimpleNamespace(broker_name="broker-a")
        super().__init__(settings, log, store, SimpleNamespace(count=lambda *_: None))  # type: ignore[arg-type]
        for topic in self.first:
            log.change(lambda state, topic=topic: state.decide_topic(topic, 2, 2))
        log.change(lambda state: state.decide_group("billing"))

    def delete_topic(self, topic: str) -> None:
        raise NotImplementedError

    def _change(self, decide: Any) -> bool:
        return self._log.change(decide)

    def commit_offsets(self, group: str, commits: Mapping[str, Mapping[int, OffsetCommit]]) -> CommitAnswer:
        """Commit offsets over a lane (direct socket connection) as a client does, and wait for the result."""
        answer: Future[CommitAnswer] = Future()
        self._commit_soon(group, commits, answer.set_result, answer.set_exception)
        return answer.result(WAIT_S)

    def _subscriptions(self) -> Mapping[str, Collection[str]] | None:
        return self.subscriptions


@pytest.fixture
def groups():
    groups = Groups()
    for topic in ("orders", "bills"):
        groups.commit_offsets("billing", {topic: {0: OffsetCommit(10, 0, 0), 1: OffsetCommit(20, 0, 0)}})
    yield groups
    groups._log.close()


def test_offsets_of_a_topic_that_was_left_go_once_its_messages_are_deleted(groups):
    groups.subscriptions = {"billing": {"orders"}}
    groups._sweep_offsets()
    assert groups.group_topics("billing") == ["bills", "orders"]
    groups.first["bills"] = 19
    groups._sweep_offsets()
    assert groups.group_topics("billing") == ["bills", "orders"]
    groups.first |= {"bills": 20, "orders": 30}
    groups._sweep_offsets()
    assert groups.group_topics("billing") == ["orders"]
    assert groups.committed_offsets("billing", "bills") == {}


@pytest.mark.parametrize("subscriptions", [None, {}, {"audit": {"x"}}, {"billing": {"orders", "bills"}}])
def test_offsets_stay_while_a_consumer_may_need_them(groups, subscriptions):
    groups.subscriptions = subscriptions
    groups.first |= {"bills": 50, "orders": 50}
    groups._sweep_offsets()
    assert groups.group_topics("billing") == ["bills", "orders"]


def test_deleted_offsets_can_be_committed_again(groups):
    assert groups.delete_offsets("billing", ["bills", "unknown"]) == ["bills"]
    assert groups.delete_offsets("billing", ["bills"]) == []
    with pytest.raises(GroupNotExistError):
        groups.delete_offsets("nobody", ["bills"])
    answer = groups.commit_offsets("billing", {"bills": {0: OffsetCommit(3, 0, 0)}})
    assert not answer.fenced
    assert groups.committed_offsets("billing", "bills") == {0: 3}
