"""SendQueues: the queues of one sender, with the batches that wait and the flights that are in flight.

This module decides nothing: SendState decides what is taken, and what follows from an answer. All methods are called
with the producer's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from raymq.client.producer.senders.send_batch import SEALED, Flight, QueueSends, SendBatch, SingleSend, Stage
from raymq.common.errors import RaymqError
from raymq.common.message import MessageQueue


class SendAttempt(Struct, eq=False):
    """Flights that are sent in one request. `error`: the failure of the previous attempt, if there was one."""

    flights: list[Flight]
    error: RaymqError | None = None

    @property
    def again(self) -> bool:
        """True if an earlier attempt has sent the flights: the same bytes are sent again."""
        return self.flights[0].stage is not Stage.IN_FLIGHT

    @property
    def topic(self) -> str:
        """The topic whose route leads to the master."""
        return self.flights[0].topic

    @property
    def deadline_s(self) -> float:
        """The earliest deadline of the attempt's messages."""
        return min([flight.deadline_s for flight in self.flights])


class SendQueues:
    """The queues of one sender, and the attempts that it must make next."""

    def __init__(self) -> None:
        self._queues: dict[MessageQueue, QueueSends] = {}
        self._waiting: dict[QueueSends, None] = {}
        """The queues with waiting batches and no flight. The next request begins with the first of these queues."""
        self._attempts: deque[SendAttempt] = deque()
        """Attempts to make before waiting messages are taken."""
        self._in_flight = 0
        """The number of busy queues."""

    def sends(self, queue: MessageQueue) -> QueueSends:
        """Return the QueueSends of a queue, which is made at the first call."""
        sends = self._queues.get(queue)
        if sends is None:
            sends = self._queues[queue] = QueueSends(queue)
        return sends

    @property
    def idle(self) -> bool:
        """True if no message waits or is in flight."""
        return not (self._waiting or self._attempts or self._in_flight)

    @property
    def empty(self) -> bool:
        """True if all messages have ended."""
        return self.idle and not any(sends.waiting or sends.busy for sends in self._queues.values())

    @property
    def has_work(self) -> bool:
        """True if an attempt can be made."""
        return bool(self._waiting or self._attempts)

    def may_overtake(self, sends: QueueSends) -> bool:
        """Return True if a caller may send a message to the queue itself: no message of the queue waits or is in
        flight, and no attempt waits to be sent again."""
        return not (sends.busy or sends.waiting or self._attempts)

    def next_attempt(self) -> SendAttempt | None:
        """Return the attempt to make next; None if waiting messages are next (`oldest`), or if there is no work."""
        return self._attempts.popleft() if self._attempts else None

    def oldest(self) -> SendBatch | None:
        """Return the batch with which the next request begins; None if no batch waits."""
        sends = next(iter(self._waiting), None)
        return None if sends is None else sends.waiting[0]

    def put(self, batch: SendBatch) -> None:
        """Append a batch to the waiting batches of its queue. No message joins the batch before it from now on."""
        sends = batch.sends
        if sends.waiting:
            sends.waiting[-1].limit_bytes = SEALED
        sends.waiting.append(batch)
        if not sends.busy:
            self._waiting.setdefault(sends)

    def begin(self, sends: QueueSends) -> None:
        """Mark a queue as busy, before its next flight is sent. Other messages of the queue wait until `release`."""
        sends.busy = True
        self._in_flight += 1
        self._waiting.pop(sends, None)

    def begin_single(self, single: SingleSend) -> bool:
        """Mark the queue of a single message as busy. Returns False if any message waits or is in flight."""
        if self._waiting or self._attempts or self._in_flight:
            return False
        single.sends.busy = True
        self._in_flight = 1
        single.begun = True  # no signal handler runs between these three statements
        return True

    def release_single(self, single: SingleSend) -> None:
        """Undo `begin_single`. A second call changes nothing."""
        sends = single.sends
        if single.begun:
            sends.busy = False
            self._in_flight -= 1
            single.begun = False  # no signal handler runs between these three statements
        if sends.waiting and not sends.busy:
            self._waiting.setdefault(sends)

    def release(self, sends: QueueSends) -> None:
        """Mark a queue as no longer busy."""
        if sends.busy:
            sends.busy = False
            self._in_flight -= 1
            if sends.waiting:
                self._waiting.setdefault(sends)

    def _put_first(self, batches: Sequence[SendBatch]) -> None:
        """Put batches, in their order, before all waiting batches of their queues."""
        for batch in reversed(batches):
            if batch.sends.waiting:
                batch.limit_bytes = SEALED
            batch.stage = Stage.QUEUED
            batch.sends.waiting.appendleft(batch)
            if not batch.sends.busy:
                self._waiting.setdefault(batch.sends)
