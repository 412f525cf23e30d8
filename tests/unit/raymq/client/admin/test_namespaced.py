"""Tests of an Admin within a namespace. Its calls send names with the namespace, return names without it, and hide
other namespaces."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from raymq.client.admin.admin import Admin
from raymq.client.admin.dead_letters import DeadLetters
from raymq.client.admin.groups import NewOffsets
from raymq.client.admin.namespaced import NAME_PARAMETERS, OTHER_PARAMETERS, NamespacedCalls
from raymq.client.admin.track import MessageTrack, TrackState
from raymq.common.errors import TopicNotExistError
from raymq.common.message import MessageExt, MessageQueue
from raymq.common.namespaces import Namespace

OURS, THEIRS, SYSTEM = "team-a%orders", "team-b%orders", "SCHEDULE_TOPIC_XXXX"
STORED = MessageQueue(OURS, "broker-a", 1)
SHOWN = MessageQueue("orders", "broker-a", 1)
MESSAGE = MessageExt(OURS, b"?", None, (), {}, 0, "broker-a", 1, 7, 0, 0, 0, "", "", "ID", "", 0, 0, {})


@dataclass(frozen=True)
class Nested:
    group: str
    queues: tuple[MessageQueue, ...]
    subscriptions: Mapping[str, str]
    why: str = OURS


class Double:
    """Fake Admin. Its methods return the arguments with which they are called, or `answer` if the test sets
    one."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.given: list[Any] = []

    def describe_topic(self, topic: str, queue: MessageQueue | None = None, *, key: str = "") -> Any:
        """Record the arguments of the call."""
        self.given.append((topic, queue, key))
        return self.answer

    def list_topics(self) -> Any:
        return self.answer

    def create_topics(self, topics: Mapping[str, int]) -> None:
        self.given.append(topics)

    def message_track(self, message: MessageExt) -> Any:
        self.given.append(message.topic)
        return self.answer

    def fail(self, topic: str) -> None:
        raise TopicNotExistError(topic)

    def each(self) -> Iterator[Any]:
        yield from self.answer


def within(double: Double) -> Any:
    return NamespacedCalls(double, Namespace("team-a"))


def test_arguments_are_stored_names() -> None:
    double = Double()
    admin = within(double)
    admin.describe_topic("orders", SHOWN, key="orders")
    admin.describe_topic(topic=OURS)
    admin.create_topics({"orders": 4, "bills": 1})
    admin.message_track(MESSAGE._in_queue("orders", 1))
    assert double.given == [
        (OURS, STORED, "orders"),
        (OURS, None, ""),
        {OURS: 4, "team-a%bills": 1},
        OURS,
    ]


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        (STORED, SHOWN),
        ([STORED, MessageQueue(THEIRS, "broker-a", 0), MessageQueue(SYSTEM, "broker-a", 0)], [SHOWN]),
        ({STORED: 5}, {SHOWN: 5}),
        (
            Nested("team-a%g", (STORED,), {OURS: "*", THEIRS: "*"}),
            Nested("g", (SHOWN,), {"orders": "*"}),
        ),
        ([MessageTrack("team-a%g", TrackState.DEAD), MessageTrack("team-b%g", TrackState.DEAD)],
         [MessageTrack("g", TrackState.DEAD)]),
        (MESSAGE, MESSAGE._in_queue("orders", 1)),
        (7, 7), (None, None), ("a text", "a text"),
    ],
    ids=["queue", "queues", "mapping", "nested", "list", "message", "number", "none", "text"],
)  # fmt: skip
def test_results_are_shown_names(stored: Any, shown: Any) -> None:
    assert within(Double(stored)).describe_topic("orders") == shown


def test_lists_contain_only_names_of_the_namespace() -> None:
    assert within(Double([OURS, THEIRS, SYSTEM, "orders", "%RETRY%team-a%g"])).list_topics() == ["orders", "%RETRY%g"]
    assert list(within(Double([STORED, MessageQueue(THEIRS, "b", 0)])).each()) == [SHOWN]


def test_a_mapping_of_a_kind_of_its_own_stays_one() -> None:
    offsets = NewOffsets({STORED: 5}, {STORED: 3})
    found = within(Double(offsets)).describe_topic("orders")
    assert (type(found), dict(found), found.old) == (NewOffsets, {SHOWN: 5}, {SHOWN: 3})
    assert (dict(offsets), offsets.old) == ({STORED: 5}, {STORED: 3})


def test_errors_use_names_without_the_namespace() -> None:
    with pytest.raises(TopicNotExistError) as caught:
        within(Double()).fail("orders")
    assert "team-a" not in str(caught.value)


def test_errors_that_an_iterator_raises_name_topics_as_the_namespace_shows_them() -> None:
    def answer() -> Iterator[Any]:
        yield STORED
        raise TopicNotExistError("team-a%ordrs", ("team-a%orders",))

    found = within(Double(answer())).each()
    assert next(found) == SHOWN
    with pytest.raises(TopicNotExistError) as caught:
        next(found)
    assert (caught.value.topic, caught.value.nearest) == ("ordrs", ("orders",))
    assert "orders" in str(caught.value)


def test_every_parameter_of_every_call_is_known_to_hold_names_or_not() -> None:
    calls = [*inspect.getmembers(Admin, inspect.isfunction), *inspect.getmembers(DeadLetters, inspect.isfunction)]
    public = [(name, call) for name, call in calls if not name.startswith("_")]
    found = {parameter for _, call in public for parameter in inspect.signature(call).parameters} - {"self"}
    assert found - NAME_PARAMETERS - OTHER_PARAMETERS == set()
    assert (NAME_PARAMETERS | OTHER_PARAMETERS) - found == set()
    assert not NAME_PARAMETERS & OTHER_PARAMETERS
