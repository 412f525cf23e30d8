"""Administration: the history of one message, from its trace and from the stores.

    the trace topic (raymq.telemetry.trace)   ▶ who sent it and when, who got it, how often, and the results
    the topic's stores                        ▶ where it is stored
    the groups of the topic (TrackAdmin)      ▶ the state of each group: consumed, in a retry, dead …

For a message without a trace, only the stores and the groups give information.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from raymq.client.admin.track import MessageTrack, TrackAdmin
from raymq.common.errors import InvalidArgumentError, TopicNotExistError
from raymq.common.message import MessageExt
from raymq.common.names import TRACE_TOPIC, check_topic
from raymq.telemetry.trace.life import Attempt, MessageLife, life_of
from raymq.telemetry.trace.records import ContextCode, TracedType, decode_records

TRACE_MESSAGES_MAX: Final = 64
"""Maximum number of trace messages that are read from one broker group for the history of one message."""

logger = logging.getLogger(__name__)
_KINDS: Final = {TracedType.HALF: "half message sent", TracedType.DELAY: "delayed message sent"}
_ENDS: Final = {
    ContextCode.SUCCESS: "consumed",
    ContextCode.TIME_OUT: "took too long",
    ContextCode.EXCEPTION: "raised an exception",
    ContextCode.RETURNED_NULL: "answered nothing",
    ContextCode.FAILED: "failed",
}


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event in a message's history, at `time_ms` (ms since 1970). `who`: the producer group or the consumer group;
    empty for a store."""

    time_ms: int
    event: str
    who: str
    detail: str


@dataclass(frozen=True, slots=True)
class MessageTrace:
    """The history of one message. `life`: events from the message's trace. `stored`: events from its topic's stores.
    `tracks`: its state in each group."""

    message_id: str
    topic: str | None
    life: MessageLife
    stored: tuple[MessageExt, ...]
    tracks: tuple[MessageTrack, ...]

    def events(self) -> list[TraceEvent]:
        """Return all events of the message's history, sorted by time."""
        return sorted(self._events(), key=lambda event: event.time_ms)

    def _events(self) -> Iterator[TraceEvent]:
        for sent in self.life.sends:
            answer = "" if sent.success else ", perhaps less durable than requested"
            detail = f"{sent.body_length} bytes to {sent.store_host} in {sent.cost_ms} ms{answer}"
            yield TraceEvent(sent.time_ms, _KINDS.get(sent.message_type, "sent"), sent.group, detail)
        for message in self.stored:
            yield TraceEvent(message.store_timestamp_ms, "stored", "", f"{message.queue} offset {message.queue_offset}")
        for end in self.life.transactions:
            asked = ", after a broker's check" if end.from_check else ""
            yield TraceEvent(end.time_ms, "transaction ended", end.group, f"{end.state}{asked}")
        for recall in self.life.recalls:
            detail = "taken back" if recall.success else "could not be recalled"
            yield TraceEvent(recall.time_ms, "recalled", recall.group, detail)
        for attempt in self.life.attempts:
            yield _event_of(attempt)


def _event_of(attempt: Attempt) -> TraceEvent:
    times = "" if attempt.retry_times is None else f"attempt {attempt.retry_times + 1}"
    end = "the outcome is unknown" if attempt.code is None else f"{_ENDS[attempt.code]} after {attempt.cost_ms} ms"
    at_ms = attempt.began_ms if attempt.began_ms is not None else attempt.ended_ms or 0
    return TraceEvent(at_ms, "delivered", attempt.group, ": ".join(filter(None, (times, end))))


class TraceAdmin(TrackAdmin):
    """Admin's call that returns the history of a message from its trace."""

    def trace(self, message_id: str, *, topic: str | None = None, trace_topic: str = TRACE_TOPIC) -> MessageTrace:
        """Return the history of the message with this unique id: its send, its queue and offset, its deliveries and
        retries, and the results.

        `topic`: the message's topic, which is needed for a message without a trace, or with an offset message id.
        `trace_topic`: the trace topic that the message's client used. Records reach the trace topic within a few
        seconds, and are kept as long as other messages.

        Raises InvalidArgumentError if neither a trace nor `topic` has the message; TopicNotExistError if the topic does
        not exist; ServiceNotAvailableError or RequestTimeoutError while a broker is unreachable.
        """
        stored = self.query_by_id(check_topic(topic), message_id) if topic is not None else []
        wanted = stored[0].message_id if stored else message_id
        life = self._life(wanted, check_topic(trace_topic))
        found = topic or life.topic
        if topic is None and found is not None:
            # ignore the error: the topic may have been deleted after the message was traced
            with suppress(TopicNotExistError):
                stored = self.query_by_id(found, wanted)
        if not life and not stored:
            if topic is not None:
                raise InvalidArgumentError(
                    f"message {message_id} is neither in topic {topic!r} nor in trace topic {trace_topic!r}"
                )
            raise InvalidArgumentError(
                f"trace topic {trace_topic!r} has no record of message {message_id}: the message was not traced, "
                "or was sent seconds ago; pass its topic to see the stored message"
            )
        tracks = self.message_track(stored[0]) if stored else []
        return MessageTrace(wanted, found, life, tuple(stored), tuple(tracks))

    def _life(self, message_id: str, trace_topic: str) -> MessageLife:
        found = self.query_by_key(trace_topic, message_id, max_messages=TRACE_MESSAGES_MAX)
        unreadable = [message.body_error for message in found if message.body_error is not None]
        if unreadable:
            logger.warning(
                "%d unreadable records of a message trace are skipped; the first: %s", len(unreadable), unreadable[0]
            )
        texts = [message.body.decode(errors="replace") for message in found if message.body_error is None]
        return life_of(message_id, [record for text in texts for record in decode_records(text).records])
