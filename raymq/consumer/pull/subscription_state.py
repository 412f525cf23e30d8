"""What a pull consumer holds and decides: queues, buffers, positions, pauses, what to read next and what to commit.

    granted → starting → held → revoked → released
                          │
              fetched → [runs] → peek → taken → settled → committed

The program has finished with what a poll returned when it polls again (with auto-commit) or commits; until then its
queue is *unsettled*, and a revoked one is not let go. What one queue is made of: raymq.consumer.pull.assigned_queue.

No threads, no clock, no calls: the owner (raymq.consumer.pull.engine) brings what it hears, with the time in seconds.
Nothing here survives the process; committed offsets do, at the brokers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from raymq.consumer.pull.assigned_queue import AssignedMessageQueue
from raymq.consumer.pull.fetched_records import FetchedRecords, PolledRecords
from raymq.consumer.pull.settings import PullSettings
from raymq.consumer.subscription import Subscription
from raymq.errors import ClientStateError, InvalidArgumentError
from raymq.message import MessageQueue
from raymq.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from raymq.protocol.membership import SESSION_TIMEOUT_S, GroupAssignment
from raymq.protocol.store import FetchRequest

PULL_FENCE_AFTER_S: Final = SESSION_TIMEOUT_S * 0.6
"""Counted from the sending of the last heartbeat that was answered: the group's own count begins no earlier."""


