"""SimpleConsumer receives messages one by one or in batches, and settles each of them: RocketMQ's POP consumption.

No queue belongs to a member of the group: the broker hands messages out for a time, to whoever asks. So more consumers
than queues share the work, and a slow message holds nothing up but itself. What is not acknowledged in time comes
again, to anybody, with its attempt counted. The calls are in raymq.client.consumer.simple.engine; the twin for asyncio
is raymq.client.consumer.simple.async_consumer.
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
"""RocketMQ's default of popInvisibleTime."""
MESSAGES: Final = 32
WAIT_S: Final = 5.0


class SimpleConsumer(Closing):
    """Made by `Client.simple_consumer`. All methods may be called from any thread, also several at a time; after
    `close` each raises ClientStateError."""

    def __init__(self, engine: SimpleEngine) -> None:
        self.group = engine.names.unwrap(engine.settings.group)
        self._engine = engine

    def subscribe(self, topic: str, expression: str | SqlFilter = "*") -> None:
        """Receive a topic's messages whose tag is in `expression`, for example ``"paid || refunded"``, or which pass a
        filter expression, `raymq.sql`.

        Messages that it excludes are acknowledged as they are found, for the whole group: all its members must
        subscribe alike. A second call for a topic replaces the first.
        TopicNotExistError, IllegalNameError, InvalidArgumentError.
        """
        self._engine.subscribe(topic, expression)

    def unsubscribe(self, topic: str) -> None:
        """Receive nothing more of a topic. ClientStateError without a subscription."""
        self._engine.unsubscribe(topic)

    @bounded(max_messages=RECEIVE_MESSAGES, invisible_s=INVISIBLE)
    def receive(
        self, max_messages: int = MESSAGES, invisible_s: float = INVISIBLE_S, *, wait_s: float = WAIT_S
    ) -> list[ReceivedMessage]:
        """Up to `max_messages` (1 to 4096) messages; waits up to `wait_s` for the first; an empty list if none came.

        For `invisible_s` (0.1 s to 12 h) nobody else gets them: acknowledge them by then, or they come again, as the
        next attempt. After the group's retry_max_times further attempts a message goes to the dead letters `%DLQ%group`
        instead. Messages that other consumers of the group gave back (`%RETRY%group`) are received, too.

        Durable: a failover of the broker forgets neither what is handed out nor the attempts. Raises ClientStateError
        without a subscription; InvalidArgumentError for numbers out of bounds; NoPermissionError for a group that may
        not consume or a topic that may not be read; StoreCorruptError when a message is damaged; SystemBusyError,
        ServiceNotAvailableError or RequestTimeoutError when no broker could be asked in time. After an error messages
        may be handed out, and come again.
        """
        return self._engine.receive(max_messages, invisible_s, wait_s)

    def ack(self, messages: ReceivedMessage | Iterable[ReceivedMessage]) -> int:
        """Acknowledge messages: the group does not get them again. Durable on return.

        Returns how many this counts for. It counts for nothing, and does no harm, if a message was acknowledged before,
        or was late and has been handed out again. A call that raised may be repeated. InvalidArgumentError for what no
        receive has returned.
        """
        return self._engine.ack([messages] if isinstance(messages, ReceivedMessage) else messages)

    def ack_handles(self, topic: str, handles: Iterable[str]) -> int:
        """As `ack`, by the texts `message.handle` of messages that this group received while it subscribed to `topic`,
        in whatever process. InvalidArgumentError."""
        return self._engine.ack_handles(topic, handles)

    @overload
    def change_invisible(self, messages: ReceivedMessage, invisible_s: float) -> ReceivedMessage: ...

    @overload
    def change_invisible(self, messages: Iterable[ReceivedMessage], invisible_s: float) -> list[ReceivedMessage]: ...

    @bounded(invisible_s=INVISIBLE_AGAIN)
    def change_invisible(
        self, messages: ReceivedMessage | Iterable[ReceivedMessage], invisible_s: float
    ) -> ReceivedMessage | list[ReceivedMessage]:
        """Have received messages come again `invisible_s` (0 to 12 h) from now: later, because the work takes longer,
        or sooner, because it failed. Durable on return.

        Returns the messages with their new receipts; the old ones count for nothing from now on. Of several messages,
        those that were acknowledged or handed out again are left out; for a single one ReceiptExpiredError is raised.
        """
        if isinstance(messages, ReceivedMessage):
            renewed = self._engine.change_invisible([messages], invisible_s)
            return renewed[0] if renewed else refuse(messages)
        return self._engine.change_invisible(messages, invisible_s)

    def close(self) -> None:
        """End the consumer. What it has received and not acknowledged comes again in its time. Idempotent."""
        self._engine.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a raymq consumer cannot be pickled: call raymq.connect().simple_consumer(...) there")


def refuse(message: ReceivedMessage) -> NoReturn:
    """ReceiptExpiredError for a message whose receipt does not count any more."""
    raise ReceiptExpiredError(message.topic, message.handle)
