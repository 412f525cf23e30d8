"""Place: what an official client does with a topic and a group that no other test uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

import raymq
from raymq.common.protocol.group import GroupConfig
from tests.support.gateway.official_client import OfficialClient, OfficialError
from tests.support.history.waiting import eventually

LANGUAGES = ("python", "node")
ARRIVES_S = 120.0
LEASE_S = 60.0
"""Time after which a message is delivered again that a killed gateway had leased."""
Records = list[dict[str, Any]]


class Place:
    """One test's client, with the names of a topic and a group that no other test uses. `endpoints`: the gateway."""

    def __init__(self, mq: raymq.Client, client: OfficialClient, endpoints: str, name: str) -> None:
        self.mq, self.client, self.endpoints = mq, client, endpoints
        self.topic = f"{name}-{client.language}"
        self.group = f"{self.topic}-g"

    def beside(self, client: OfficialClient) -> Place:
        """Return the same place for another client."""
        other = Place(self.mq, client, self.endpoints, "")
        other.topic, other.group = self.topic, self.group
        return other

    def create(self, message_type: str = "NORMAL", queues: int = 4, **options: Any) -> None:
        """Create the topic, and the group with `options`."""
        self.mq.admin.create_topic(self.topic, queues=queues, message_type=message_type)
        self.mq.admin.create_group(GroupConfig(self.group, **options))

    def open(self, kind: str, **arguments: Any) -> str:
        """Start a client: `producer`, `simple` or `push`. Returns the name under which requests find it."""
        name = f"{self.topic}-{kind}"
        places = {"topics": [self.topic]} if kind == "producer" else {"group": self.group, "topic": self.topic}
        self.client.call(f"open_{kind}", name=name, endpoints=self.endpoints, **places | arguments)
        return name

    def send(self, producer: str, *bodies: str, **fields: Any) -> list[str]:
        """Send messages, and return their ids."""
        messages = [{"topic": self.topic, "body": body, **fields} for body in bodies]
        return [one["id"] for one in self.client.call("send", name=producer, messages=messages)]

    def receive(self, consumer: str, count: int, /, **arguments: Any) -> Records:
        """Receive exactly `count` messages, in as many calls as needed. `arguments`: for each call."""
        found: Records = []

        def arrived() -> bool:
            found.extend(self.client.call("receive", name=consumer, **arguments))
            return len(found) >= count

        eventually(arrived, f"{count} messages", ARRIVES_S)
        assert len(found) == count, found
        return found

    def ack(self, consumer: str, records: Records) -> None:
        for one in records:
            self.client.call("ack", name=consumer, handle=one["handle"])

    def consumed(self, consumer: str, count: int) -> Records:
        """Return the records of a push consumer, or of a producer's checks, once there are `count` of them."""

        def records() -> Any:
            found = self.client.call("records", name=consumer)
            return found if len(found) >= count else None

        return eventually(records, f"{count} messages", ARRIVES_S)

    def start_load(self) -> None:
        """Create the topic and group, start a push consumer, send it a message, and then send messages until
        `check_load`."""
        self.create()
        producer, consumer = self.open("producer"), self.open("push")
        self.send(producer, "first")
        self.consumed(consumer, 1)
        self.client.call("start_load", name=producer, topic=self.topic, prefix="n", pause_s=0.02)

    def more_consumed(self, count: int) -> None:
        """Wait until the push consumer has got `count` further messages."""
        consumer = f"{self.topic}-push"
        self.consumed(consumer, len(self.client.call("records", name=consumer)) + count)

    def settled(self, dead_letters: int = 0) -> None:
        """Wait until the group has consumed all messages, and has this number of dead letters."""

        def summary() -> tuple[int, int]:
            found = self.mq.admin.group_summary(self.group)
            return found.lag, found.dead_letters

        eventually(lambda: summary() == (0, dead_letters), f"the end of {self.group}", ARRIVES_S)


def refused(client: OfficialClient, request: str, **arguments: Any) -> int | None:
    """Carry out a request that must fail, and return the code of the failure."""
    with pytest.raises(OfficialError) as failure:
        client.call(request, **arguments)
    return failure.value.code


def check_load(place: Place, outages: Sequence[tuple[int, int]], failures: str = "") -> str:
    """End a client's load. Check that its push consumer gets each message that was sent, and gets no message twice but
    for a kill. Returns the figures.

    `outages`: the times in ms of each kill and of the next start. `failures`: a text in the error of each failed send.
    """
    consumer = f"{place.topic}-push"
    load = place.client.call("end_load", name=f"{place.topic}-producer")
    assert load["ended"]
    assert [error for *_, error in load["failed"] if failures not in error] == []
    sent = {body: (begin_ms, end_ms) for body, begin_ms, end_ms in load["sent"]}

    def all_arrived() -> bool:
        return sent.keys() <= {one["body"] for one in place.client.call("records", name=consumer)}

    eventually(all_arrived, f"all messages of {place.topic}", LEASE_S + ARRIVES_S)
    place.settled()
    records = place.client.call("records", name=consumer)
    twice = [body for body, count in Counter(one["body"] for one in records).items() if count > 1]
    for body in twice:
        times = [one["at_ms"] for one in records if one["body"] == body] + list(sent.get(body, ()))
        near = [at_ms for at_ms in times for killed, served in outages if killed - 1000 <= at_ms <= served]
        assert near, f"{body} arrived twice, far from a kill: {times}, kills {outages}"
    failed = len(load["failed"])
    return f"{place.client.language}: {len(sent)} sent, {failed} sends failed, 0 lost, {len(twice)} twice"
