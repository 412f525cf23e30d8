"""Trace contexts: what a producer or consumer records about messages. The dispatcher's thread writes the trace records
later.

    Sent          messages that were sent together and are stored          ▶ Pub, one per message
    Ended         the end of a transaction                                 ▶ EndTransaction
    Recalled      a delayed message that was recalled, or was already due  ▶ Recall
    Begun, Done   messages that a listener gets, and has finished          ▶ SubBefore, SubAfter, one per message
    Polled        messages that a poll returned                            ▶ both at once, as RocketMQ's pull consumer

A context only stores references to messages; the dispatcher's thread formats the records. Messages whose property
TRACE_ON is "false" are left out.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from msgspec import Struct

from raymq.common.message import (
    PROPERTY_TRANSACTION_PREPARED,
    Message,
    MessageExt,
    SendResult,
    SendStatus,
)
from raymq.records.format.message_id import parse_offset_message_id
from raymq.telemetry.trace.dispatcher import TraceLine
from raymq.telemetry.trace.records import (
    ContextCode,
    EndTransaction,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
    TracedDelivery,
    TracedType,
    TraceRecord,
    after_texts,
    before_texts,
    encode_records,
    pub_texts,
    record_keys,
)

REGION: Final = "DefaultRegion"
"""The region in all trace records. It is RocketMQ's name for a broker without a configured region."""
TRACE_ON: Final = "TRACE_ON"
"""Message property. If its value is "false", the message is not traced."""


_OFFSET_DIGITS: Final = 16
"""Number of digits in an offset message id that encode the physical offset."""


def now_ms() -> int:
    """Return the current time in ms since 1970."""
    return time.time_ns() // 1_000_000


def store_host_of(offset_message_id: str) -> str:
    """Return the ``"address:port"`` of the store that an offset message id contains."""
    return _host_of(offset_message_id[:-_OFFSET_DIGITS])


@lru_cache(maxsize=256)
def _host_of(host_digits: str) -> str:
    parts = parse_offset_message_id(host_digits + "0" * _OFFSET_DIGITS)
    return f"{parts.host}:{parts.port}"


class Sent(Struct, eq=False):
    """A trace context of stored messages of one topic that were sent together. `took_ms`: the time from the send of the
    first message to the answer. `ended_ms`: the time at which the answer arrived. `results` returns the messages'
    SendResults, in order."""

    group: str
    topic: str
    messages: Sequence[Message]
    results: Callable[[], Sequence[SendResult]]
    took_ms: float
    ended_ms: int

    @property
    def count(self) -> int:
        return len(self.messages)

    def lines(self) -> Iterator[TraceLine]:
        """Return a Pub trace record for each message that was sent."""
        results, messages = self.results(), self.messages
        count = len(results)
        common = Pub(
            self.ended_ms - math.ceil(self.took_ms), REGION, self.group, self.topic, "", None, None,
            store_host_of(results[0].offset_message_id), 0, round(self.took_ms / count),
            success=results[0].status is SendStatus.SEND_OK,
        )  # fmt: skip
        ids = [result.message_id for result in results]
        texts = pub_texts(
            common, ids, messages, (result.offset_message_id for result in results), map(_type_of, messages)
        )
        for text, message_id, message in zip(texts, ids, messages, strict=True):
            yield TraceLine(text, (message_id, *message.keys))


def _type_of(message: Message) -> TracedType:
    if message.delay_level or message.deliver_at_ms is not None:
        return TracedType.DELAY
    if PROPERTY_TRANSACTION_PREPARED in message.properties:
        return TracedType.HALF
    return TracedType.NORMAL


class SingleRecordContext(Struct, eq=False):
    """A trace context holding a single finished record (EndTransaction or Recall)."""

    record: TraceRecord
    count: int = 1

    def lines(self) -> Iterator[TraceLine]:
        """Return the only trace record of this context."""
        yield TraceLine(encode_records([self.record]), record_keys([self.record]))


def ended_transaction(
    group: str,
    topic: str,
    message: Message | MessageExt,
    message_id: str,
    offset_message_id: str,
    state: str,
    *,
    from_check: bool,
) -> SingleRecordContext:
    """Return a trace context for the end of the transaction of `message` in `topic`, with the ids of the half
    message."""
    return SingleRecordContext(
        EndTransaction(
            now_ms(),
            REGION,
            group,
            topic,
            message_id,
            message.tags,
            " ".join(message.keys) or None,
            store_host_of(offset_message_id),
            TracedType.COMMIT,
            message_id,
            state,
            from_check,
        )
    )


