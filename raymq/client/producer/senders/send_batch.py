"""The units in which a producer sends messages, from the call to their end.

SendRequest   the messages of one call, before they have a queue
SendBatch     messages of one queue with one deadline, and their Completion: it waits, moves, and may be divided
Flight        the batches of one queue that are encoded together: each attempt sends the same bytes
SingleSend      one message that its caller sends itself, without a batch
QueueSends    the waiting batches of one queue, its next sequence, and whether a flight of it is in flight
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Final

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from raymq.client.producer.completion import Completion
from raymq.client.producer.observers import SendWatch
from raymq.client.producer.queue_selector import Destination
from raymq.client.producer.results import Acknowledged, BeforeEnd, DueTimes, Outcome
from raymq.common.delay import TIMER_TOPIC
from raymq.common.message import Message, MessageQueue
from raymq.common.protocol.store import AppendResult
from raymq.records.format.encode import EncodedBatch, LoneRecord
from raymq.records.kernels.message_columns import MessageColumns

BATCH_MAX_MESSAGES: Final = 4096
"""The most messages of one queue in a request, and in a gathering batch."""
FIRST_TURN_MAX_MESSAGES: Final = 256
"""The most messages of the first gathering batch for messages without a destination. While messages come faster than
batches leave, each batch may have twice as many messages as the batch before, up to BATCH_MAX_MESSAGES. So a stream has
large batches, and a burst is spread over the topic's queues."""
OPEN_BATCH_MAX_BYTES: Final = 1024 * 1024
"""The cost in bytes, as counted by the buffer pool, at which a gathering batch is sealed."""
REQUEST_MAX_BYTES: Final = 4 * 1024 * 1024
"""The largest cost in bytes, as counted by the buffer pool, of the messages in a request. A single message may cost
more."""
SEALED: Final = -1
"""The `limit_bytes` of a batch that no further message may join."""


class Stage(Enum):
    """The stage of messages between their put and their end (raymq.client.producer.senders.send_state)."""

    QUEUED = "QUEUED"
    IN_FLIGHT = "IN_FLIGHT"
    UNKNOWN = "UNKNOWN"
    STORED = "STORED"
    ENDED = "ENDED"


class SendRequest(Struct, eq=False):
    """The messages of one call, all of one topic. `together`: all messages must go to one queue.

    `plain`: no message has more than a topic and a body. `cost_bytes` of the buffer pool are allocated for the
    messages, in `generation`. `before_end`: called for parts of the messages just before these parts end. `watches`:
    those of the observers that watch this send.

    A `first_sequence` of 0 or more numbers the messages: they have sequences from `first_sequence` on, in the queue
    `stored`, which stores them. Sequences of other messages are chosen when the messages are encoded.
    """

    messages: Sequence[Message]
    destination: Destination
    timeout_s: float
    deadline_s: float
    together: bool
    plain: bool
    cost_bytes: int
    generation: int
    before_end: BeforeEnd | None = None
    first_sequence: int = -1
    stored: MessageQueue | None = None
    watches: Sequence[SendWatch] = ()

    def fail(self, error: BaseException) -> None:
        """Tell the watches that the messages could not be handed over."""
        for watch in self.watches:
            watch.abandoned(error)

    @property
    def movable(self) -> bool:
        """True if the messages may go to another queue, because they asked for no order."""
        return not self.destination.fixed and not self.together


class QueueSends(Struct, eq=False):
    """The sends of a producer to one queue, which stores messages.

    `waiting`: waiting batches, oldest first. `busy`: a flight of the queue is in flight, or will be sent again.
    `next_sequence`: the first sequence that was never used. `layout`: the encoder's cache for the queue. `failure`: the
    first failure of numbered messages of the queue. No later numbered message is sent then, so that the sequences have
    no gap.
    """

    queue: MessageQueue
    waiting: deque[SendBatch] = field(default_factory=deque)
    busy: bool = False
    next_sequence: int = 0
    layout: Any = None
    failure: BaseException | None = None


