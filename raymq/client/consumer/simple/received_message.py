"""ReceivedMessage is a message that a simple consumer has received, with its receipt.

A Receipt identifies the lease of a received message; acknowledgements carry it. RocketMQ's clients store a receipt as a
text (POP_CK):

    handle   first-offset pop-time-ms invisible-ms revive-queue retry broker queue offset      separated by spaces

raymq has no revive queues: the field `revive-queue` is ORDER_REVIVE_QUEUE in order mode, otherwise 0. `retry` is 1 for
a message of the group's retry topic. A broker needs no other data to settle a message, so any process can settle a
message that another process received.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, Final

from msgspec import StructMeta

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageExt
from raymq.common.names import RETRY_PREFIX, retry_topic
from raymq.common.protocol.pop import ALL_OFFSETS, RECEIVE_MAX_MESSAGES, LeasedRange, LeasePart

ORDER_REVIVE_QUEUE: Final = 999
_FIELDS: Final = 8

LeaseId = tuple[str, str, int, int, int]
"""The identity of a lease: its topic, broker, queue id, first offset and pop time in ms."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A consumer's data about one lease: the queue, the first offset, the time and duration of the lease, and the
    number of deliveries of its messages.

    `whole`: the number of messages in the lease; 0 if unknown. An acknowledgement of this many messages covers the
    whole lease. `retry_intervals_s`: as in the group's settings; empty if unknown. `retry_max_times`: as in the group's
    settings; -1 if unknown. `size_bytes`: the size of the records that were read of the lease; 0 if unknown.
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
    retry_intervals_s: tuple[float, ...] = ()
    retry_max_times: int = -1
    size_bytes: int = 0

    @property
    def lease_id(self) -> LeaseId:
        return self.topic, self.broker_name, self.queue_id, self.start, self.pop_ms

    def handle(self, queue_offset: int) -> str:
        """Return the handle: the text that identifies one message of the lease."""
        revive_queue = ORDER_REVIVE_QUEUE if self.ordered else 0
        retry = int(self.topic.startswith(RETRY_PREFIX))
        places = (self.start, self.pop_ms, self.invisible_ms, revive_queue, retry)
        return " ".join(map(str, (*places, self.broker_name, self.queue_id, queue_offset)))

    def part(self, offsets: str) -> LeasePart:
        """Return a subset of the lease's messages, for a call to the broker. `offsets`: the subset as text
        (raymq.common.protocol.pop)."""
        return LeasePart(self.topic, self.queue_id, self.start, self.pop_ms, offsets)

    def moved(self, new: LeasedRange) -> Receipt:
        """Return the receipt of the lease `new`, to which the broker moved messages of this lease."""
        places = (self.topic, self.broker_name, self.queue_id)
        lease = (new.start, new.pop_ms, new.invisible_ms, new.attempts)
        return Receipt(*places, *lease, self.ordered, 0, self.retry_intervals_s, self.retry_max_times)


def parse_handle(group: str, topic: str, handle: str) -> tuple[Receipt, int]:
    """Parse the handle of a message that `group` received from `topic`. Returns the receipt and the message's queue
    offset.

    Raises InvalidArgumentError if the text is not a valid handle.
    """
    fields = handle.split(" ", _FIELDS) if isinstance(handle, str) else []
    try:
        if len(fields) != _FIELDS:
            raise ValueError("the handle does not have 8 fields")
        start, pop_ms, invisible_ms, revive_queue, retry = map(int, fields[:5])
        queue_id, queue_offset = int(fields[6]), int(fields[7])
        if not 0 <= start <= queue_offset < start + RECEIVE_MAX_MESSAGES:
            raise ValueError("the handle's offset is outside the handle's range of offsets")
        if max(queue_offset, pop_ms, invisible_ms, queue_id) >= 1 << 63 or min(pop_ms, invisible_ms, queue_id) < 0:
            raise ValueError("a number of the handle is out of range")
    except ValueError as error:
        raise InvalidArgumentError(
            f"{handle!r:.300} is not the receipt handle of a received message: {error}"
        ) from None
    of_topic = retry_topic(group) if retry else topic
    ordered = revive_queue == ORDER_REVIVE_QUEUE
    return Receipt(of_topic, fields[5], queue_id, start, pop_ms, invisible_ms, ordered=ordered), queue_offset


