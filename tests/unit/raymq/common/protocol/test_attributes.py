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