class SubscriptionState:
    """All queues of one pull consumer. The order of `_queues` is their turn: who was taken from goes to the end."""

    def __init__(self, settings: PullSettings, now_s: float) -> None:
        self._settings = settings
        self._queues: dict[MessageQueue, AssignedMessageQueue] = {}
        self._fenced: dict[MessageQueue, int] = {}
        self._lease_until_s = -math.inf
        self._polled_s = now_s
        self._committed_s = now_s
        self._polling = False
        self.subscriptions: dict[str, Subscription] = {}
        self.starting: dict[MessageQueue, int] = {}
        """Queues that were granted, and the generation; each is held once its start is known."""
        self.joined = False
        """Whether the group has ever answered, or queues were assigned."""
        self.offsets_version: int | None = None
        """The group's count of resets, as last heard. None without a group."""

    @property
    def holding(self) -> frozenset[MessageQueue]:
        """What the group must not give to others: queues held, and those whose start is being asked for."""
        return frozenset(self._queues) | frozenset(self.starting)

    @property
    def leaving(self) -> bool:
        """Whether queues were revoked that are not let go yet."""
        return any(held.revoked for held in self._queues.values())

    @property
    def held(self) -> list[MessageQueue]:
        """The queues that are read and returned, sorted: without revoked ones."""
        return sorted(queue for queue, held in self._queues.items() if not held.revoked)

    @property
    def paused(self) -> list[MessageQueue]:
        """Those of them that are paused, sorted."""
        return sorted(queue for queue in self.held if self._queues[queue].paused)

    def get(self, queue: MessageQueue) -> AssignedMessageQueue:
        """A held queue; ClientStateError."""
        held = self._queues.get(queue)
        if held is None or held.revoked:
            raise ClientStateError(f"this consumer does not hold {queue} now; see assignment()")
        return held

    # Ownership

    def subscribe(self, subscription: Subscription) -> None:
        """Want these messages of a topic. Where others were wanted, what waits of it is read again."""
        if self.subscriptions.get(subscription.topic, subscription) != subscription:
            for held in self._queues.values():
                if held.queue.topic == subscription.topic:
                    held.empty(held.position)
        self.subscriptions[subscription.topic] = subscription

    def assigned(self, assignment: GroupAssignment, lease_from_s: float) -> None:
        """The group's answer to a heartbeat sent at `lease_from_s`."""
        granted = {queue for queue in assignment.queues if queue.topic in self.subscriptions}
        for queue, held in self._queues.items():
            held.revoked = queue not in granted
            if held.revoked:
                held.empty(held.position)
            else:
                held.generation = assignment.generation
        self.starting = {
            queue: assignment.generation
            for queue in sorted(granted - self._queues.keys())
            if self._fenced.get(queue, 0) < assignment.generation
        }
        self._fenced = {queue: at for queue, at in self._fenced.items() if queue in granted}
        self._lease_until_s = lease_from_s + PULL_FENCE_AFTER_S
        self.offsets_version = assignment.offsets_version
        self.joined = True

    def started(self, queue: MessageQueue, start: QueueOffset) -> bool:
        """Where a granted queue starts. False when it is not granted any more."""
        generation = self.starting.pop(queue, None)
        if generation is None:
            return False
        self._queues[queue] = AssignedMessageQueue.at(queue, start, generation)
        return True

    def assign(self, subscriptions: Mapping[str, Subscription], starts: Mapping[MessageQueue, QueueOffset]) -> None:
        """Hold exactly `starts`, without a group; queues that are held already go on where they are."""
        for subscription in subscriptions.values():
            self.subscribe(subscription)
        self.subscriptions = dict(subscriptions)
        self._queues = {
            queue: self._queues.get(queue) or AssignedMessageQueue.at(queue, start, 0)
            for queue, start in starts.items()
        }
        self._lease_until_s = math.inf
        self.joined = True

    def unsubscribe(self, topic: str) -> None:
        """Return nothing more of a topic, and let its queues go once they are settled."""
        self.subscriptions.pop(topic, None)
        self.starting = {queue: at for queue, at in self.starting.items() if queue.topic != topic}
        for held in self._queues.values():
            if held.queue.topic == topic:
                held.revoked = True
                held.empty(held.position)

    def release(self) -> list[MessageQueue]:
        """Let revoked queues go that are settled and, with auto-commit, committed. Names them."""
        auto = self._settings.auto_commit
        gone = [q for q, held in self._queues.items() if held.revoked and held.settled and not (auto and held.dirty)]
        for queue in gone:
            del self._queues[queue]
        return gone

    def fence(self, now_s: float) -> bool:
        """Give up everything when the group was silent for too long: others may have the queues. True if so."""
        return now_s > self._lease_until_s and self.lose_all()

    def lose_all(self) -> bool:
        """Others may get the queues: return and commit nothing more of them. False when there were none."""
        lost = bool(self.holding)
        self._queues.clear()
        self.starting.clear()
        return lost

    def abandoned(self, now_s: float) -> bool:
        """Whether the program has stopped polling."""
        return not self._polling and now_s - self._polled_s > self._settings.poll_interval_max_s

    # Polling

    def poll_begins(self, now_s: float) -> None:
        """The program polls. With auto-commit it has finished with what earlier polls returned. ClientStateError when
        another thread or task is at it."""
        if self._polling:
            raise ClientStateError("another thread or task polls this consumer now; one may at a time")
        self._polling = True
        self._polled_s = now_s
        for held in self._queues.values():
            held.settled = True
            if self._settings.auto_commit:
                held.done = held.position

    def poll_ends(self, now_s: float) -> None:
        self._polling = False
        self._polled_s = now_s

    def peek(self, max_messages: int) -> list[PolledRecords]:
        """The next records, queue by queue in turn, up to so many. They stay here until they are `taken`. Nothing waits
        of paused and revoked queues."""
        slices: list[PolledRecords] = []
        left = max_messages
        for queue, held in self._queues.items():
            for run in held.runs:
                if not left:
                    return slices
                part = PolledRecords(queue, self.subscriptions[queue.topic], run, min(left, run.count))
                slices.append(part)
                left -= part.count
        return slices

    def is_current(self, part: PolledRecords) -> bool:
        """Whether a slice may still be returned: no seek, reset, pause or revocation has come between."""
        held = self._queues.get(part.queue)
        return held is not None and bool(held.runs) and held.runs[0] is part.fetched

    def taken(self, part: PolledRecords) -> None:
        """A current slice is returned to the program; the queue's next turn comes after the others'."""
        held = self._queues.pop(part.queue)
        held.take(part)
        self._queues[part.queue] = held

    def refetch(self, queue: MessageQueue) -> None:
        """Drop what waits of a queue, and read it again."""
        held = self._queues.get(queue)
        if held is not None:
            held.empty(held.position)

    # Reading

    def wanted(self) -> dict[MessageQueue, int]:
        """Queue to next offset, of the queues of which so little waits that more is to be read."""
        settings, queues = self._settings, self._queues.values()
        if sum(held.buffered_count for held in queues) >= settings.threshold_all_count:
            return {}
        if sum(held.buffered_bytes for held in queues) >= settings.threshold_all_bytes:
            return {}
        return {held.queue: held.fetch_offset for held in queues if self._is_wanted(held)}

    def _is_wanted(self, held: AssignedMessageQueue) -> bool:
        settings = self._settings
        return (
            not held.silent
            and held.buffered_count <= settings.threshold_count // 2
            and held.buffered_bytes <= settings.threshold_bytes // 2
            and not (held.runs and held.fetch_offset - held.position > settings.span_max)
        )

    def request(self, queue: MessageQueue, offset: int) -> FetchRequest:
        """A read of a queue. It is of no use where `offset` is not what is read next (any more)."""
        held = self._queues.get(queue)
        subscription = self.subscriptions.get(queue.topic)
        if held is None or subscription is None or held.silent or held.fetch_offset != offset:
            return FetchRequest(queue.topic, queue.queue_id, offset, 1)
        held.asked = True
        buffered = sum(held.buffered_count for held in self._queues.values())
        share = (self._settings.threshold_all_count - buffered) // len(self._queues)
        room = max(1, min(self._settings.threshold_count - held.buffered_count, share))
        return FetchRequest(queue.topic, queue.queue_id, offset, room, subscription.tag_codes)

    def reads(self, queue: MessageQueue, offset: int) -> bool:
        """Whether `offset` is what is read next of a queue that is held and neither paused nor revoked."""
        held = self._queues.get(queue)
        return held is not None and not held.silent and held.fetch_offset == offset

    def fetched(self, queue: MessageQueue, offset: int, run: FetchedRecords) -> bool:
        """What a read from `offset` found. False when it is not wanted any more: something has come between."""
        held = self._queues.get(queue)
        if held is None or not held.asked or held.fetch_offset != offset:
            return False
        held.asked = False
        held.fetch_offset = run.next_offset
        if run.count:
            held.runs.append(run)
            held.buffered_count += run.count
            held.buffered_bytes += run.records.size_bytes
        elif held.runs:
            held.runs[-1].next_offset = run.next_offset
        else:
            held.position = run.next_offset
        return True

    def out_of_range(self, queue: MessageQueue, offset: int, next_offset: int) -> bool:
        """The queue does not hold `offset` (any more): go on at `next_offset`, after what waits from before a gap."""
        held = self._queues.get(queue)
        if held is None or held.fetch_offset != offset:
            return False
        if held.runs and next_offset > offset:
            held.fetch_offset = next_offset
        else:
            held.empty(next_offset)
            held.done = min(held.done, next_offset)
        return True

    # Places

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on at `offset` in a held queue, and commit that from now on."""
        held = self.get(queue)
        held.backwards |= offset < max(held.done, held.committed or 0)
        held.go_to(offset)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Neither read nor return held queues. What waits of them is dropped: it must not take the room of others."""
        for held in [self.get(queue) for queue in queues]:
            held.paused = True
            held.empty(held.position)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Undo `pause`."""
        for held in [self.get(queue) for queue in queues]:
            held.paused = False

    # Committing

    def finish_all(self) -> None:
        """The program has finished with everything that polls returned."""
        for held in self._queues.values():
            held.finish()

    def finish(self, offsets: Mapping[MessageQueue, int]) -> None:
        """It has finished with what is before these offsets, also in revoked queues. Checked before any counts:
        ClientStateError for a queue that is not held, InvalidArgumentError for an offset that polls have not come to.
        """
        for queue, offset in offsets.items():
            position = (self._queues.get(queue) or self.get(queue)).position
            if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= position:
                raise InvalidArgumentError(
                    f"{queue}: cannot commit {offset!r}: polls have come to {position}; use seek to leave messages out"
                )
        for queue, offset in offsets.items():
            self._queues[queue].done = max(self._queues[queue].done, offset)

    def commits_due(self, now_s: float) -> bool:
        """Whether it is time to commit by itself: the interval is over, or the group waits for a queue."""
        if not self._settings.auto_commit:
            return False
        leaving = any(held.revoked and held.settled and held.dirty for held in self._queues.values())
        return leaving or now_s - self._committed_s >= self._settings.auto_commit_interval_s

    def uncommitted(self, now_s: float) -> dict[MessageQueue, OffsetCommit]:
        """What is to be committed now."""
        self._committed_s = now_s
        return {queue: held.commit(held.done) for queue, held in self._queues.items() if held.dirty}

    def questions(self) -> dict[MessageQueue, OffsetCommit]:
        """Commits of nothing, which ask whether somebody has reset the offsets."""
        return {queue: held.commit(None) for queue, held in self._queues.items()}

    def answered(self, commits: Mapping[MessageQueue, OffsetCommit], answer: CommitAnswer) -> dict[MessageQueue, int]:
        """The brokers' answer. Gives the offsets that are committed."""
        for queue in answer.fenced | answer.gone:
            held = self._queues.pop(queue, None)
            if held is not None and queue in answer.fenced:
                self._fenced[queue] = held.generation
        for queue, at in answer.reset.items():
            self._reset(queue, at)
        refused = answer.fenced | answer.gone | answer.reset.keys()
        committed = {q: c.queue_offset for q, c in commits.items() if q not in refused and c.queue_offset is not None}
        for queue, offset in committed.items():
            held = self._queues.get(queue)
            if held is not None and held.reset_version == commits[queue].reset_version:
                held.committed = offset if commits[queue].backwards else max(offset, held.committed or 0)
                held.backwards &= held.done < held.committed
        return committed

    def _reset(self, queue: MessageQueue, at: QueueOffset) -> None:
        """Somebody has reset a queue: go on there, unless that is known already."""
        held = self._queues.get(queue)
        if held is not None and at.reset_version > held.reset_version:
            held.go_to(at.queue_offset)
            held.committed, held.reset_version, held.backwards = at.queue_offset, at.reset_version, False
