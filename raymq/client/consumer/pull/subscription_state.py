"""SubscriptionState decides for a pull consumer which queues it holds, and what is fetched, returned and committed.

    group, brokers    granted → started → revoked → released          (raymq.client.consumer.assignment.assigned_queues)
    stores, polls     fetched → buffered → peek → taken → finished → committed

The program has finished with the messages of a poll when it polls again (with auto-commit), when it commits, or when it
has acknowledged each message (acknowledge_each). Until then their queue is *unsettled*: if it is revoked, it is not
released yet.

This module uses no threads, no clock and no remote calls. The owner (raymq.client.consumer.pull.engine) passes every
event, with the time in seconds, and changes the state only through the methods of this class. The state is lost when
the process ends; the brokers keep the committed offsets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from raymq.client.consumer.assignment.assigned_queue import AssignmentState
from raymq.client.consumer.assignment.assigned_queues import AssignedQueues
from raymq.client.consumer.assignment.unfinished_offsets import UnfinishedOffsets
from raymq.client.consumer.levels import LevelTurns
from raymq.client.consumer.pull.assigned_message_queue import AssignedMessageQueue, QueueFlags
from raymq.client.consumer.pull.fetched_records import FetchedRecords, PolledRecords
from raymq.client.consumer.pull.poll_turn import TakenRange
from raymq.client.consumer.pull.settings import PullSettings
from raymq.client.consumer.subscription import Subscription
from raymq.client.predicates.predicate import Predicate
from raymq.common.errors import ClientStateError, InvalidArgumentError
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import QueueOffset
from raymq.common.protocol.store import FetchRequest


class SubscriptionState(AssignedQueues[AssignedMessageQueue]):
    """All queues of one pull consumer (Kafka's SubscriptionState). Not thread-safe."""

    def __init__(self, settings: PullSettings, now_s: float) -> None:
        super().__init__()
        self._settings = settings
        self._subscriptions: dict[str, Subscription] = {}
        """The consumer's subscriptions, by topic."""
        self._buffered: dict[MessageQueue, None] = {}
        """Queues with buffered records, in the order in which polls return them. After a poll has taken records from a
        queue, the queue moves to the end. `_note` updates this table and the tables below for one queue. So a step for
        one message or one fetch need not visit every queue."""
        self._buffered_count = 0
        self._buffered_bytes = 0
        self._hungry: dict[MessageQueue, int] = {}
        """The queues that may be fetched again because few of their records are buffered, each with the next offset to
        fetch."""
        self._waits: dict[MessageQueue, FetchRequest] = {}
        """Requests for new messages, for queues that are read in place (from mapped files) and are neither paused nor
        revoked. Each request begins at the end of the queue's known messages."""
        self._unread: dict[MessageQueue, None] = {}
        """Queues whose mapped files have unread records, in the order in which they are read."""
        self._unsettled: dict[MessageQueue, None] = {}
        """The queues whose messages were in the result of the last poll."""
        self._unfinished: dict[MessageQueue, None] = {}
        """Queues from which polls have returned messages that the program has not finished."""
        self._dirty: dict[MessageQueue, None] = {}
        """Queues that have an offset to commit."""
        self._tables = (self._buffered, self._unread, self._unsettled, self._unfinished, self._dirty)
        self._version = 0
        self._polled_s = now_s
        """Time at which the program last began or ended a poll."""
        self._polling = False
        """True while the program is inside a poll."""
        self._levels = LevelTurns()
        """The turns of the PRIORITY topics. A poll that returns messages of a topic is a turn."""
        self._polled: set[str] = set()
        """PRIORITY topics with messages in the result of the present poll."""

    @property
    def expressions(self) -> dict[str, str]:
        """Subscription expression of each topic, for administrators."""
        return {topic: subscription.description for topic, subscription in self._subscriptions.items()}

    @property
    def topics(self) -> frozenset[str]:
        """The subscribed topics."""
        return frozenset(self._subscriptions)

    def predicate(self, topic: str) -> Predicate | None:
        """Return the predicate of the topic's subscription; None if the subscription has no predicate, or the topic is
        not subscribed."""
        subscription = self._subscriptions.get(topic)
        return None if subscription is None else subscription.predicate

    @property
    def version(self) -> int:
        """Version number of the queues and offsets for which the consumer waits for new messages. The number changes
        when the queues or offsets change, unless an offset advances only because the consumer has read messages."""
        return self._version

    @property
    def polling(self) -> bool:
        """True while the program is inside a poll."""
        return self._polling

    @property
    def hungry_count(self) -> int:
        """Number of queues that may be fetched now."""
        return len(self._hungry) if self._has_capacity else 0

    def missing(self, max_messages: int) -> int:
        """Return how many records must be read from mapped files, so that a poll can return `max_messages` in its
        order. Buffered records of a level do not replace unread records of a level that the poll returns first."""
        if not (self._levels and self._unread):
            return max_messages - self._buffered_count
        left = max_messages
        for queue in self._in_order(list(self._buffered | self._unread)):
            left -= self._queues[queue].buffered_count
            if left <= 0 or queue in self._unread:
                break
        return left

    def _in_order(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Return queues in the order in which this poll reads them: by level in PRIORITY topics."""
        return self._levels.order(list(queues), lambda queue: queue, self._queues)

    @property
    def assigned_queues(self) -> list[MessageQueue]:
        """The queues whose start offset is known, sorted. Revoked queues are not included. `poll` returns messages of
        these queues, unless a queue is paused or forbidden."""
        return sorted(queue for queue, assigned in self._queues.items() if assigned.state is AssignmentState.STARTED)

    @property
    def held_queues(self) -> list[AssignedMessageQueue]:
        """This consumer's queues, in any state, sorted. The group must not grant them to other members. Callers must
        not change them."""
        return [self._queues[queue] for queue in sorted(self._queues)]

    @property
    def paused(self) -> list[MessageQueue]:
        """The assigned queues that are paused, sorted."""
        return sorted(queue for queue in self.assigned_queues if self._queues[queue].paused)

    def get(self, queue: MessageQueue) -> AssignedMessageQueue:
        """Return the consumer's state of an assigned queue (AssignedMessageQueue), which the caller must not change.
        Raises ClientStateError if the queue is not assigned."""
        assigned = self._queues.get(queue)
        if assigned is None or assigned.state is not AssignmentState.STARTED:
            raise ClientStateError(f"queue {queue} is not assigned to this consumer now; see assignment()")
        return assigned

    # Methods that choose and release queues

    def subscribe(self, subscription: Subscription, *, has_levels: bool = False) -> None:
        """Set the subscription of a topic. If it differs from the previous subscription, the topic's buffered records
        are fetched again. `has_levels`: True for a PRIORITY topic, whose queues polls return by level."""
        self._levels.set(subscription.topic, has_levels=has_levels)
        if self._subscriptions.get(subscription.topic, subscription) != subscription:
            for assigned in self._queues.values():
                if assigned.queue.topic == subscription.topic:
                    assigned.refetch_from(assigned.position)
                    self._note(assigned, moved=True)
        self._subscriptions[subscription.topic] = subscription

    def assign(
        self,
        subscriptions: Mapping[str, Subscription],
        starts: Mapping[MessageQueue, QueueOffset],
        now_s: float,
        leveled: Collection[str] = (),
    ) -> None:
        """Assign exactly the queues of `starts`, without a group. Queues that are already assigned keep their
        positions. `leveled`: the PRIORITY topics."""
        for topic in self._subscriptions.keys() - subscriptions.keys():
            self._levels.set(topic, has_levels=False)
        for subscription in subscriptions.values():
            self.subscribe(subscription, has_levels=subscription.topic in leveled)
        self._subscriptions = dict(subscriptions)
        self.hold(starts, now_s)
        for queue, start in starts.items():
            self.started(self._queues[queue], start)
        self.lose([queue for queue in self._queues if queue not in starts])

    def unsubscribe(self, topic: str, now_s: float) -> None:
        """Stop returning messages of a topic. The topic's queues are released after the program has finished with the
        messages that polls returned."""
        self._subscriptions.pop(topic, None)
        self._levels.set(topic, has_levels=False)
        self.revoke([queue for queue in self._queues if queue.topic == topic], now_s)

    def _new_queue(self, queue: MessageQueue, generation: int) -> AssignedMessageQueue:
        unfinished = UnfinishedOffsets() if self._settings.acknowledge_each else None
        return AssignedMessageQueue(queue, generation, unfinished=unfinished)

    def _is_wanted(self, queue: MessageQueue) -> bool:
        return queue.topic in self._subscriptions

    def _may_go(self, assigned: AssignedMessageQueue, now_s: float) -> bool:
        """True if the program has finished with the queue's returned messages and, with auto-commit, their offset is
        committed."""
        return assigned.settled and not (self._settings.auto_commit and assigned.dirty)

    def is_absent(self, now_s: float) -> bool:
        """True if the program has not polled for longer than `poll_interval_max_s`."""
        return not self._polling and now_s - self._polled_s > self._settings.poll_interval_max_s

    # Methods that a poll calls

    def poll_begins(self, now_s: float) -> None:
        """Begin a poll. With auto-commit, all messages that earlier polls returned count as finished. Raises
        ClientStateError if another thread or task is inside a poll."""
        if self._polling:
            raise ClientStateError("another thread or task is polling this consumer: only one may poll at a time")
        self._polling = True
        self._polled_s = now_s
        if self._settings.acknowledge_each:
            return
        auto = self._settings.auto_commit
        for queue in self._unsettled | self._unfinished if auto else list(self._unsettled):
            assigned = self._queues[queue]
            assigned.settled = True
            if auto:
                assigned.done = assigned.position
            self._note(assigned)

    def poll_ends(self, now_s: float) -> None:
        """End the current poll."""
        self._polling = False
        self._levels.took(self._polled)
        self._polled.clear()
        self._polled_s = now_s

    def peek(self, max_messages: int) -> list[PolledRecords]:
        """Return up to `max_messages` of the next records, queue by queue in turn, and by level in a PRIORITY topic.
        The records stay buffered until `taken` is called. Paused and revoked queues have no buffered records."""
        slices: list[PolledRecords] = []
        left = max_messages
        for queue in self._in_order(self._buffered) if self._levels else self._buffered:
            for fetched in self._queues[queue].buffered:
                if not left:
                    return slices
                part = PolledRecords(queue, self._subscriptions[queue.topic], fetched, min(left, fetched.count))
                slices.append(part)
                left -= part.count
        return slices

    def is_current(self, part: PolledRecords) -> bool:
        """Return True if a poll may still return `part`, a slice of records that `peek` returned. It may not if the
        slice's queue had a seek, reset, pause or revocation since then."""
        assigned = self._queues.get(part.queue)
        return assigned is not None and bool(assigned.buffered) and assigned.buffered[0] is part.fetched

    def taken(self, part: PolledRecords, expected: Sequence[int] = ()) -> None:
        """Remove a slice of records from its queue's buffer, because a poll returns these records. The slice must be
        current (`is_current`). The queue moves to the end of the order in which polls read queues.

        `expected`: offsets of the messages that the program must acknowledge; empty unless it acknowledges each
        message.
        """
        assigned = self._queues[part.queue]
        assigned.returned(part)
        assigned.expect(expected)
        if assigned.buffered:
            del self._buffered[part.queue]
            self._buffered[part.queue] = None
        if self._levels:
            self._polled.add(part.queue.topic)
        self._note(assigned)

    def give_back(self, taken: Iterable[TakenRange]) -> None:
        """Undo the delivery of the ranges `taken`, because the program did not receive their messages. A later poll
        returns these messages again. A queue whose position has changed since the delivery is left unchanged."""
        for queue, start, end, expected in reversed(list(taken)):
            assigned = self._queues.get(queue)
            if assigned is None or assigned.state is not AssignmentState.STARTED or assigned.position != end:
                continue
            assigned.acknowledge(expected)
            assigned.refetch_from(start)
            assigned.done = min(assigned.done, start)
            self._note(assigned, moved=True)

    def wait_for_repair(self, queue: MessageQueue, offset: int) -> bool:
        """Return no message of a queue until `repaired`, because the record at `offset` is damaged. Returns False, and
        does nothing, unless `offset` is the queue's next offset to return."""
        assigned = self._queues.get(queue)
        if assigned is None or assigned.silent or assigned.position != offset:
            return False
        assigned.mending = True
        assigned.refetch_from(offset)
        self._note(assigned, moved=True)
        return True

    def repaired(self, queue: MessageQueue) -> None:
        """Read a queue again, because the damaged record at its next offset was repaired or is given up."""
        assigned = self._queues.get(queue)
        if assigned is not None and assigned.mending:
            assigned.mending = False
            assigned.refetch_from(assigned.position)
            self._note(assigned, moved=True)

    # Methods that select the queues to fetch, and that record the results of fetches

    def wanted(self) -> dict[MessageQueue, int]:
        """Return the queues that may be fetched again because few of their records are buffered, each with the next
        offset to fetch."""
        return self._hungry.copy() if self._has_capacity else {}

    @property
    def _has_capacity(self) -> bool:
        """True if both the number and the total size of the buffered records of all queues are below their
        limits."""
        settings = self._settings
        return (
            self._buffered_count < settings.threshold_all_count and self._buffered_bytes < settings.threshold_all_bytes
        )

    def _is_hungry(self, assigned: AssignedMessageQueue) -> bool:
        settings = self._settings
        return (
            not assigned.silent
            and not assigned.mapped
            and assigned.buffered_count <= settings.threshold_count // 2
            and assigned.buffered_bytes <= settings.threshold_bytes // 2
            and not (assigned.buffered and assigned.fetch_offset - assigned.position > settings.span_max)
        )

    def request(self, queue: MessageQueue, offset: int) -> FetchRequest:
        """Create the request to fetch a queue's messages from `offset` on, at most as many as may still be buffered. If
        the queue is now read from another offset, the result of this request is not needed: it asks for only one
        message, and `fetched` ignores its result."""
        assigned = self._fetched_at(queue, offset)
        subscription = self._subscriptions.get(queue.topic)
        if assigned is None or subscription is None or assigned.silent:
            return FetchRequest(queue.topic, queue.queue_id, offset, 1)
        assigned.fetching = True
        share = (self._settings.threshold_all_count - self._buffered_count) // len(self._queues)
        max_messages = max(1, min(self._settings.threshold_count - assigned.buffered_count, share))
        return FetchRequest(queue.topic, queue.queue_id, offset, max_messages, subscription.tag_codes, subscription.sql)

    def reads(self, queue: MessageQueue, offset: int) -> bool:
        """True if the queue is assigned and not paused, and its next offset to fetch is `offset`."""
        assigned = self._fetched_at(queue, offset)
        return assigned is not None and not assigned.paused

    def fetched(self, queue: MessageQueue, offset: int, *found: FetchedRecords) -> bool:
        """Buffer the records that a fetch from `offset`, or a read of the mapped files, has found. Returns False if a
        seek, reset, pause or revocation has made the records unwanted."""
        assigned = self._fetched_at(queue, offset)
        if assigned is None or not assigned.fetching:
            return False
        for fetched in found:
            assigned.fetched(fetched)
        self._note(assigned)
        return True

    def out_of_range(self, queue: MessageQueue, offset: int, next_offset: int) -> bool:
        """Continue reading a queue at `next_offset`, because `offset` lies outside the offsets that the queue contains.
        Polls first return the buffered records before `offset`. Returns False if `offset` is no longer the queue's next
        offset to fetch."""
        assigned = self._fetched_at(queue, offset)
        if assigned is None:
            return False
        if assigned.buffered and next_offset > offset:
            assigned.fetch_offset = next_offset
        else:
            assigned.refetch_from(next_offset)
            assigned.done = min(assigned.done, next_offset)
            assigned.forget_returned()
        self._note(assigned, moved=True)
        return True

    # Methods about queues that are read in place (from mapped files)

    def read_in_place(self, queue: MessageQueue) -> None:
        """Switch an assigned queue to reads from mapped files, up to the end that `end_known` reports. Ignores a queue
        that is not assigned."""
        assigned = self._queues.get(queue)
        if assigned is not None and not assigned.mapped:
            assigned.mapped, assigned.fetching, assigned.known_end = True, False, assigned.fetch_offset
            self._note(assigned, moved=True)

    def read_by_fetches(self, queue: MessageQueue) -> None:
        """Read a queue by fetches from now on, no longer in place (from mapped files)."""
        assigned = self._queues.get(queue)
        if assigned is not None and assigned.mapped:
            assigned.mapped = assigned.fetching = False
            self._note(assigned, moved=True)

    def waits(self) -> list[tuple[MessageQueue, FetchRequest]]:
        """Return the queues that are read in place (from mapped files). Each queue has a FetchRequest for the messages
        after the last message that the consumer knows of."""
        return list(self._waits.items())

    @property
    def has_unread(self) -> bool:
        """True if it is known that the mapped files have unread records."""
        return bool(self._unread)

    def end_known(self, queue: MessageQueue, offset: int, min_offset: int, max_offset: int) -> bool:
        """Record that a queue holds the offsets [`min_offset`, `max_offset`). The store returned these bounds as its
        answer to a watch request at `offset`. Returns False if the consumer's next offset in the queue lies outside of
        the bounds; a fetch must then find the reason."""
        assigned = self._queues.get(queue)
        if assigned is None or not assigned.mapped or assigned.silent or offset < assigned.fetch_offset:
            # The answer is outdated, so ignore it. Either the queue is paused, forbidden, or no longer assigned or read
            # in place. Or the next offset to fetch from the queue is now higher than the offset of the watch request.
            return True
        if not min_offset <= assigned.fetch_offset <= max_offset:
            return False
        assigned.known_end = max_offset
        self._note(assigned)
        return True

    def next_unread(self, max_messages: int) -> tuple[MessageQueue, FetchRequest, int] | None:
        """Return the next queue whose mapped files have unread records, with a request to read it and the queue's known
        end. Returns None if no queue has unread records, or with PRIORITY topics, if enough of their records are
        buffered. The returned queue moves to the end of the order in which queues are read."""
        for queue in self._in_order(self._unread) if self._levels else self._unread:
            assigned, wanted = self._queues[queue], self._subscriptions[queue.topic]
            if self._levels and assigned.buffered_count >= max_messages:
                continue  # polls return other levels first, so do not read this level further ahead
            assigned.fetching = True
            del self._unread[queue]
            self._unread[queue] = None
            request = FetchRequest(
                queue.topic, queue.queue_id, assigned.fetch_offset, max_messages, wanted.tag_codes, wanted.sql
            )
            return queue, request, assigned.known_end
        return None

    # Methods that change positions or pause queues

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue reading an assigned queue at `offset`. The next commit commits this offset."""
        assigned = self.get(queue)
        assigned.backwards |= offset < max(assigned.done, assigned.committed or 0)
        assigned.seek(offset)
        self._note(assigned, moved=True)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Stop fetching and returning messages of assigned queues. Their buffered records are dropped, so that they
        take no capacity from other queues."""
        for assigned in [self.get(queue) for queue in queues]:
            assigned.paused = True
            assigned.refetch_from(assigned.position)
            self._note(assigned, moved=True)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Resume paused queues. Their messages are fetched and returned again."""
        for assigned in [self.get(queue) for queue in queues]:
            assigned.paused = False
            self._note(assigned, moved=True)

    # Methods about finished messages and commits

    def acknowledge(self, offsets: Mapping[MessageQueue, Collection[int]]) -> None:
        """Mark messages as finished by the program, also in revoked queues. Ignores messages of queues that this
        consumer does not hold, because another member may have these queues."""
        for queue, acknowledged in offsets.items():
            assigned = self._queues.get(queue)
            if assigned is not None:
                assigned.acknowledge(acknowledged)
                self._note(assigned)

    def finish_all(self) -> None:
        """Mark all messages that polls have returned as finished by the program. Does nothing if the program
        acknowledges each message."""
        if self._settings.acknowledge_each:
            return
        for queue in self._unsettled | self._unfinished:
            self._queues[queue].finish()
            self._note(self._queues[queue])

    def finish(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Mark the messages before these offsets as finished by the program, also in revoked queues. All offsets are
        checked before any is applied. Raises ClientStateError if a queue is not held, and InvalidArgumentError if polls
        have not reached an offset."""
        for queue, offset in offsets.items():
            position = (self._revoked.get(queue) or self.get(queue)).position
            if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= position:
                raise InvalidArgumentError(
                    f"cannot commit offset {offset!r} of queue {queue}: polls have only reached offset "
                    f"{position}; use seek to skip messages"
                )
        for queue, offset in offsets.items():
            assigned = self._queues[queue]
            assigned.done = max(assigned.done, offset)
            self._note(assigned)

    def commit_is_urgent(self) -> bool:
        """True if the group waits for a revoked queue whose messages are finished but not committed (with
        auto-commit)."""
        return self._settings.auto_commit and any(
            assigned.settled and assigned.dirty for assigned in self._revoked.values()
        )

    def _perhaps_dirty(self) -> Iterable[AssignedMessageQueue]:
        return (self._queues[queue] for queue in self._dirty)

    def _committed(self, assigned: AssignedMessageQueue) -> None:
        self._note(assigned)

    def _reset(self, assigned: AssignedMessageQueue, start: QueueOffset) -> None:
        """Move a queue to the offset to which the group's offset was reset. Ignores a reset that is already
        known."""
        if start.reset_version > assigned.reset_version:
            assigned.reset(start)
            self._note(assigned, moved=True)

    # Methods that keep the attributes with sets of queues up to date after a queue has changed

    def _state_changed(self, assigned: AssignedMessageQueue) -> None:
        super()._state_changed(assigned)
        if assigned.dropped:
            self._forget(assigned)
        else:
            self._note(assigned, moved=True)

    def _note(self, assigned: AssignedMessageQueue, *, moved: bool = False) -> None:
        """Update the tables of queues (such as queues with buffered or unread records) after one queue's state has
        changed. `moved`: False if the state has changed only because the consumer has read messages."""
        assigned.follow_acknowledgements()
        queue, noted, silent = assigned.queue, assigned.noted, assigned.silent
        in_tables = (
            bool(assigned.buffered),
            assigned.unread,
            not assigned.settled,
            assigned.done != assigned.position,
            assigned.dirty,
        )
        if in_tables != noted.tables:
            self._set_tables(assigned, in_tables)
        hungry_at = assigned.fetch_offset if self._is_hungry(assigned) else -1
        if hungry_at != noted.hungry_at:
            noted.hungry_at = hungry_at
            if hungry_at < 0:
                del self._hungry[queue]
            else:
                self._hungry[queue] = hungry_at
        news_at = max(assigned.fetch_offset, assigned.known_end) if assigned.mapped and not silent else -1
        if news_at != noted.news_at:
            noted.news_at = news_at
            if news_at < 0:
                del self._waits[queue]
            else:
                self._waits[queue] = FetchRequest(queue.topic, queue.queue_id, news_at, 1)
        self._count(assigned, assigned.buffered_count, assigned.buffered_bytes)
        self._version += moved

    def _forget(self, assigned: AssignedMessageQueue) -> None:
        """Remove a queue that this consumer no longer holds from all tables of the subscription state."""
        self._set_tables(assigned, (False,) * len(self._tables))
        if assigned.noted.hungry_at >= 0:
            del self._hungry[assigned.queue]
        if assigned.noted.news_at >= 0:
            del self._waits[assigned.queue]
        self._count(assigned, 0, 0)
        assigned.noted = QueueFlags()
        self._version += 1

    def _set_tables(self, assigned: AssignedMessageQueue, in_tables: tuple[bool, ...]) -> None:
        """Add a queue to some of the consumer's tables, and remove it from the others. `in_tables`: for each table of
        `self._tables`, True if the table must contain the queue. A queue that a table already contains keeps its
        position in the table; a new queue is added at the end."""
        before = assigned.noted.tables or (False,) * len(in_tables)
        assigned.noted.tables = in_tables
        for table, is_in, was_in in zip(self._tables, in_tables, before, strict=True):
            if is_in and not was_in:
                table[assigned.queue] = None
            elif was_in and not is_in:
                del table[assigned.queue]

    def _count(self, assigned: AssignedMessageQueue, count: int, size_bytes: int) -> None:
        """Update the totals with the number and size of a queue's buffered records."""
        noted = assigned.noted
        self._buffered_count += count - noted.count
        self._buffered_bytes += size_bytes - noted.size_bytes
        noted.count, noted.size_bytes = count, size_bytes
