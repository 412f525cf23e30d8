"""Tests of multi-dispatch: a record's properties name additional queues, and each of these queues has an entry (unit)
for the record. Implausible entries are skipped."""

from __future__ import annotations

import pytest

from raymq.records.format.dispatch import DispatchView
from storage.dispatch.multi_dispatch import light_queue_units


def view_of(names: str, offsets: str, *, topic: str = "orders", queue_id: int = 3) -> DispatchView:
    properties = {"INNER_MULTI_DISPATCH": names, "INNER_MULTI_QUEUE_OFFSET": offsets}
    filled = {name: value for name, value in properties.items() if value}
    return DispatchView(100, topic, queue_id, 0, 0, 0, 0, 0, 0, filled)


@pytest.mark.parametrize(
    ("names", "offsets", "expected"),
    [
        ("%LMQ%a", "7", [(("%LMQ%a", 0), 7)]),
        ("%LMQ%a,%LMQ%b", "7,0", [(("%LMQ%a", 0), 7), (("%LMQ%b", 0), 0)]),
        ("%LMQ%a,%LMQ%b,", "7,1,,", [(("%LMQ%a", 0), 7), (("%LMQ%b", 0), 1)]),
        ("%LMQ%a,%LMQ%a", "7,7", [(("%LMQ%a", 0), 7)]),
        ("other", "7", [(("other", 3), 7)]),
        ("orders", "7", []),
        ("%LMQ%a", "", []),
        ("", "7", []),
        ("%LMQ%a,%LMQ%b", "7", []),
        ("%LMQ%a/b,%LMQ%b", "7,8", [(("%LMQ%b", 0), 8)]),
        ("..,%LMQ%b", "7,8", [(("%LMQ%b", 0), 8)]),
        ("%LMQ%" + "x" * 251 + ",%LMQ%b", "7,8", [(("%LMQ%b", 0), 8)]),
        ("%LMQ%a,%LMQ%b", "-1,x", []),
        ("%LMQ%a,%LMQ%b", "100,101", [(("%LMQ%a", 0), 100)]),
        ("%LMQ%a", "9" * 5000, []),
    ],
)
def test_light_queue_units(names, offsets, expected):
    """Read the names of light queues, and the offsets in them, from a record's properties. The record is at physical
    offset 9,100. Before it the log has space for at most 100 messages, so offsets above 100 are implausible and
    skipped."""
    assert light_queue_units(view_of(names, offsets), 9100) == expected


@pytest.mark.parametrize("topic", ["%RETRY%g", "rmq_sys_wheel_timer", "SCHEDULE_TOPIC_XXXX"])
def test_messages_of_these_topics_may_be_in_other_queues_too(topic):
    """In a log of RocketMQ 4.9, retried, timed and delayed messages may also have offsets in other queues. A message
    without such offsets is in no other queue."""
    assert light_queue_units(view_of("%LMQ%a", "7", topic=topic), 9100) == [(("%LMQ%a", 0), 7)]
    assert light_queue_units(view_of("%LMQ%a", "", topic=topic), 9100) == []
