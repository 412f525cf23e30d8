"""Tests of the list of deleted topics that a replica reads from the broker's snapshot."""

from __future__ import annotations

from actors.core.broker.snapshot import dump_snapshot
from actors.core.broker.state import BrokerState
from actors.core.replica.deleted_topics import topics_of_state
from raymq.common.protocol.route import TopicConfig
from storage.queue.topic_attributes import TOPICS_FILE


def test_a_snapshot_names_its_topics_and_its_position() -> None:
    state = BrokerState()
    assert topics_of_state(dump_snapshot(state, 3)[TOPICS_FILE]) == (frozenset(), 3)
    state.topics = {name: TopicConfig(name, 4, 4) for name in ("orders", "%RETRY%shop")}
    assert topics_of_state(dump_snapshot(state, 7)[TOPICS_FILE]) == (frozenset(state.topics), 7)


def test_a_file_of_rocketmq_has_no_position() -> None:
    assert topics_of_state('{"dataVersion":{},"topicConfigTable":{"orders":{}}}') == (frozenset({"orders"}), 0)
