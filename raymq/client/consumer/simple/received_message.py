"""ReceivedMessage is a message that a simple consumer has received, with its receipt.

Receipts: what a received message is acknowledged by, and the text in which RocketMQ's clients keep one (POP_CK).

    handle   first-offset pop-time-ms invisible-ms revive-queue retry broker queue offset      separated by spaces

There are no revive queues here: the field says ORDER_REVIVE_QUEUE in order mode, else 0. `retry` is 1 for a message of
the group's retry topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, Final

from msgspec import StructMeta

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageExt
from raymq.common.names import RETRY_PREFIX, retry_topic

ORDER_REVIVE_QUEUE: Final = 999
_FIELDS: Final = 8


@dataclass(frozen=True, slots=True)
class Receipt:
    """One lease as its consumer keeps it: the queue, the first offset, when it was handed out and for how long, and how
    often its messages were.

    `whole`: the number of messages that were made of it, if that is known; who acknowledges as many has all.
    """

    topic: str
    broker_name: str
    queue_id: int
    start: int
    pop_ms: int
    invisible_ms: int
    attempts: int = 1
    ordered: bool = False
    whole: int = 0

    def handle(self, queue_offset: int) -> str:
        """The text that names one message of it."""
        revive_queue = ORDER_REVIVE_QUEUE if self.ordered else 0
        retry = int(self.topic.startswith(RETRY_PREFIX))
        places = (self.start, self.pop_ms, self.invisible_ms, revive_queue, retry)
        return " ".join(map(str, (*places, self.broker_name, self.queue_id, queue_offset)))


def parse_handle(group: str, topic: str, handle: str) -> tuple[Receipt, int]:
    """Parse the handle of a message that `group` received from `topic`: its receipt, and the message's offset.

    Raises InvalidArgumentError for any other text.
    """
    fields = handle.split(" ") if isinstance(handle, str) else []
    try:
        if len(fields) != _FIELDS:
            raise ValueError("it has not 8 fields")
        start, pop_ms, invisible_ms, revive_queue, retry = map(int, fields[:5])
        queue_id, queue_offset = int(fields[6]), int(fields[7])
        if not 0 <= start <= queue_offset:
            raise ValueError("its offset is not in its range")
    except ValueError as error:
        raise InvalidArgumentError(f"{handle!r} is no handle of a received message: {error}") from None
    of_topic = retry_topic(group) if retry else topic
    ordered = revive_queue == ORDER_REVIVE_QUEUE
    return Receipt(of_topic, fields[5], queue_id, start, pop_ms, invisible_ms, ordered=ordered), queue_offset


class ReceivedMessage(MessageExt, eq=False, gc=False):  # type: ignore[misc]  # frozen as MessageExt is
    """A message, and the receipt by which it is acknowledged.

    It refers to the bytes that the receive read, as MessageExt says. It may be pickled, and acknowledged by another
    simple consumer of the group, in another process.
    """

    _receipt: Receipt

    @property
    def attempt(self) -> int:
        """How often the group was handed this message, this time included: 1 the first time."""
        return self.reconsume_times + self._receipt.attempts

    @property
    def handle(self) -> str:
        """The receipt as a text, in RocketMQ's form (raymq.client.consumer.simple.received_message)."""
        return self._receipt.handle(self.queue_offset)

    @property
    def invisible_until_ms(self) -> int:
        """The time, in ms since 1970 by the broker's clock, at which the message may be handed out again."""
        return self._receipt.pop_ms + self._receipt.invisible_ms

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._values(), replace(self._receipt, whole=0))

    def __copy__(self) -> ReceivedMessage:
        return _received(self._values(), replace(self._receipt, whole=0))


_make: Final[Any] = partial(StructMeta.__call__, ReceivedMessage)


def received(messages: Sequence[MessageExt], receipt: Receipt) -> list[ReceivedMessage]:
    """Messages of one lease, with its receipt."""
    sources = [message._source for message in messages]
    return list(map(_make, sources, [message._index for message in messages], repeat(receipt)))


def _received(values: tuple[Any, ...], receipt: Receipt) -> ReceivedMessage:
    decoded = MessageExt.decoded(values)
    message: ReceivedMessage = _make(decoded._source, decoded._index, receipt)
    return message
