"""The units in which a producer sends messages, from the call until the messages have an outcome.

SendRequest   the messages of one call, before they have a queue
SendBatch     messages of one queue with one deadline, and their Completion: it waits, moves, and may be divided
Flight        the batches of one queue that are encoded together: each attempt sends the same bytes
SingleSend    one message that its caller sends itself, without a batch
QueueSends    the waiting batches of one queue, its next sequence, and a flag: a batch of the queue is in flight
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
from raymq.common.errors import RaymqError
from raymq.common.message import Message, MessageQueue
from raymq.common.protocol.store import AppendResult
from raymq.records.format.encode import EncodedBatch, LoneRecord
from raymq.records.kernels.message_columns import MessageColumns

BATCH_MAX_MESSAGES: Final = 4096
"""Maximum number of messages of one queue in a request, and in an open batch."""
FIRST_TURN_MAX_MESSAGES: Final = 256
"""Maximum number of messages in the first open batch of messages without a destination.

While messages arrive faster than batches are sent, each batch may have twice as many messages as the batch before, up
to BATCH_MAX_MESSAGES. A steady stream therefore has large batches, and a burst is spread over the topic's queues.
"""
OPEN_BATCH_MAX_BYTES: Final = 1024 * 1024
"""Cost in bytes, as counted by the buffer pool, at which an open batch accepts no more messages."""
REQUEST_MAX_BYTES: Final = 4 * 1024 * 1024
"""Maximum cost in bytes, as counted by the buffer pool, of the messages in one request. A request with a single message
may cost more."""
SEALED: Final = -1
"""Value of a batch's `limit_bytes` if no further message may join the batch."""


class Stage(Enum):
    """The stage of a batch's messages, from being enqueued until each message has an outcome
    (raymq.client.producer.senders.send_state)."""

    QUEUED = "QUEUED"
    IN_FLIGHT = "IN_FLIGHT"
    UNKNOWN = "UNKNOWN"
    STORED = "STORED"
    ENDED = "ENDED"


class SendRequest(Struct, eq=False):
    """The messages of one send call, all of one topic. `together`: all messages must go to one queue.

    `plain`: no message has more than a topic and a body. `cost_bytes`: buffer-pool space that is allocated for the
    messages, in the pool's `generation`. `before_end`: called for parts of the messages just before the outcome of
    these parts is set. `watches`: the SendWatches of the observers that observe this send.

    If `first_sequence` is 0 or more, the caller numbers the messages. They have sequences from `first_sequence` on in
    the queue `stored`, which stores them. The encoder chooses the sequences of messages that the caller does not
    number.

    `message_ids`: the ids that the caller gives the messages; empty if the encoder makes them.

    `turn_queue`: the queue that the caller selected, if the caller distributes messages over the queues in turn. The
    producer may still move the messages to another queue.
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
    turn_queue: MessageQueue | None = None
    message_ids: Sequence[str] = ()

    def fail(self, error: BaseException) -> None:
        """Notify the observers of a send that its messages could not be enqueued."""
        for watch in self.watches:
            watch.abandoned(error)

    @property
    def movable(self) -> bool:
        """True if the messages may go to another queue, because their destination names no queue, key or
        selector."""
        return not self.destination.fixed and not self.together


class QueueSends(Struct, eq=False):
    """The state of a producer's sends to one queue that stores messages.

    `waiting`: waiting batches, oldest first. `busy`: encoded batches of the queue are in flight, or will be sent again.
    `next_sequence`: the first sequence number that was never used. `layout`: the encoder's cache for the queue.
    `most`: maximum number of messages of a request to this queue; lower after a bounded topic was full, so that the
    messages fit soon. `full`: the last refusal because the topic was full; None after messages were stored. `failure`:
    the first failure of a message whose sequence number came from the caller. After that failure no further
    message with such a number is sent to the queue, so that the sequence numbers have no gap.
    """

    queue: MessageQueue
    waiting: deque[SendBatch] = field(default_factory=deque)
    busy: bool = False
    next_sequence: int = 0
    layout: Any = None
    most: int = BATCH_MAX_MESSAGES
    full: RaymqError | None = None
    failure: BaseException | None = None


class SendBatch(Struct, eq=False):
    """Messages of one topic for one queue, `queue`, with one deadline, in the order of the calls.

    `sends`: the state of the queue that stores the messages. This is `queue`, or for delayed messages the queue in
    which they wait. `completion` has the outcome of the messages, from index `first` on. `divided`: other batches
    contain further messages of this completion. `movable`: the messages need no order, so they may go to another queue
    as long as none of them can be stored. `waits`: the `wait_store_msg_ok` of all messages. `deadline_s`: a time of the
    monotonic clock. `timeout_s`: the timeout of the call. `cost_bytes`: buffer-pool space that is allocated for the
    messages, in the pool's `generation`. `message_ids`: the ids that the caller gave the messages; else empty until
    the messages are encoded. Ids never change. No message joins a batch that has ids.

    Further messages may join until `join_until_s`, up to a cost of `limit_bytes` and up to `max_messages` messages. The
    deadline of an open batch is extended by `open_for_s`. `plain`: no message has more than a topic and a body.
    `alone`: the batch is encoded without any other batch, because the store may refuse a message of this batch.
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
        """True if the caller assigned the sequences of the messages."""
        return self.first_sequence >= 0

    @property
    def handed_over_s(self) -> float:
        """Monotonic time in seconds at which the first message of the batch was enqueued."""
        return self.deadline_s - self.timeout_s - self.open_for_s

    def end(self, outcome: Outcome) -> None:
        """Set the outcome of all messages in the batch."""
        self.stage = Stage.ENDED
        if self.numbered and self.sends.failure is None and isinstance(outcome, BaseException):
            self.sends.failure = outcome
        self.completion.end(outcome, self.first, self.first + len(self.messages), divided=self.divided)

    def divide(self, at: int) -> tuple[SendBatch, SendBatch]:
        """Divide this batch into two batches: the messages before index `at`, and the messages from `at` on."""
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
    """One message that its caller sends in its own thread. `now_s`: monotonic time at which the send began. `movable`:
    the message may go to another queue, because its destination names no queue."""

    message: Message
    sends: QueueSends
    now_s: float
    timeout_s: float
    cost_bytes: int
    generation: int
    movable: bool
    begun: bool = False
    """True while this message's queue is marked as busy, so that later messages of the queue wait until this message is
    sent."""
    allocated: bool = False
    """True while the message holds space in the buffer pool."""
    record: LoneRecord | None = None
    """The encoded message; None before the message is encoded. Once `record` is set, it is unknown if the message was
    sent and stored."""

    def batch(self) -> SendBatch:
        """Convert the single message to a batch whose stage is IN_FLIGHT."""
        message, queue = self.message, self.sends.queue
        return SendBatch(
            message.topic, queue, self.sends, [message], Completion(), self.movable, message.wait_store_msg_ok,
            self.timeout_s, self.now_s + self.timeout_s, self.cost_bytes, self.generation, stage=Stage.IN_FLIGHT,
        )  # fmt: skip


