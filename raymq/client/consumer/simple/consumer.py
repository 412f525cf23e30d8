"""SimpleConsumer receives messages one by one or in batches, and acknowledges each message: RocketMQ's POP consumption.

No member of the group owns a queue. The broker leases messages for a limited time to any member that requests some. So
more consumers than queues share the work, and a slow message delays no other message. A message that is not
acknowledged in time is delivered again, to any member. Each delivery increases the message's number of attempts.
raymq.client.consumer.simple.pop_calls makes the calls; raymq.client.consumer.simple.async_consumer is the asyncio
variant.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NoReturn, overload

from raymq.client.consumer.simple.engine import SimpleEngine
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.common.closing import Closing
from raymq.common.errors import ReceiptExpiredError
from raymq.common.numbers import bounded
from raymq.common.protocol.pop import INVISIBLE, INVISIBLE_AGAIN, RECEIVE_MESSAGES
from raymq.records.filters.sql import SqlFilter

INVISIBLE_S: Final = 60.0
"""Default invisible time in s of received messages. It is RocketMQ's default of popInvisibleTime."""
MESSAGES: Final = 32
WAIT_S: Final = 5.0


class SimpleConsumer(Closing):
    """A blocking simple consumer, created by `Client.simple_consumer`. Several threads may call its methods at the same
    time. After `close` each method raises ClientStateError."""

    def __init__(self, engine: SimpleEngine) -> None:
        self.group = engine.names.unwrap(engine.settings.group)
        self._engine = engine

    def subscribe(self, topic: str, expression: str | SqlFilter = "*") -> None:
        """Subscribe to a topic. `expression` chooses messages by tag, for example ``"paid || refunded"``, or by a
        filter expression, `raymq.sql`.

        Excluded messages are acknowledged for the whole group when they are found, so all members must use the same
        expression. A second call for a topic replaces its expression. Raises TopicNotExistError if the topic does not
        exist, and IllegalNameError or InvalidArgumentError if an argument is invalid.
        """
        self._engine.subscribe(topic, expression)

    def unsubscribe(self, topic: str) -> None:
        """Stop receiving messages of a topic. Raises ClientStateError if the topic is not subscribed."""
        self._engine.unsubscribe(topic)

    @bounded(max_messages=RECEIVE_MESSAGES, invisible_s=INVISIBLE)
    def receive(
        self, max_messages: int = MESSAGES, invisible_s: float = INVISIBLE_S, *, wait_s: float = WAIT_S
    ) -> list[ReceivedMessage]:
        """Return up to `max_messages` (1 to 4096) messages. Waits up to `wait_s` for the first message, and returns an
        empty list if none arrives.

        For `invisible_s` (0.1 s to 12 h) no other member receives the messages. Acknowledge them within that time;
        otherwise they are delivered again, as the next attempt. After the group's retry_max_times further attempts a
        message moves to the dead letters `%DLQ%group`. Messages that consumers of the group sent back (`%RETRY%group`)
        are received, too. The leases and attempts are durable: they survive a failover of the broker.

        Raises ClientStateError if the consumer has no subscription; InvalidArgumentError if a number is out of range;
        NoPermissionError if the group may not consume, or the topic may not be read; StoreCorruptError if a message is
        damaged; SystemBusyError, ServiceNotAvailableError or RequestTimeoutError if no broker answered in time. After
        an error, messages may have been leased; they are delivered again.
        """
        return self._engine.receive(max_messages, invisible_s, wait_s)

    def ack(self, messages: ReceivedMessage | Iterable[ReceivedMessage]) -> int:
        """Acknowledge messages, so that the group does not receive them again. Durable on return.

        Returns the number of messages that this call acknowledged. Ignores messages that were acknowledged before, and
        messages that were acknowledged too late and delivered again. A call that raised may be repeated. Raises
        InvalidArgumentError if an argument is not a received message.
        """
        return self._engine.ack([messages] if isinstance(messages, ReceivedMessage) else messages)

    def ack_handles(self, topic: str, handles: Iterable[str]) -> int:
        """Acknowledge messages by their `message.handle`, as `ack` does. Any process of this group may have received
        the messages, but it must have subscribed to `topic` at that time; this consumer needs no subscription.

        Raises InvalidArgumentError if a handle is invalid or names a broker that does not have the topic, and
        TopicNotExistError if the topic does not exist."""
        return self._engine.ack_handles(topic, handles)

    @overload
    def change_invisible(self, messages: ReceivedMessage, invisible_s: float | None = None) -> ReceivedMessage: ...

    @overload
    def change_invisible(
        self, messages: Iterable[ReceivedMessage], invisible_s: float | None = None
    ) -> list[ReceivedMessage]: ...

    @bounded(invisible_s=INVISIBLE_AGAIN)
    def change_invisible(
        self, messages: ReceivedMessage | Iterable[ReceivedMessage], invisible_s: float | None = None
    ) -> ReceivedMessage | list[ReceivedMessage]:
        """Set the time after which received messages are delivered again: `invisible_s` (0 to 12 h) from now. Use a
        longer time for work that takes longer, and a shorter time for work that failed. Durable on return.
        `extend_invisible` gives more time without new receipts. Without `invisible_s` the group's retry_intervals_s
        count: each message waits for the interval of its attempt, at most 12 h.

        Returns the messages with their new receipts; the old receipts become invalid. The returned list omits messages
        that were acknowledged or delivered again. If `messages` is not a list but one message, which was acknowledged
        or delivered again, raises ReceiptExpiredError.
        """
        if isinstance(messages, ReceivedMessage):
            renewed = self._engine.change_invisible([messages], invisible_s)
            return renewed[0] if renewed else refuse(messages)
        return self._engine.change_invisible(messages, invisible_s)

    @bounded(invisible_s=INVISIBLE_AGAIN)
    def change_invisible_handles(self, topic: str, handles: Iterable[str], invisible_s: float) -> list[str | None]:
        """Set the time after which messages are delivered again by their `message.handle`, as `change_invisible` does.
        Any process of this group may have received the messages from `topic`.

        Returns the new handle for each handle, and None for a message that was acknowledged or delivered again. Raises
        InvalidArgumentError and TopicNotExistError as `ack_handles` does.
        """
        return self._engine.change_invisible_handles(topic, handles, invisible_s)

    @overload
    def extend_invisible(self, messages: ReceivedMessage, invisible_s: float) -> bool: ...

    @overload
    def extend_invisible(self, messages: Iterable[ReceivedMessage], invisible_s: float) -> list[bool]: ...

    @bounded(invisible_s=INVISIBLE_AGAIN)
    def extend_invisible(
        self, messages: ReceivedMessage | Iterable[ReceivedMessage], invisible_s: float
    ) -> bool | list[bool]:
        """Extend the leases of received messages, so that they stay invisible until `invisible_s` (0 to 12 h) from now.
        Their receipts stay valid, also in other processes. No lease becomes shorter. Durable on return.

        Returns True if the message is still leased, and False if it was acknowledged or delivered again; for several
        messages, a list. A lease has the messages of one queue that came with one receive, and is extended for all of
        them that are not acknowledged. Raises InvalidArgumentError if an argument is not a received message. A call
        that raised may be repeated.
        """
        if isinstance(messages, ReceivedMessage):
            return self._engine.extend_invisible([messages], invisible_s)[0]
        return self._engine.extend_invisible(messages, invisible_s)

    @bounded(invisible_s=INVISIBLE_AGAIN)
    def extend_invisible_handles(self, topic: str, handles: Iterable[str], invisible_s: float) -> list[bool]:
        """Extend the leases of messages by their `message.handle`, as `extend_invisible` does. Any process of this
        group may have received the messages from `topic`. Raises InvalidArgumentError and TopicNotExistError as
        `ack_handles` does."""
        return self._engine.extend_invisible_handles(topic, handles, invisible_s)

    def close(self) -> None:
        """Close the consumer. Messages that it has received and not acknowledged are delivered again after their
        invisible time. Idempotent."""
        self._engine.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a raymq consumer cannot be pickled: call raymq.connect().simple_consumer(...) in the process that "
            "uses the consumer"
        )


def refuse(message: ReceivedMessage) -> NoReturn:
    """Raise ReceiptExpiredError, because the receipt of `message` is no longer valid."""
    raise ReceiptExpiredError(message.topic, message.handle)