class SendBatch(Struct, eq=False):
    """Messages of one topic for one queue, `queue`, with one deadline, in the order of the calls.

    `sends`: of the queue that stores the messages, which is `queue` or the queue in which delayed messages wait.
    `completion` has the outcome of the messages, from index `first` on. `divided`: other messages of this completion
    are in other batches. `movable`: the messages asked for no order, so they may go to another queue as long as none of
    them can be stored. `waits`: the `wait_store_msg_ok` of all messages. `deadline_s`: a time of the monotonic clock.
    `timeout_s`: the timeout of the call. `cost_bytes` of the buffer pool are allocated for the messages, in
    `generation`. `message_ids`: empty until the messages are encoded, and never changed afterwards.

    Further messages may join while all messages cost at most `limit_bytes`, while they are at most `max_messages`, and
    until `join_until_s`. An open batch gets `open_for_s` more time. `plain`: no message has more than a topic and a
    body. `alone`: no other batch goes into the same flight, because the store may refuse a message of this batch.
    `inner`: the messages are stored as one record, an inner batch. `first_sequence`: the sequence of the first message
    if the batch is numbered (SendRequest), else -1. A numbered batch is never divided.
    """

    topic: str
    queue: MessageQueue
    sends: QueueSends
    messages: list[Message] | MessageColumns
    completion: Completion
    movable: bool
    waits: bool
    timeout_s: float
    deadline_s: float
    cost_bytes: int
    generation: int
    open_for_s: float = 0.0
    join_until_s: float = 0.0
    limit_bytes: int = SEALED
    max_messages: int = BATCH_MAX_MESSAGES
    plain: bool = False
    first: int = 0
    divided: bool = False
    alone: bool = False
    message_ids: Sequence[str] = ()
    stage: Stage = Stage.QUEUED
    first_sequence: int = -1
    inner: bool = False

    @property
    def numbered(self) -> bool:
        """True if the caller has given the sequences of the messages."""
        return self.first_sequence >= 0

    @property
    def handed_over_s(self) -> float:
        """The time of the monotonic clock, in seconds, at which the first message was handed over."""
        return self.deadline_s - self.timeout_s - self.open_for_s

    def end(self, outcome: Outcome) -> None:
        """Set the outcome of the messages."""
        self.stage = Stage.ENDED
        if self.numbered and self.sends.failure is None and isinstance(outcome, BaseException):
            self.sends.failure = outcome
        self.completion.end(outcome, self.first, self.first + len(self.messages), divided=self.divided)

    def divide(self, at: int) -> tuple[SendBatch, SendBatch]:
        """Divide this batch into two: the messages before index `at`, and the other messages."""
        cost_bytes = self.cost_bytes // 2
        head, tail = self._part(0, at, cost_bytes), self._part(at, len(self.messages), self.cost_bytes - cost_bytes)
        return head, tail

    def _part(self, first: int, end: int, cost_bytes: int) -> SendBatch:
        return SendBatch(
            self.topic, self.queue, self.sends, self.messages[first:end], self.completion, self.movable, self.waits,
            self.timeout_s, self.deadline_s, cost_bytes, self.generation, first=self.first + first, divided=True,
            plain=self.plain, alone=True, open_for_s=self.open_for_s, message_ids=self.message_ids[first:end],
            inner=self.inner,
        )  # fmt: skip


class SingleSend(Struct, eq=False):
    """One message that its caller sends itself, since `now_s` of the monotonic clock. `movable`: the message may go to
    another queue, because it names none."""

    message: Message
    sends: QueueSends
    now_s: float
    timeout_s: float
    cost_bytes: int
    generation: int
    movable: bool
    begun: bool = False
    """True while the message makes its queue busy."""
    allocated: bool = False
    """True while the message has space in the buffer."""
    record: LoneRecord | None = None
    """The encoded message. Once it is set, the message may be stored."""

    def batch(self) -> SendBatch:
        """Return the message as a batch in flight."""
        message, queue = self.message, self.sends.queue
        return SendBatch(
            message.topic, queue, self.sends, [message], Completion(), self.movable, message.wait_store_msg_ok,
            self.timeout_s, self.now_s + self.timeout_s, self.cost_bytes, self.generation, stage=Stage.IN_FLIGHT,
        )  # fmt: skip


