"""Values about topics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raymq.common.message import MessageQueue


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A topic in the list. `perm` is "RW", "R", "W" or ""; `messages` those that it holds, `rate` those that are put
    into it per second, over the last minute; None where no server answered. `attributes`: as `raymq topic list --json`
    shows them."""

    topic: str
    queues: int
    perm: str = "RW"
    messages: int | None = None
    rate: float | None = None
    groups: int | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TopicQueue:
    """A queue of a topic and the offsets it holds: [`min_offset`, `max_offset`). `oldest_ms`: when the first message
    that is kept was stored, None if the queue is empty. `error`: its store gave no answer; the rest is 0 then."""

    queue: MessageQueue
    min_offset: int = 0
    max_offset: int = 0
    oldest_ms: int | None = None
    error: str = ""

    @property
    def messages(self) -> int:
        """The number of messages that the queue holds."""
        return self.max_offset - self.min_offset


@dataclass(frozen=True, slots=True)
class TopicGroup:
    """A group that consumes a topic, with its lag in that topic."""

    group: str
    members: int
    lag: int
    lag_ms: int


@dataclass(frozen=True, slots=True)
class RouteRow:
    """The part of a topic's route in one broker group. `master`: the storage actor that leads, "" if nobody does."""

    broker_name: str
    read_queues: int
    write_queues: int
    perm: str
    master: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class TopicView:
    """All about one topic. `rate` and `bytes_rate`: put into it per second, over the last minute."""

    topic: str
    perm: str
    queues: tuple[TopicQueue, ...]
    groups: tuple[TopicGroup, ...]
    route: tuple[RouteRow, ...]
    attributes: Mapping[str, str] = field(default_factory=dict)
    order_config: str = ""
    rate: float | None = None
    bytes_rate: float | None = None
    missing: tuple[str, ...] = ()
    """Parts that could not be asked for, a sentence each."""
