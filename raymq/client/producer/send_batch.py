"""The units in which a producer sends: messages of one queue, from when they are handed over to their end.

SendBatch   messages that were handed over with one deadline, and their Completion: waits, moves, is divided
Flight      the batches of one queue that are encoded together: sent, and repeated, as the same bytes
QueueSends  one queue's batches that wait, its next sequence, and whether it has a flight under way
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Final

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from raymq.client.producer.completion import Acknowledged, BeforeEnd, Completion, DueTimes, Outcome
from raymq.client.producer.queue_selector import Destination
from raymq.common.delay import TIMER_TOPIC
from raymq.common.message import Message, MessageQueue
from raymq.common.protocol.store import AppendResult
from raymq.records.format.encode import EncodedBatch
from raymq.records.kernels.message_columns import MessageColumns
from raymq.telemetry.trace.spans import SendSpan

BATCH_MAX_MESSAGES: Final = 4096
"""The most messages of one queue in a request, and in a batch that gathers."""
FIRST_TURN_MAX_MESSAGES: Final = 256
"""The most messages of the first batch in which messages gather that asked for no queue. While they come faster than
batches leave, each batch may have twice as many as the one before, up to BATCH_MAX_MESSAGES: so a stream has large
batches, and a burst is spread over the topic's queues."""
OPEN_BATCH_MAX_BYTES: Final = 1024 * 1024
"""The bytes of messages, by their cost in the buffer pool, at which a batch that gathers is sealed."""
REQUEST_MAX_BYTES: Final = 4 * 1024 * 1024
"""The most bytes of messages in a request, by their cost in the buffer pool. One message may be larger."""
SEALED: Final = -1
"""The `limit_bytes` of a batch that no further message joins."""


class Stage(Enum):
    """The stages of messages on their way (raymq.client.producer.send_state)."""

    QUEUED = "QUEUED"
    IN_FLIGHT = "IN_FLIGHT"
    UNKNOWN = "UNKNOWN"
    STORED = "STORED"
    ENDED = "ENDED"


class SendRequest(Struct, eq=False):
    """Messages of one topic that are sent by one call. `together`: they must stay in one queue.

    `plain`: none has more than a topic and a body. `cost_bytes` of the buffer pool are allocated for them, in
    `generation`. `before_end` is called for parts of them before they end (Completion); None if nobody wants to know.
    `span`: theirs, if it is recorded.

    Messages that are `numbered` have sequences from `first_sequence` on, in the queue `stored` that stores them; those
    of others are chosen when they are encoded.
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
    span: SendSpan | None = None

    def fail(self, error: BaseException) -> None:
        """Note that the messages could not be handed over."""
        if self.span is not None:
            self.span.fail(error)

    @property
    def movable(self) -> bool:
        """True if the messages asked for no order."""
        return not self.destination.fixed and not self.together


class QueueSends(Struct, eq=False):
    """The sends of a producer to one queue that stores messages.

    `waiting`: batches that wait, oldest first. `busy`: a flight of the queue is under way, or is to be repeated.
    `next_sequence`: never used yet. `layout`: what the encoder keeps of the queue. `failure`: that of numbered messages
    of the queue; none behind them is sent, so that their sequences have no gap.
    """

    queue: MessageQueue
    waiting: deque[SendBatch] = field(default_factory=deque)
    busy: bool = False
    next_sequence: int = 0
    layout: Any = None
    failure: BaseException | None = None


class SendBatch(Struct, eq=False):
    """Messages of one topic that go to one queue, `queue`, with one deadline, in the order handed over.

    `sends` belongs to the queue that stores them: that one, or the one in which delayed messages wait. `completion`
    holds their ends, from index `first` on; `divided`: only a part of it is theirs. `movable`: they asked for no order,
    so another queue will do as long as nothing of them may be stored. `waits`: their `wait_store_msg_ok`. `deadline_s`
    is a time of the monotonic clock, `timeout_s` the time the sender gave. `cost_bytes` of the buffer pool are held for
    them, in `generation`. `message_ids` is empty until they were encoded, and stays when that is repeated.

    Further messages may join while all cost at most `limit_bytes`, are not more than `max_messages`, and time is not
    beyond `join_until_s`; a batch that is open for that has `open_for_s` more time. `plain`: none has more than a topic
    and a body. `alone`: no other batch goes with it, since one of its messages may be what the store refuses. `inner`:
    they are stored as one record, an inner batch. `first_sequence`: that of the first message if the batch is numbered
    (SendRequest), else -1; it is not divided then.
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
        """True if the sequences of its messages were given from outside."""
        return self.first_sequence >= 0

    @property
    def handed_over_s(self) -> float:
        """When the first of its messages was handed over, by the monotonic clock."""
        return self.deadline_s - self.timeout_s - self.open_for_s

    def end(self, outcome: Outcome) -> None:
        """Give the messages their end."""
        self.stage = Stage.ENDED
        if self.numbered and self.sends.failure is None and isinstance(outcome, BaseException):
            self.sends.failure = outcome
        self.completion.end(outcome, self.first, self.first + len(self.messages), divided=self.divided)

    def divide(self, at: int) -> tuple[SendBatch, SendBatch]:
        """The messages before index `at`, and the others, as batches of their own, in place of this one."""
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


class Flight(Struct, eq=False):
    """The batches of one queue that were encoded together, on their way. `encoded` is never changed.

    `deadline_s` is the earliest of those of its batches that have no end yet. `stored`: the store's last answer, from
    the store at `store_host` (IP address and port).
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
        """The flight of batches that were just encoded."""
        return cls(sends, batches, encoded, min([batch.deadline_s for batch in batches]))

    @property
    def topic(self) -> str:
        """The topic of its first messages."""
        return self.batches[0].topic

    def places(self) -> Iterator[tuple[SendBatch, int, int]]:
        """Each batch with the indices of its first message and behind its last, among the flight's messages."""
        first = 0
        for batch in self.batches:
            end = first + len(batch.messages)
            yield batch, first, end
            first = end

    def keep_ids(self) -> list[SendBatch]:
        """The batches of a flight that will not be sent again: its sequences are lost, their ids stay."""
        ids = self.encoded.message_ids
        for batch, first, end in self.places():
            batch.message_ids = ids if len(self.batches) == 1 else ids[first:end]
        return self.batches

    def acknowledge(self, result: AppendResult) -> list[tuple[SendBatch, Acknowledged]]:
        """The answer for each batch that has no end yet. ValueError when it is no answer for so many messages."""
        count = len(self.encoded.message_ids)
        # The store lists the offsets of each record only where they do not follow each other.
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
    """The times of a batch's messages, if they wait for them in `queue`."""
    if queue.topic != TIMER_TOPIC or isinstance(batch.messages, MessageColumns):
        return None
    return DueTimes(batch.topic, [message.deliver_at_ms or 0 for message in batch.messages])
