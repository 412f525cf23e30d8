"""The send check, which tests every broker group: it sends messages to a queue of each group, reads them back, and
measures the times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final, Protocol

from raymq.client.admin.base import unknown_broker
from raymq.client.admin.topics import TopicAdmin
from raymq.common.errors import InvalidArgumentError, RaymqError, TopicNotExistError
from raymq.common.message import Message, MessageQueue, PullResult, SendResult

CHECK_TOPIC: Final = "raymq-check"
"""Topic for send checks. It has a queue in each broker group, and the first check creates it."""


class Sends(Protocol):
    """A function with the signature of `Producer.send`."""

    def __call__(self, message: Message, *, queue: MessageQueue) -> SendResult: ...


@dataclass(frozen=True, slots=True)
class SendCheck:
    """The result of a broker group's send check. `sent`: the number of messages that were sent and read back. `failed`:
    the number of failed messages.

    `send_ms` is the time in ms from the call to the acknowledgement, `round_trip_ms` the time until the message was
    read back. These two are medians; `send_max_ms` and `round_trip_max_ms` are the longest times. All times are 0 if no
    message was read back. `error`: the last failure.
    """

    broker_name: str
    sent: int
    failed: int
    send_ms: float = 0.0
    send_max_ms: float = 0.0
    round_trip_ms: float = 0.0
    round_trip_max_ms: float = 0.0
    error: str = ""


class CheckAdmin(TopicAdmin):
    """Administration calls that check whether each broker group stores a sent message. Each call may be
    repeated."""

    def check_queues(self, topic: str | None = None, broker_name: str | None = None) -> list[MessageQueue]:
        """Return the queues for `check_queue`: one queue of each broker group, or of the group `broker_name`. It is the
        first writable queue of `topic`. Without a topic, creates a queue of CHECK_TOPIC in every broker group and
        returns these queues.

        Raises TopicNotExistError if the topic does not exist. Raises InvalidArgumentError if the topic has no writable
        queue in `broker_name`.
        """
        if broker_name is not None and broker_name not in (names := self._broker_names()):
            raise unknown_broker(broker_name, names)
        if topic is None:
            topic = CHECK_TOPIC
            self._make_check_topic(self._broker_names())
        first: dict[str, MessageQueue] = {}
        for queue in sorted(self.topic_route(topic).publish_queues):
            first.setdefault(queue.broker_name, queue)
        if broker_name is not None and broker_name not in first:
            raise InvalidArgumentError(
                f"topic {topic!r} has no writable queue in broker group {broker_name!r}; see `raymq status`"
            )
        return [queue for name, queue in first.items() if broker_name in (None, name)]

    def _make_check_topic(self, brokers: list[str]) -> None:
        """Create CHECK_TOPIC with one queue in each broker group of `brokers`. If CHECK_TOPIC exists already, add
        queues in the broker groups that have no queue of it."""
        try:
            counts = self.topic_route(CHECK_TOPIC).queue_counts()
        except TopicNotExistError:
            self.create_topic(CHECK_TOPIC, queues=len(brokers))
            return
        missing = set(brokers) - set(counts)
        if missing:
            self.update_topic(CHECK_TOPIC, queues=sum(counts.values()) + len(missing))


def check_queue(
    queue: MessageQueue,
    send: Sends,
    pull: Callable[[MessageQueue, int], PullResult],
    *,
    count: int,
    size_bytes: int,
    clock_s: Callable[[], float] = time.perf_counter,
) -> SendCheck:
    """Send `count` messages of `size_bytes` to a queue, one after another, and read each back with `pull(queue,
    offset)`. A message counts as failed if its send or its read fails, or if the body that is read differs from the
    sent body. No message is sent again."""
    sends_ms, trips_ms, error = [], [], ""
    for number in range(count):
        body = (b"%d " % number).ljust(size_bytes, b"x")[:size_bytes]
        begun_s = clock_s()
        try:
            result = send(Message(queue.topic, body), queue=queue)
            stored_s = clock_s()
            found = pull(queue, result.queue_offset).messages
        except RaymqError as failure:
            error = str(failure)
            continue
        if [message.body for message in found[:1]] != [body]:
            error = f"the message at offset {result.queue_offset} differs from the message that was sent"
            continue
        sends_ms.append((stored_s - begun_s) * 1000)
        trips_ms.append((clock_s() - begun_s) * 1000)
    times = (median(sends_ms), max(sends_ms), median(trips_ms), max(trips_ms)) if sends_ms else (0.0,) * 4
    return SendCheck(queue.broker_name, len(sends_ms), count - len(sends_ms), *times, error=error)