def recalled(group: str, topic: str, message_id: str, *, success: bool) -> SingleRecordContext:
    """Return a trace context for a recall of a delayed message. `success`: whether the message was recalled."""
    return SingleRecordContext(Recall(now_ms(), REGION, group, topic, message_id, success))


class TracedCalls(NamedTuple):
    """A group of listener calls that are traced together. The trace records of the calls' beginning and of their end
    contain the same `request_id`, which connects these records. `calls`: the listener's arguments, which are messages,
    lists of messages, or placeholders of damaged messages. `message_count`: the total number of messages in the calls.
    """

    request_id: str
    calls: Sequence[Any]
    message_count: int


class Begun(Struct, eq=False):
    """A trace context of messages that are about to be passed to a listener of `group`."""

    group: str
    traced: TracedCalls
    began_ms: int

    @property
    def count(self) -> int:
        return self.traced.message_count

    def lines(self) -> Iterator[TraceLine]:
        """Return a SubBefore trace record for each message."""
        common = SubBefore(self.began_ms, REGION, self.group, self.traced.request_id, "", 0, None)
        deliveries = [delivery for call in self.traced.calls for delivery in _deliveries(call)]
        for text, one in zip(before_texts(common, deliveries), deliveries, strict=True):
            yield TraceLine(text, _keys_of(one))


class Done(Struct, eq=False):
    """A trace context of messages that a listener has finished. `took_ms`: the total time of the listener calls.
    `ended`: the indices of the calls that were made. `failed`: the outcomes of failed calls; all other calls succeeded.
    """

    group: str
    traced: TracedCalls
    ended: Sequence[int]
    failed: Mapping[int, ContextCode]
    took_ms: float
    ended_ms: int

    @property
    def count(self) -> int:
        return self.traced.message_count

    def lines(self) -> Iterator[TraceLine]:
        """Return a SubAfter trace record for each message."""
        request_id, calls, count = self.traced
        cost_ms = round(self.took_ms / max(count, 1))
        common = SubAfter(request_id, "", cost_ms, True, None, time_ms=self.ended_ms, group=self.group)
        ended = [
            (delivery, self.failed.get(index, ContextCode.SUCCESS))
            for index in self.ended
            for delivery in _deliveries(calls[index])
        ]
        for text, (one, _) in zip(after_texts(common, ended), ended, strict=True):
            yield TraceLine(text, _keys_of(one))


class Polled(Struct, eq=False):
    """The trace context of messages that a poll returned, which are a list or an Arrow table. The table has the columns
    of raymq.records.kernels.columns."""

    group: str
    found: Any
    count: int
    ended_ms: int

    def lines(self) -> Iterator[TraceLine]:
        """Return a SubBefore and a SubAfter trace record for each message. The processing time in the records is 0,
        because the time that the program spends on a message is unknown."""
        request_id = new_request_id()
        before = SubBefore(self.ended_ms, REGION, self.group, request_id, "", 0, None)
        after = SubAfter(request_id, "", 0, True, None, time_ms=self.ended_ms, group=self.group)
        deliveries = _deliveries(self.found) if isinstance(self.found, list) else _rows(self.found)
        ended = [(one, ContextCode.SUCCESS) for one in deliveries]
        for first, second, one in zip(
            before_texts(before, deliveries), after_texts(after, ended), deliveries, strict=True
        ):
            yield TraceLine(first + second, _keys_of(one))


def new_request_id() -> str:
    """Return a new id that connects the trace records of one listener call or poll."""
    return secrets.token_hex(16).upper()


def _keys_of(one: TracedDelivery) -> Iterable[str]:
    return (one.message_id, *one.keys.split()) if one.keys else (one.message_id,)


def _deliveries(call: Any) -> list[TracedDelivery]:
    messages = call if isinstance(call, list) else [call] if isinstance(call, MessageExt) else []
    return [
        TracedDelivery(one.message_id, one.reconsume_times, " ".join(one.keys) or None)
        for one in messages
        if one.system_properties.get(TRACE_ON) != "false"
    ]


def _rows(table: Any) -> list[TracedDelivery]:
    ids, keys = (table.column(name).to_pylist() for name in ("message_id", "keys"))
    return [TracedDelivery(message_id, 0, " ".join(own) or None) for message_id, own in zip(ids, keys, strict=True)]
