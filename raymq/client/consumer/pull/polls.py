"""Polls runs the polls of one pull consumer, each from its call until the program has the messages.

    begin → (peek → decode → take, or wait)… → end

PullConsumer runs a poll in one thread; AsyncPullConsumer runs it in steps on the event loop. A poll raises a copy of an
error that later polls raise again: callers would change a shared error's traceback, and make it longer each time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from raymq.client.consumer.assignment.group_member import GroupMember
from raymq.client.consumer.assignment.offset_committer import OffsetCommitter
from raymq.client.consumer.pull.fetched_records import (
    Decode,
    Found,
    PolledRecords,
    check_table,
    decode_tables,
    shown_records,
)
from raymq.client.consumer.pull.poll_turn import PollTurn, TakenRange
from raymq.client.consumer.pull.queue_reader import QueueReader
from raymq.client.consumer.pull.settings import PullSettings
from raymq.client.consumer.pull.subscription_state import SubscriptionState
from raymq.client.consumer.repair_wait import RepairWait, is_damage
from raymq.client.consumer.unreadable import UnreadableLog
from raymq.common.errors import BodyUnreadableError, ClientStateError, DataLossError, PredicateFailedError
from raymq.common.message import MessageExt, MessageQueue
from raymq.common.namespaces import Namespace
from raymq.telemetry.trace.deliveries import DeliveryTrace
from raymq.telemetry.trace.spans import Spans

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.records.kernels.column_bodies import BodyType
    from raymq.records.kernels.columns import Unreadable


class _MetErrors:
    """The errors of the unreadable messages in the records that a poll decodes. After `pass_on`, errors go to `note` at
    once: a compressed body is checked only when the program reads it."""

    def __init__(self, note: Callable[[BodyUnreadableError], None]) -> None:
        self._note = note
        self.errors: list[BodyUnreadableError] = []
        self._passes_on = False

    def __call__(self, error: BodyUnreadableError) -> None:
        if self._passes_on:
            self._note(error)
        else:
            self.errors.append(error)

    def pass_on(self) -> None:
        """Pass the errors so far and all later errors to `note`."""
        self._passes_on = True
        for error in self.errors:
            self._note(error)
        self.errors.clear()


class LostMessages:
    """Messages of a consumer that could not be read, each with the error to raise. Guarded by the consumer's
    lock."""

    def __init__(self) -> None:
        self._errors: dict[MessageQueue, tuple[int, DataLossError | PredicateFailedError]] = {}
        """For each queue, the last offset that could not be read, and the error."""
        self._unraised: set[MessageQueue] = set()
        """Queues with a lost message whose error was not raised to the program yet."""

    def add(self, queue: MessageQueue, offset: int, error: DataLossError | PredicateFailedError) -> None:
        """Record that the message at an offset could not be read. Its error will be raised, even if the same error was
        raised before."""
        self._errors[queue] = (offset, error)
        self._unraised.add(queue)

    def forget(self, queue: MessageQueue) -> None:
        """Forget the error of a queue's lost message, because the queue could be read again."""
        self._errors.pop(queue, None)
        self._unraised.discard(queue)

    def raise_again(self) -> None:
        """Make `raise_one` raise all recorded errors again, including errors that were raised before."""
        self._unraised.update(self._errors)

    def raise_one(self, core: SubscriptionState) -> None:
        """Raise a copy of the error of a lost message if the consumer's position in the message's queue has reached it.
        `core` contains the positions. An error that was raised before is not raised again. If records before the lost
        message are buffered, polls return these records first."""
        for queue in sorted(self._unraised):
            offset, error = self._errors[queue]
            if not core.reads(queue, offset):
                del self._errors[queue]
            elif core.get(queue).position < offset:
                continue
            self._unraised.discard(queue)
            if queue in self._errors:
                raise copy(error) from error


