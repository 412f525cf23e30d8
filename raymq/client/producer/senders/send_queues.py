"""SendQueues: the queues of one sender, with the waiting batches and the encoded batches (Flights) that are being sent.

This module decides nothing. SendState decides which batches are taken, and what follows from an answer. All methods are
called while the producer's lock is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from raymq.client.producer.senders.send_batch import SEALED, Flight, QueueSends, SendBatch, SingleSend, Stage
from raymq.common.errors import RaymqError
from raymq.common.message import MessageQueue


class SendAttempt(Struct, eq=False):
    """The Flights (encoded batches) that are sent in one request. `error`: the failure of the previous attempt to send
    the Flights; None if this is the first attempt."""

    flights: list[Flight]
    error: RaymqError | None = None

    @property
    def again(self) -> bool:
        """True if an earlier attempt has sent these Flights (encoded batches), so that this attempt sends the same
        bytes again."""
        return self.flights[0].stage is not Stage.IN_FLIGHT

    @property
    def topic(self) -> str:
        """The topic of the first Flight (encoded batches) that this request to the store sends. The topic's route gives
        the master of the broker group."""
        return self.flights[0].topic

    @property
    def deadline_s(self) -> float:
        """The earliest deadline of the messages in this attempt."""
        return min([flight.deadline_s for flight in self.flights])


class SendQueues:
    """The queues of one sender, and the attempts that the sender must make next."""

    def __init__(self) -> None:
        self._queues: dict[MessageQueue, QueueSends] = {}
        self._waiting: dict[QueueSends, None] = {}
        """Queues that have waiting batches and are not busy. The next request begins with the first of these
        queues."""
        self._resting: dict[QueueSends, float] = {}
        """Queues whose topic was full, with the monotonic time in seconds until which they are left alone. They are not
        among the waiting queues, so a full topic delays no message for another topic."""
        self._attempts: deque[SendAttempt] = deque()
        """Attempts (requests to the store) that the sender makes before it takes further waiting messages."""
        self._in_flight = 0
        """Number of queues that are busy: their messages are in flight or will be sent again."""

    def sends(self, queue: MessageQueue) -> QueueSends:
        """Return the QueueSends (state of the sends) of a queue. The first call for a queue creates it."""
        sends = self._queues.get(queue)
        if sends is None:
            sends = self._queues[queue] = QueueSends(queue)
        return sends

    @property
    def idle(self) -> bool:
        """True if no message of the sender waits or is in flight."""
        return not (self._waiting or self._resting or self._attempts or self._in_flight)

    @property
    def empty(self) -> bool:
        """True if all messages of the sender have an outcome."""
        return self.idle and not any(sends.waiting or sends.busy for sends in self._queues.values())

    @property
    def has_work(self) -> bool:
        """True if this sender has a request to make: a batch waits in a queue that is not busy, or an attempt (request
        to the store) waits."""
        return bool(self._waiting or self._attempts)

    @property
    def has_rests(self) -> bool:
        """True if messages of a queue wait for room in a full topic."""
        return bool(self._resting)

    def rest(self, sends: QueueSends, until_s: float) -> None:
        """Leave a queue alone until a time of the monotonic clock, or until one of its messages reaches its
        deadline."""
        self._resting[sends] = min([until_s, *(batch.deadline_s for batch in sends.waiting)])
        self._waiting.pop(sends, None)

    def end_rests(self, now_s: float) -> float | None:
        """Let queues take part again whose rest is over. Returns the time at which the next rest ends; None if no queue
        rests."""
        if not self._resting:
            return None
        for sends in [sends for sends, until_s in self._resting.items() if until_s <= now_s]:
            del self._resting[sends]
            self._make_ready(sends)
        return min(self._resting.values(), default=None)

    def _make_ready(self, sends: QueueSends) -> None:
        """Let the next requests take the waiting messages of a queue, unless the queue is busy or rests."""
        if sends.waiting and not sends.busy and sends not in self._resting:
            self._waiting.setdefault(sends)

    def may_overtake(self, sends: QueueSends) -> bool:
        """Return True if a caller may send a message to the queue in its own thread: no message of the queue waits or
        is in flight, and the sender has no attempt to make first."""
        return not (sends.busy or sends.waiting or self._attempts)

    def next_attempt(self) -> SendAttempt | None:
        """Return the attempt (request to the store) that the sender must make next. Returns None if the sender must
        instead send waiting messages (`oldest`), or if it has nothing to send."""
        return self._attempts.popleft() if self._attempts else None

    def oldest(self) -> SendBatch | None:
        """Return the batch with which the next request begins; None if no batch waits."""
        sends = next(iter(self._waiting), None)
        return None if sends is None else sends.waiting[0]

    def put(self, batch: SendBatch) -> None:
        """Append a batch to the waiting batches of its queue. The batch that was last until now is sealed: no further
        message may join it."""
        sends = batch.sends
        if sends.waiting:
            sends.waiting[-1].limit_bytes = SEALED
        sends.waiting.append(batch)
        if sends in self._resting:
            self._resting[sends] = min(self._resting[sends], batch.deadline_s)
        elif not sends.busy:
            self._waiting.setdefault(sends)

    def begin(self, sends: QueueSends) -> None:
        """Mark a queue as busy before its next batches are sent. Other messages of the queue wait until
        `release`."""
        sends.busy = True
        self._in_flight += 1
        self._waiting.pop(sends, None)

    def begin_single(self, single: SingleSend) -> bool:
        """Mark the queue of a single message as busy. Returns False if any message of the sender waits or is in
        flight."""
        if self._waiting or self._resting or self._attempts or self._in_flight:
            return False
        single.sends.busy = True
        self._in_flight = 1
        # No signal handler can run between this statement and the statement that sets `busy`, so the two attributes
        # always agree.
        single.begun = True
        return True

    def release_single(self, single: SingleSend) -> None:
        """Mark the queue of a single message as no longer busy: undo `begin_single`. A second call for the same message
        changes nothing."""
        sends = single.sends
        if single.begun:
            sends.busy = False
            self._in_flight -= 1
            # No signal handler can run between the statement that clears `busy` and the statement that clears `begun`.
            # So `busy` and `begun` always agree.
            single.begun = False
        self._make_ready(sends)

    def release(self, sends: QueueSends) -> None:
        """Mark a queue as free for the next send, after its send in flight has ended."""
        if sends.busy:
            sends.busy = False
            self._in_flight -= 1
            self._make_ready(sends)

    def _put_first(self, batches: Sequence[SendBatch]) -> None:
        """Put batches before all waiting batches of their queues. The given batches keep their order."""
        for batch in reversed(batches):
            if batch.sends.waiting:
                batch.limit_bytes = SEALED
            batch.stage = Stage.QUEUED
            batch.sends.waiting.appendleft(batch)
            if batch.sends in self._resting:
                self._resting[batch.sends] = min(self._resting[batch.sends], batch.deadline_s)
            self._make_ready(batch.sends)
