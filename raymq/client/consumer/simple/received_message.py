"""ReceivedMessage is a message that a simple consumer has received, with its receipt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, Final

from msgspec import StructMeta

from raymq.client.consumer.simple.receipt import Receipt
from raymq.common.message import MessageExt


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
        """The receipt as a text, in RocketMQ's form (raymq.client.consumer.simple.receipt)."""
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