class ReceivedMessage(MessageExt, eq=False, gc=False):  # type: ignore[misc]  # frozen as MessageExt is
    """A received message, with the receipt that acknowledges it.

    The message refers to the bytes that the receive call read (see MessageExt). It may be pickled, and acknowledged by
    another simple consumer of the group, in another process.
    """

    _receipt: Receipt

    @property
    def attempt(self) -> int:
        """Number of times that the message was delivered to the group, including this time; 1 for the first
        delivery."""
        return self.reconsume_times + self._receipt.attempts

    @property
    def handle(self) -> str:
        """The message's receipt as text, in RocketMQ's format (raymq.client.consumer.simple.received_message)."""
        return self._receipt.handle(self.queue_offset)

    @property
    def invisible_until_ms(self) -> int:
        """Time, in ms since 1970 by the broker's clock, from which the message may be delivered again, unless its lease
        was extended."""
        return self._receipt.pop_ms + self._receipt.invisible_ms

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._values(), replace(self._receipt, whole=0))

    def __copy__(self) -> ReceivedMessage:
        return _received(self._values(), replace(self._receipt, whole=0))


_make: Final[Any] = partial(StructMeta.__call__, ReceivedMessage)


def received(messages: Sequence[MessageExt], receipt: Receipt) -> list[ReceivedMessage]:
    """Create the received messages of one lease, with the lease's receipt."""
    sources = [message._source for message in messages]
    return list(map(_make, sources, [message._index for message in messages], repeat(receipt)))


def _received(values: tuple[Any, ...], receipt: Receipt) -> ReceivedMessage:
    decoded = MessageExt.decoded(values)
    message: ReceivedMessage = _make(decoded._source, decoded._index, receipt)
    return message


def parts_of(messages: Iterable[ReceivedMessage]) -> list[tuple[Receipt, str]]:
    """Group messages by their receipts (leases). Returns each receipt with the offsets of its messages, encoded as a
    text. Raises InvalidArgumentError if an argument is not a received message."""
    groups: dict[int, list[ReceivedMessage]] = {}
    for message in messages:
        groups.setdefault(id(require_received(message)._receipt), []).append(message)
    parts = []
    for own in groups.values():
        receipt = own[0]._receipt
        # `is_all`: True if the program has passed every message of the lease. `own` then has as many messages as the
        # lease, and none of them twice.
        is_all = len(own) == receipt.whole == len({id(message) for message in own})
        parts.append((receipt, ALL_OFFSETS if is_all else offsets_text(receipt, own)))
    return parts


def offsets_text(receipt: Receipt, messages: Iterable[ReceivedMessage]) -> str:
    """Encode the offsets of a lease's messages as a text (raymq.common.protocol.pop)."""
    bits = 0
    for message in messages:
        bits |= 1 << message.queue_offset - receipt.start
    return f"{bits:x}"


def holds(lease: LeasedRange, queue_offset: int) -> bool:
    """Return True if a lease includes the message at `queue_offset`."""
    place = queue_offset - lease.start
    return 0 <= place < lease.count and not int(lease.without, 16) >> place & 1


def require_received(message: ReceivedMessage) -> ReceivedMessage:
    """Return `message`. Raises InvalidArgumentError if it is not a received message."""
    if not isinstance(message, ReceivedMessage):
        raise InvalidArgumentError(
            f"expected a message that receive() returned, not {type(message).__name__}; for receipt handles "
            "as text call ack_handles, change_invisible_handles or extend_invisible_handles"
        )
    return message
