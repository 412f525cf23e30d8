"""Tests of exporting topics, groups and offsets as a document. Exported documents can be imported, and an error names
each invalid entry of a document."""

from __future__ import annotations

import json

import pytest

from raymq.client.admin.upkeep.metadata import GroupMetadata, Metadata, TopicMetadata
from raymq.common.errors import InvalidArgumentError
from raymq.common.protocol.group import GroupConfig

WHOLE = Metadata(
    {
        "orders": TopicMetadata({"broker-a": 2, "broker-b": 1}, 4, "broker-a:2", {"message.type": "FIFO"}),
        "bills": TopicMetadata({"broker-b": 4}),
    },
    {"billing": GroupMetadata(GroupConfig("billing", retry_max_times=3, consume_enable=False), ("bills",))},
    {"billing": {"orders": {"broker-a": {0: 17, 1: 0}, "broker-b": {0: 5}}}},
)


def test_written_metadata_can_be_read():
    text = WHOLE.to_json()
    assert Metadata.from_json(text) == WHOLE
    assert Metadata.from_json(text).to_json() == text
    assert json.loads(text)["groups"]["billing"] == {
        "consume_enable": False,
        "consume_broadcast_enable": True,
        "retry_queue_nums": 1,
        "retry_max_times": 3,
        "retry_intervals_s": [],
        "ordered": None,
        "forbidden": ["bills"],
    }
    assert Metadata.from_json(Metadata().to_json()) == Metadata()


def test_missing_metadata_has_default_values():
    text = '{"version": 1, "topics": {"t": {"queues": {"a": 1}}}, "groups": {"g": {}}}'
    assert Metadata.from_json(text) == Metadata({"t": TopicMetadata({"a": 1})}, {"g": GroupMetadata(GroupConfig("g"))})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "was not written by `raymq export`"),
        ('{"version": 2}', "was not written by `raymq export`"),
        ('{"version": 1, "users": {}}', "not 'users'"),
        ('{"version": 1, "topics": []}', "topics must be a table"),
        ('{"version": 1, "topics": {"t": {"queue": 1}}}', "topic 't' must have"),
        ('{"version": 1, "topics": {"t": {}}}', "queues of topic 't'"),
        ('{"version": 1, "topics": {"t": {"queues": {"a": 0}}}}', "queues of topic 't'"),
        ('{"version": 1, "topics": {"t": {"queues": {"a": true}}}}', "queues of topic 't'"),
        ('{"version": 1, "topics": {"%RETRY%g": {"queues": {"a": 1}}}}', "is a system topic"),
        ('{"version": 1, "topics": {"t": {"queues": {"a": 1}, "attributes": {"message.type": "X"}}}}', "message.type"),
        ('{"version": 1, "topics": {"t": {"queues": {"a": 1}, "order_config": "a"}}}', "order configuration"),
        ('{"version": 1, "groups": {"g": {"retries": 1}}}', "group 'g' must have"),
        ('{"version": 1, "groups": {"g": {"forbidden": "t"}}}', "forbidden topics of group 'g'"),
        ('{"version": 1, "offsets": {"g": {"t": {"a": {"x": 1}}}}}', "offsets must be numbers"),
        ('{"version": 1, "offsets": {"g": {"t": 5}}}', "offsets must be numbers"),
        ('{"version": 1, "offsets": {"g": {"t": {"a": {"0": -1}}}}}', "numbers from 0"),
        ('{"version": 1, "offsets": {"g": {"t": {"a": {"0": "1"}}}}}', "numbers from 0"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_part_that_is_wrong(text, says):
    with pytest.raises(InvalidArgumentError, match=says):
        Metadata.from_json(text)