class Polls:
    """Runs the polls of one consumer, one at a time. `core`, guarded by `lock`, holds the consumer's queues.

    `check_open` raises ClientStateError after the consumer was closed. `assigns()` returns True if the program has
    called `assign`. `wake` wakes a poll that waits.
    """

    def __init__(
        self,
        core: SubscriptionState,
        lock: threading.Lock,
        settings: PullSettings,
        names: Namespace,
        *,
        reader: QueueReader,
        member: GroupMember,
        committer: OffsetCommitter,
        lost: LostMessages,
        closing: threading.Event,
        check_open: Callable[[], None],
        assigns: Callable[[], bool],
        wake: Callable[[], None],
        trace: DeliveryTrace | None,
        spans: Spans | None,
    ) -> None:
        self._core, self._lock, self._settings, self._names = core, lock, settings, names
        self._reader, self._member, self._committer, self._lost = reader, member, committer, lost
        self._closing, self._check_open, self._assigns, self._wake = closing, check_open, assigns, wake
        self._trace, self._spans = trace, spans
        self._began_ns = 0
        self._turn: PollTurn | None = None
        """The consumer's last poll, which may still be running; None before the first poll, and after an abandoned poll
        was ended."""
        self.unreadable = UnreadableLog(settings.group)
        """Log of the unreadable messages that polls have skipped."""
        self.descriptors, self.wait_max_s = reader.descriptors, reader.wait_max_s
        self._repairs = RepairWait(reader.report_damage, self._read_again)
        self._damaged_at: dict[MessageQueue, int] = {}
        """For each queue in which the running poll has met damage: the offset at which the poll waits for the
        repair."""

    def begin(self, turn: PollTurn) -> None:
        """Begin a poll. With auto-commit, all messages that earlier polls returned count as finished. Raises the errors
        of PullConsumer.poll that can be detected before the poll begins."""
        self._check_open()
        self.settle_abandoned()
        self._committer.raise_refusal()
        self._member.raise_refusal()
        with self._lock:
            self._lost.raise_one(self._core)
        if self._spans is not None:
            self._began_ns = time.time_ns()
        now_s = time.monotonic()
        with self._lock:
            # Check under the lock that the consumer is open. Otherwise a poll could begin after `close` has looked for
            # running polls.
            self._check_open()
            if turn.abandoned:
                raise ClientStateError("the poll was interrupted before it began")
            self._core.poll_begins(now_s)
            self._turn = turn
            useless = not self._core.expressions and not self._assigns()
            if useless:
                self._core.poll_ends(now_s)
                self._turn = None
            leaves, commits = self._core.leaving, self._core.has_uncommitted
        if leaves:
            self._member.release()
        if commits:
            self._committer.wake()
        if useless:
            raise ClientStateError(
                "this consumer has no subscription; call subscribe(topic) before poll(), or assign(queues)"
            )

    def settle_abandoned(self) -> None:
        """Put the messages of the last poll back into their queues, if the program's call of `poll` was interrupted
        before it returned these messages."""
        turn = self._turn
        if turn is None or not turn.abandoned:
            return
        self._wake()
        turn.end_dropped(self.end)
        if not turn.has_ended:
            raise ClientStateError("an earlier, interrupted poll of this consumer is still running; call poll() again")
        with self._lock:
            if self._turn is turn:
                self._core.give_back(turn.taken)
                self._turn = None
        self._reader.read_more()

    def end(self, turn: PollTurn) -> None:
        """End the poll `turn` of this consumer."""
        with self._lock:
            self._core.poll_ends(time.monotonic())
            closed = self._closing.is_set()
        turn.has_ended = True
        if closed:
            self._reader.close_files()

    def close(self) -> None:
        """Report no more damaged records. Called when the consumer closes."""
        self._repairs.close()

    def raise_failure(self) -> None:
        """Raise the error that explains why a poll found nothing, if there is one: the group could never be joined, the
        group may not read a queue now, or a queue's next message is lost."""
        self._member.raise_failure()
        with self._lock:
            self._lost.raise_again()
            forbidden = next(iter(self._core.forbidden.values()), None)
            self._lost.raise_one(self._core)
        if forbidden is not None:
            raise copy(forbidden) from forbidden

    def raise_loss(self) -> None:
        """Raise an error that ends an empty poll at once. Raises NoPermissionError if the group may read none of this
        consumer's queues. Otherwise raises the error for a lost message, if there is one that was not raised yet."""
        with self._lock:
            if self._core.all_forbidden:
                forbidden = next(iter(self._core.forbidden.values()))
                raise copy(forbidden) from forbidden
            self._lost.raise_one(self._core)

    def peek(self, max_messages: int) -> list[PolledRecords]:
        """Return the next records of the consumer's queues. The records stay buffered until they are taken. On the
        storage actor's node this call also finds records in the actor's mapped files."""
        self._member.fence()  # give up the queues if the lease expired, for example while the process was suspended
        self._reader.look(max_messages)
        with self._lock:
            return self._core.peek(max_messages)

    def decode(self, decode: Decode[Found], slices: list[PolledRecords]) -> list[tuple[PolledRecords, Found]]:
        """Decode slices of records with the given function, and remove the namespace from the topic names. Uses CPU
        time, but never blocks.

        If the poll waits for the repair of a damaged record, the result has only the messages of the queue before this
        record.
        """
        decoded = self._decode_intact(decode, slices)
        if not self._names:
            return decoded
        return [(part, cast("Found", shown_records(found, self._names))) for part, found in decoded]

    def _decode_intact(self, decode: Decode[Found], slices: list[PolledRecords]) -> list[tuple[PolledRecords, Found]]:
        met = _MetErrors(self.unreadable.note)
        self._damaged_at = {}
        try:
            decoded = decode(slices, met)
        except BodyUnreadableError as error:
            # The program asked for this error instead of a table, and the first message is damaged.
            if not is_damage(error) or not self._wait_for(slices, [error]):
                raise
            return []
        damage = [error for error in met.errors if is_damage(error)]
        if damage and self._wait_for(slices, damage):
            met = _MetErrors(self.unreadable.note)
            slices = [part for part in map(self._before_damage, slices) if part is not None]
            decoded = decode(slices, met) if slices else []
        met.pass_on()
        return decoded

    def _wait_for(self, slices: list[PolledRecords], damage: Sequence[BodyUnreadableError]) -> bool:
        """Report damaged records, and note where the poll waits for a repair. Returns False if it does not wait."""
        queues = {str(part.queue): part.queue for part in slices}
        for name in {error.queue for error in damage}:
            queue = queues[name]
            first = self._repairs.meet(queue, {one.queue_offset for one in damage if one.queue == name})
            if first is not None:
                self._damaged_at[queue] = first
        return bool(self._damaged_at)

    def _before_damage(self, part: PolledRecords) -> PolledRecords | None:
        """Return the records of a slice before the record for whose repair the poll waits; None if there are none."""
        until = self._damaged_at.get(part.queue)
        if until is None:
            return part
        before = int(np.searchsorted(part.offsets, until))
        return replace(part, count=before) if before else None

    def _read_again(self, queue: MessageQueue) -> None:
        """Read a queue again after the wait for a repair."""
        with self._lock:
            self._core.repaired(queue)
        self._reader.read_more()

    def take(self, turn: PollTurn, decoded: Iterable[tuple[PolledRecords, Found]]) -> list[tuple[PolledRecords, Found]]:
        """Take from `decoded` the slices of records that are still current (not outdated by a seek, reset, pause or
        revocation), and return them. From now on, their messages count as returned by the poll `turn`."""
        self._member.fence()
        taken = []
        with self._lock:
            before = self._core.hungry_count
            for part, found in decoded:
                if self._core.is_current(part):
                    expected, start = self._expected(found), self._core.get(part.queue).position
                    self._core.taken(part, expected)
                    turn.taken.append(TakenRange(part.queue, start, self._core.get(part.queue).position, expected))
                    taken.append((part, found))
            more = self._core.hungry_count > before
            waits, self._damaged_at = self._damaged_at, {}
            waits = {queue: at for queue, at in waits.items() if self._core.wait_for_repair(queue, at)}
        for queue, offset in waits.items():
            # The wait may have ended since `decode`, before the queue waited for its end.
            if not self._repairs.is_waiting(queue, offset):
                self._read_again(queue)
        if self._trace is not None:
            for part, found in taken:
                self._trace.polled(part.queue.topic, found)
        if self._spans is not None:
            for part, found in taken:
                if len(found):
                    self._spans.received(self._settings.group, part.queue.topic, found, self._began_ns)
        if more:
            self._reader.read_more()
        return taken

    def _expected(self, found: Sized) -> list[int]:
        """Return the offsets of those messages in `found` that the program must acknowledge."""
        if not self._settings.acknowledge_each:
            return []
        # If acknowledge_each is set, the found messages are always a list of MessageExt, because `table_decoder` then
        # refuses to return tables.
        return [message.queue_offset for message in cast("list[MessageExt]", found)]

    def end_abandoned(self) -> bool:
        """End the last poll if the program's call of this poll was interrupted. Returns True if a poll is still
        running."""
        turn = self._turn
        if turn is not None and turn.abandoned:
            turn.end_dropped(self.end)
        with self._lock:
            return self._core.polling

    def table_decoder(
        self, body_type: BodyType, columns: Sequence[str] | None, unreadable: Unreadable
    ) -> Decode[pa.RecordBatch]:
        """Return the function that decodes polled records for a table. Raises ClientStateError if the consumer was made
        with acknowledge_each, and InvalidArgumentError if no table can be created with these options."""
        if self._settings.acknowledge_each:
            raise ClientStateError("this consumer acknowledges each message: call poll(), not poll_table()")
        check_table(body_type, columns, unreadable)
        return partial(
            decode_tables,
            body_type=body_type,
            columns=columns,
            unreadable=unreadable,
        )
