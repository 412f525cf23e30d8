"""Tests of a topic's attributes: RocketMQ's names and values, allowed changes, and invalid values."""

from __future__ import annotations

import pytest

from raymq.common.errors import InvalidArgumentError
from raymq.common.protocol.attributes import (
    CleanupPolicy,
    QueueType,
    TopicAttributes,
    TopicMessageType,
    attribute_changes,
    changed_attributes,
)
from raymq.common.protocol.bounds import BacklogBound, BacklogPolicy, bound_arguments


def test_rocketmqs_attributes_are_read_and_written_as_they_are():
    for text, values in (
        ({"message.type": "FIFO", "reserve.time": "3600000"}, (TopicMessageType.FIFO, CleanupPolicy.DELETE, 3_600_000)),
        ({"cleanup.policy": "COMPACTION"}, (TopicMessageType.UNSPECIFIED, CleanupPolicy.COMPACTION, None)),
    ):
        assert TopicAttributes.parse(text) == TopicAttributes(*values)
        assert TopicAttributes.parse(text).mapping() == text


@pytest.mark.parametrize(
    "text", [{}, {"message.type": "UNSPECIFIED"}, {"reserve.time": "-1"}, {"queue.type": "SimpleCQ"}]
)
def test_a_topic_without_attributes_takes_everything(text):
    assert TopicAttributes.parse(text) == TopicAttributes()
    assert not TopicAttributes.parse(text).restricts


@pytest.mark.parametrize(
    "text",
    [
        {"message.type": "fifo"},
        {"cleanup.policy": "KEEP"},
        {"queue.type": "batch"},
        {"cleanup.policy": "COMPACTION", "reserve.time": "60000"},
        {"cleanup.policy": "COMPACTION", "queue.type": "BatchCQ"},
        {"reserve.time": "0"},
        {"reserve.time": "-2"},
        {"reserve.time": "1h"},
        {"reserve.time": "٣"},
        {"reserve.time": str(10**12)},
        {"backlog.max.messages": "0"},
        {"backlog.max.messages": "٣"},
        {"backlog.max.messages": "9" * 5000},
        {"backlog.max.bytes": "4095"},
        {"backlog.policy": "refuse"},
        {"backlog.groups": "billing"},
        {"backlog.max.messages": "9", "backlog.policy": "wait"},
        {"backlog.max.messages": "9", "backlog.policy": "drop"},
        {"backlog.max.messages": "9", "backlog.groups": "not legal"},
        {"backlog.max.messages": "9", "backlog.groups": ",".join(f"g{number}" for number in range(17))},
        {"backlog.max.messages": "9", "cleanup.policy": "COMPACTION"},
    ],
)
def test_a_value_that_cannot_be_is_refused(text):
    with pytest.raises(InvalidArgumentError):
        TopicAttributes.parse(text)


@pytest.mark.parametrize("seconds", [-1, 59.9, float("nan"), float("inf"), True, "1h"])
def test_a_time_that_cannot_be_is_refused(seconds):
    with pytest.raises(InvalidArgumentError):
        attribute_changes(None, None, seconds)


def test_a_change_sets_named_attributes_and_an_empty_text_removes_one():
    known = {"message.type": "FIFO", "queue.type": "SimpleCQ"}
    assert changed_attributes("orders", known, attribute_changes(reserve_time_s=60)) == {
        **known,
        "reserve.time": "60000",
    }
    assert changed_attributes("orders", known, attribute_changes("unspecified")) == {"queue.type": "SimpleCQ"}


def test_the_cleanup_policy_stays_as_the_topic_was_created():
    with pytest.raises(InvalidArgumentError, match="orders"):
        changed_attributes("orders", {}, {"cleanup.policy": "COMPACTION"})
    with pytest.raises(InvalidArgumentError, match="cannot be changed"):
        changed_attributes("orders", {"cleanup.policy": "COMPACTION"}, {"cleanup.policy": ""})


@pytest.mark.parametrize("text", ["batch", "BATCH", "BatchCQ", "batchcq", QueueType.BATCH])
def test_the_type_of_queues_has_rocketmqs_value(text):
    changes = attribute_changes(queue_type=text)
    assert changes == {"queue.type": "BatchCQ"}
    values = TopicAttributes.parse(changes)
    assert (values.has_inner_batches, values.restricts, values.takes_normal) == (True, True, False)
    assert values.mapping() == changes
    assert attribute_changes(queue_type="simple") == {"queue.type": ""}
    with pytest.raises(InvalidArgumentError, match="simple or batch"):
        attribute_changes(queue_type="light")


def test_the_type_of_queues_stays_as_the_topic_was_created():
    with pytest.raises(InvalidArgumentError, match="cannot be changed"):
        changed_attributes("orders", {}, {"queue.type": "BatchCQ"})


def test_a_bound_is_stored_as_attributes_and_read_again():
    changes = attribute_changes(max_backlog=9, max_backlog_bytes=5000, backlog_policy="DROP", backlog_groups=["b", "a"])
    bound = BacklogBound(9, 5000, BacklogPolicy.DROP, ("a", "b"))
    assert TopicAttributes.parse(changes).bound == bound
    assert TopicAttributes.parse(changes).mapping() == changes == bound.mapping()
    assert attribute_changes(**bound_arguments(bound)) == changes
    assert attribute_changes(backlog_groups="billing", max_backlog=1)["backlog.groups"] == "billing"


def test_a_removed_limit_removes_the_whole_bound():
    known = {"backlog.max.messages": "9", "backlog.policy": "refuse", "backlog.groups": "a", "message.type": "FIFO"}
    assert changed_attributes("orders", known, attribute_changes(max_backlog=0)) == {"message.type": "FIFO"}
    assert changed_attributes("orders", known, attribute_changes(**bound_arguments(None))) == {"message.type": "FIFO"}
    kept = changed_attributes("orders", known, attribute_changes(max_backlog=0, max_backlog_bytes=4096))
    assert TopicAttributes.parse(kept).bound == BacklogBound(None, 4096, BacklogPolicy.REFUSE, ("a",))
