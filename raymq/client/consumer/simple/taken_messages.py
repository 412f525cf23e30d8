"""MessageTaker turns the leased ranges of a broker's answer into the messages that a program receives.

leased ranges → LeaseReader → wanted messages, with their receipts
                    ├ excluded by the subscription, deleted by retention, damaged for ever: acknowledged here
                    ├ over the retry limit: sent to the dead letters, and acknowledged here
                    └ damaged, and perhaps repaired by a replica: received again soon
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from raymq.client.consumer.repair_wait import READ_REPAIR_WAIT_S, WAITS_MAX, is_damage
from raymq.client.consumer.simple.lease_reader import LeasedMessages, LeaseReader
from raymq.client.consumer.simple.received_message import Receipt, ReceivedMessage, parts_of, received
from raymq.client.consumer.subscription import Subscription
from raymq.client.consumer.unreadable import UnreadableLog
from raymq.common.errors import RaymqError
from raymq.common.message import MessageQueue
from raymq.common.names import retry_topic
from raymq.common.namespaces import Namespace
from raymq.common.numbers import INT32_MAX
from raymq.common.protocol.pop import LeasedRange, LeasePart, ReceiveAnswer
from raymq.common.protocol.store import RepairState
from raymq.remoting.actor_ref import ActorRef
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES

GIVE_UP_TIMEOUT_S: Final = 20.0
"""Timeout in s of the call that stores a dead letter."""
REPAIR_AGAIN_MS: Final = 5_000
"""Time in ms after which a damaged message is received again, if a replica may repair it."""
MENDING_KEPT_S: Final = 600.0
"""Time in s for which a consumer knows since when a damaged message waits for its repair."""
RECEIVE_MAX_BYTES: Final = 64 << 20
"""Maximum bytes of records that one receive reads; further leased messages are returned to the broker."""

logger = logging.getLogger(__name__)


class MessageTaker:
    """Reads the leased messages of one consumer group. Thread-safe. `call` calls a broker's method, given the broker's
    name, the method's name and its arguments; it retries while the broker restarts. `gives_up`: False if messages never
    become dead letters by the number of their attempts."""

    def __init__(
        self, group: str, reader: LeaseReader, names: Namespace, call: Callable[..., Any], *, gives_up: bool = True
    ) -> None:
        self._gives_up = gives_up
        self._group, self._reader, self._names, self._call = group, reader, names, call
        self._unreadable = UnreadableLog(group)
        self._lock = threading.Lock()
        self._mending_since_s: dict[tuple[str, str, int, int], float] = {}
        """For each damaged message (broker, topic, queue id, offset) that may be repaired: the time at which this
        process first received it."""

    def take(
        self,
        name: str,
        answer: ReceiveAnswer,
        subscriptions: Mapping[str, Subscription],
        max_bytes: int = RECEIVE_MAX_BYTES,
    ) -> list[ReceivedMessage]:
        """Read the messages of leased ranges of the broker `name`, up to about `max_bytes` of records. Further leased
        messages are returned to the broker. In order mode, the messages of a queue are sorted by offset."""
        retries = Subscription.parse(retry_topic(self._group))
        messages: list[ReceivedMessage] = []
        unread: list[LeasePart] = []
        left_bytes = min(max_bytes, RECEIVE_MAX_BYTES)
        for given in answer.ranges:
            if left_bytes <= 0:
                unread.append(_part(given, given.start))
                continue
            found = self._reader.read(name, given, subscriptions.get(given.topic, retries), left_bytes)
            left_bytes -= found.size_bytes
            if found.messages:
                stored_ms = found.messages[0].store_timestamp_ms
                CLIENT_FIGURES.delivered(given.topic, self._group, stored_ms, len(found.messages), found.size_bytes)
            if found.end < given.start + given.count:
                unread.append(_part(given, found.end))
            messages += self._take(name, given, found, answer)
        if unread:
            self._call(name, "change_invisible", self._group, unread, 0, False)
        if answer.ordered_topics and len(answer.ranges) > 1:
            messages.sort(key=lambda message: (message.topic, message.queue_id, message.queue_offset))
        return messages

    def _take(
        self, name: str, given: LeasedRange, found: LeasedMessages, answer: ReceiveAnswer
    ) -> list[ReceivedMessage]:
        """From one leased range, return the messages that the program receives. All other messages of the range are
        acknowledged, sent to the dead letters, or left for redelivery."""
        messages, retry_max_times = found.messages, answer.retry_max_times if self._gives_up else INT32_MAX
        places = (given.topic, name, given.queue_id, given.start, given.pop_ms, given.invisible_ms, given.attempts)
        handed_out = given.count - int(given.without, 16).bit_count()
        whole = len(messages) if len(messages) == handed_out else 0
        is_ordered = given.topic in answer.ordered_topics
        receipt = Receipt(*places, is_ordered, whole, answer.retry_intervals_s, retry_max_times, found.size_bytes)
        result = received(self._names.shown_messages(messages), receipt)
        # If the lease is of the retry topic, a message may have had too many attempts although the lease counts only a
        # few. The message's record also counts the attempts before the message was sent to the retry topic.
        if given.attempts > retry_max_times or given.topic == retry_topic(self._group):
            dead = [index for index, message in enumerate(result) if message.attempt > retry_max_times + 1]
            for index in dead:
                attempts = result[index].attempt - 1
                self._give_up(name, found.record(index), attempts, _not_acknowledged(attempts))
            if dead:
                parts = [of.part(offsets) for of, offsets in parts_of([result[index] for index in dead])]
                self._call(name, "ack_messages", self._group, parts)
                gone = set(dead)
                result = [message for index, message in enumerate(result) if index not in gone]
        if len(messages) < handed_out:
            self._settle_unreadable(name, given, found, retry_max_times)
            self._settle_excluded(name, given, found)
        return result

    def give_up_one(self, name: str, given: LeasedRange, attempts: int, failure: str) -> bool:
        """Store the one message of a lease as a dead letter. Returns False if retention has deleted the message.

        `attempts`: the number of failed deliveries; 0: the number that the lease and the message count. `failure`: why
        the message failed; empty: the number of attempts. The lease stays as it is. Raises BodyUnreadableError if the
        message's record is damaged, and RaymqError if the message cannot be read or stored.
        """
        found = self._reader.read(name, given, Subscription.parse(given.topic), RECEIVE_MAX_BYTES)
        reason = ""
        if found.messages:
            [message], record = found.messages, found.record(0)
        elif found.unreadable:
            [(message, error, record)] = found.unreadable.values()
            if error.record_damaged:
                raise error
            reason = error.reason
        else:
            return False
        attempts = attempts or message.reconsume_times + given.attempts
        self._give_up(name, record, attempts, failure or _not_acknowledged(attempts), reason)
        return True

    def report_reads(self) -> None:
        """Report to the stores how many messages were read from their mapped files (LeaseReader.report_reads)."""
        self._reader.report_reads()

    def _settle_unreadable(self, name: str, given: LeasedRange, found: LeasedMessages, retry_max_times: int) -> None:
        """Handle the unreadable messages of a leased range, so that the caller can acknowledge them. Sends messages
        over the retry limit to the dead letters. Removes these messages, and messages with damaged records, from
        `found.unreadable`. A message that a replica may still repair stays, and is received again soon."""
        mending = self._mending(name, given, found)
        for offset, (message, error, record) in list(found.unreadable.items()):
            if offset in mending:
                continue
            self._unreadable.note(error)
            attempts = message.reconsume_times + given.attempts
            if error.record_damaged:
                logger.error("group %s skips a message that cannot be read: %s", self._group, error)
                del found.unreadable[offset]
            elif attempts > retry_max_times:
                self._give_up(name, record, attempts, _not_acknowledged(attempts), error.reason)
                del found.unreadable[offset]

    def _mending(self, name: str, given: LeasedRange, found: LeasedMessages) -> Collection[int]:
        """Report the damaged messages of a leased range to the store. Returns the offsets of the messages that were or
        may be repaired. These messages become visible again after REPAIR_AGAIN_MS, and the attempt does not count."""
        damaged = sorted(offset for offset, one in found.unreadable.items() if is_damage(one.error))
        if not damaged:
            return ()
        queue = MessageQueue(given.topic, name, given.queue_id)
        try:
            states = self._reader.report_damage(queue, damaged)
        except RaymqError as error:
            logger.info("cannot report damaged messages of queue %s now: %s", queue, error)
            states = [RepairState.PENDING] * len(damaged)
        mending = [
            offset
            for offset, state in zip(damaged, states, strict=True)
            if state is not RepairState.LOST and self._waits_still((name, given.topic, given.queue_id, offset))
        ]
        if mending:
            bits = sum(1 << offset - given.start for offset in mending)
            part = LeasePart(given.topic, given.queue_id, given.start, given.pop_ms, f"{bits:x}")
            self._call(name, "change_invisible", self._group, [part], REPAIR_AGAIN_MS, False)
        return mending

    def _waits_still(self, place: tuple[str, str, int, int]) -> bool:
        """Return False if the repair of the damaged message at a place takes longer than READ_REPAIR_WAIT_S."""
        now_s = time.monotonic()
        with self._lock:
            self._mending_since_s = {
                one: at_s for one, at_s in self._mending_since_s.items() if now_s < at_s + MENDING_KEPT_S
            }
            if len(self._mending_since_s) >= WAITS_MAX:
                return False
            return now_s < self._mending_since_s.setdefault(place, now_s) + READ_REPAIR_WAIT_S

    def _settle_excluded(self, name: str, given: LeasedRange, found: LeasedMessages) -> None:
        """Acknowledge the messages that the subscription excludes, and the messages that retention has deleted."""
        offsets = [*found.unreadable, *(message.queue_offset for message in found.messages)]
        kept = sum([1 << offset - given.start for offset in offsets])
        looked_at = (1 << found.end - given.start) - 1
        excluded = looked_at & ~kept & ~int(given.without, 16)
        if excluded:
            part = LeasePart(given.topic, given.queue_id, given.start, given.pop_ms, f"{excluded:x}")
            self._call(name, "ack_messages", self._group, [part])

    def _give_up(self, name: str, record: bytes, attempts: int, failure: str, reason: str = "") -> None:
        """Send a message to the dead letters of its group, because `attempts` deliveries failed. `failure`: why they
        failed. `reason`: why the message cannot be read; empty if the message can be read."""
        ActorRef(name).call(
            "send_back",
            self._group,
            record,
            delay_level=-1,
            reason=reason,
            failure=failure,
            attempts=attempts,
            timeout_s=GIVE_UP_TIMEOUT_S,
        )


def _not_acknowledged(attempts: int) -> str:
    return f"not acknowledged in {attempts} attempts"


def _part(given: LeasedRange, offset: int) -> LeasePart:
    """Return the part of a leased range that begins at `offset`, without the messages that the lease excludes."""
    first = offset - given.start
    handed_out = ~int(given.without, 16) & ((1 << given.count) - 1)
    return LeasePart(given.topic, given.queue_id, given.start, given.pop_ms, f"{handed_out >> first << first:x}")
