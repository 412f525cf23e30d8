"""SendTrace notes what one producer sends, ends and takes back, for the dispatcher of its client.

A producer without a trace has None in its place, so that it pays one comparison per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raymq.common.message import Message, MessageExt, SendResult
from raymq.telemetry.trace.contexts import Sent, ended_transaction, now_ms, recalled
from raymq.telemetry.trace.dispatcher import TraceDispatcher


class SendTrace:
    """The trace of the sends of a producer of `group`. Thread-safe; nothing here blocks or raises."""

    def __init__(self, group: str, dispatcher: TraceDispatcher) -> None:
        self._group, self._dispatcher = group, dispatcher

    def sent(
        self, topic: str, messages: Sequence[Message], results: Callable[[], Sequence[SendResult]], took_ms: float
    ) -> None:
        """Note messages that are stored in `topic` since now, `took_ms` after they were handed over. `results` makes
        theirs."""
        if topic != self._dispatcher.topic:
            self._dispatcher.put(Sent(self._group, topic, messages, results, took_ms, now_ms()))

    def ended(
        self,
        topic: str,
        message: Message | MessageExt,
        message_id: str,
        offset_message_id: str,
        state: str,
        *,
        from_check: bool = False,
    ) -> None:
        """Note the end of the transaction of `message` to `topic`, by the ids of its half message. `from_check`: a
        broker had asked for it."""
        self._dispatcher.put(
            ended_transaction(self._group, topic, message, message_id, offset_message_id, state, from_check=from_check)
        )

    def recalled(self, topic: str, message_id: str, *, success: bool) -> None:
        """Note that a delayed message was taken back, or could not be."""
        self._dispatcher.put(recalled(self._group, topic, message_id, success=success))