class Flight(Struct, eq=False):
    """Batches of one queue that were encoded together and are sent as one unit. `encoded`: the encoded batches, which
    never change.

    `deadline_s`: the earliest deadline of the batches without an outcome. `stored`: the last answer of the store at
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
        """Create a Flight from batches that were encoded together. A Flight expires with the earliest deadline of its
        batches."""
        return cls(sends, batches, encoded, min([batch.deadline_s for batch in batches]))

    @property
    def topic(self) -> str:
        """The topic of the first batch in this Flight (batches that are encoded together)."""
        return self.batches[0].topic

    def places(self) -> Iterator[tuple[SendBatch, int, int]]:
        """Yield each batch of this Flight (batches that are encoded together) with its range of messages: the index of
        its first message and the index after its last message. Indices count all messages of the Flight."""
        first = 0
        for batch in self.batches:
            end = first + len(batch.messages)
            yield batch, first, end
            first = end

    def keep_ids(self) -> list[SendBatch]:
        """Return the batches of this Flight (batches that are encoded together) after the store refused it. The Flight
        is not sent again, and its sequences stay unused, but each message keeps its id."""
        ids = self.encoded.message_ids
        for batch, first, end in self.places():
            batch.message_ids = ids if len(self.batches) == 1 else ids[first:end]
        return self.batches

    def acknowledge(self, result: AppendResult) -> list[tuple[SendBatch, Acknowledged]]:
        """Divide the store's answer among the batches of this Flight. For each batch that has no outcome yet, returns
        the batch and the answer for its messages. Raises ValueError if the answer does not cover as many messages as
        the Flight sent."""
        count = len(self.encoded.message_ids)
        # The store's answer lists each queue offset only if the offsets have gaps; otherwise it gives the first offset,
        # and the messages have consecutive offsets.
        queue_offsets: Sequence[int] = result.queue_offsets or range(result.queue_offset, result.queue_offset + count)
        physical_offsets: Sequence[int] | NDArray[np.int64]
        if result.physical_offsets is not None:
            physical_offsets = result.physical_offsets
        # all messages are in one record (a single message or an inner batch), so all have the same physical offset
        elif len(self.encoded) == 1:
            physical_offsets = (result.physical_offset,) * count
        else:
            ends = np.cumsum(self.encoded.sizes, dtype=np.int64)
            physical_offsets = result.physical_offset + ends - self.encoded.sizes
        if len(queue_offsets) != count or len(physical_offsets) != count:
            raise ValueError(f"the store answered for {len(queue_offsets)} messages, but {count} were sent")
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
    """Return the delivery times of a batch's messages if `queue` is a timer queue (a queue of delayed messages); else
    None."""
    if queue.topic != TIMER_TOPIC or isinstance(batch.messages, MessageColumns):
        return None
    return DueTimes(batch.topic, [message.deliver_at_ms or 0 for message in batch.messages])