class Flight(Struct, eq=False):
    """Batches of one queue that were encoded together. `encoded` never changes.

    `deadline_s`: the earliest deadline of the batches that have not ended. `stored`: the last answer of the store at
    `store_host` (IP address and port).
    """

    sends: QueueSends
    batches: list[SendBatch]
    encoded: EncodedBatch
    deadline_s: float
    stage: Stage = Stage.IN_FLIGHT
    stored: AppendResult | None = None
    store_host: tuple[str, int] = ("", 0)

    @classmethod
    def of(cls, sends: QueueSends, batches: list[SendBatch], encoded: EncodedBatch) -> Flight:
        """Make the flight of batches that were just encoded."""
        return cls(sends, batches, encoded, min([batch.deadline_s for batch in batches]))

    @property
    def topic(self) -> str:
        """The topic of the first batch."""
        return self.batches[0].topic

    def places(self) -> Iterator[tuple[SendBatch, int, int]]:
        """Yield each batch with the index of its first message, and the index after its last message, in the flight."""
        first = 0
        for batch in self.batches:
            end = first + len(batch.messages)
            yield batch, first, end
            first = end

    def keep_ids(self) -> list[SendBatch]:
        """Return the batches of a flight that will not be sent again. Its sequences are lost; each message keeps its
        id."""
        ids = self.encoded.message_ids
        for batch, first, end in self.places():
            batch.message_ids = ids if len(self.batches) == 1 else ids[first:end]
        return self.batches

    def acknowledge(self, result: AppendResult) -> list[tuple[SendBatch, Acknowledged]]:
        """Divide the store's answer among the batches that have not ended. Raises ValueError if the answer is for
        another number of messages."""
        count = len(self.encoded.message_ids)
        # The store lists each offset only if the offsets have gaps.
        queue_offsets: Sequence[int] = result.queue_offsets or range(result.queue_offset, result.queue_offset + count)
        physical_offsets: Sequence[int] | NDArray[np.int64]
        if result.physical_offsets is not None:
            physical_offsets = result.physical_offsets
        elif len(self.encoded) == 1:  # one message, or one inner batch
            physical_offsets = (result.physical_offset,) * count
        else:
            ends = np.cumsum(self.encoded.sizes, dtype=np.int64)
            physical_offsets = result.physical_offset + ends - self.encoded.sizes
        if len(queue_offsets) != count or len(physical_offsets) != count:
            raise ValueError(f"an answer for {len(queue_offsets)} messages to {count}")
        status, queue, ids, host = result.status, self.sends.queue, self.encoded.message_ids, self.store_host
        batches = self.batches
        if len(batches) == 1 and batches[0].stage is not Stage.ENDED:
            return [
                (
                    batches[0],
                    Acknowledged(
                        status, queue, ids, queue_offsets, physical_offsets, host, _due_times(queue, batches[0])
                    ),
                )
            ]
        ends_of = []
        for batch, first, end in self.places():
            if batch.stage is not Stage.ENDED:
                parts = ids[first:end], queue_offsets[first:end], physical_offsets[first:end]
                ends_of.append((batch, Acknowledged(status, queue, *parts, host, _due_times(queue, batch))))
        return ends_of


def _due_times(queue: MessageQueue, batch: SendBatch) -> DueTimes | None:
    """Return the delivery times of a batch's messages, if `queue` is a timer queue."""
    if queue.topic != TIMER_TOPIC or isinstance(batch.messages, MessageColumns):
        return None
    return DueTimes(batch.topic, [message.deliver_at_ms or 0 for message in batch.messages])
