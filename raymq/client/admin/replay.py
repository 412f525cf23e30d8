"""Administration: replays, which send copies of chosen messages of a topic to a topic, or to one group only.

    choice     by key ▶ the index of each store; by time ▶ a range of offsets per queue, fixed at the start; by id
    copies     of one queue's messages, in their order, to one queue of the target: `%RETRY%group` for a group; in a
               PRIORITY topic, to one queue of each level, and a message without a priority to the lowest level
    once       a copy's sequence is its message's offset, and its producer id names the queue, the choice and the target

The store reports which copies it already has, so a repeated replay continues after these copies. A store remembers the
latest sequences of `dedup_producers_max` pairs of producer id and queue. After that number of newer pairs, the store
has forgotten the replay's copies. If queues are added to the target, a repeated replay may send copies to other queues
than before. A copy has the id, tags, keys and properties of its message, and the property ORIGIN_MESSAGE_ID. A copy for
a group also names the message's topic (RETRY_TOPIC), as a retried message does.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final
from zlib import crc32

from raymq.client.admin.messages import MessageAdmin
from raymq.client.consumer.pull_once import stored_times
from raymq.client.producer.queue_selector import level_queues
from raymq.client.producer.repeatable.stored import StoredSequences
from raymq.client.producer.senders.encoder import ProducerIdentity
from raymq.common.errors import InvalidArgumentError, OffsetOutOfRangeError, TopicNotExistError
from raymq.common.message import (
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_PRODUCER_ID,
    PROPERTY_RETRY_TOPIC,
    MessageExt,
    MessageQueue,
    copied_message,
)
from raymq.common.names import check_group, check_topic, check_user_topic, retry_topic
from raymq.common.numbers import POINT_IN_TIME_MS, POSITIVE, RATE, bounded
from raymq.common.protocol.route import TopicRoute
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.encode import EncodedBatch, ProducerSequence, encode_batch
from raymq.records.format.message_id import parse_offset_message_id
from raymq.remoting.storage_clients import call_master

REPLAY_MAX_MESSAGES: Final = 100_000
"""Default maximum number of messages that one replay sends."""
REPLAY_TIMEOUT_S: Final = 30.0
"""Timeout in seconds of each step of a replay: finding the target's queues, querying the progress of earlier runs, or
an append."""
REPLAY_APPEND_TIMEOUT_S: Final = 5.0
REPLAY_BATCH_MESSAGES: Final = 256
REPLAY_BATCH_BYTES: Final = 1 << 20
REPLAY_PRODUCER: Final = "rmq_sys_replay/"
_PAGE: Final = 64
"""Maximum number of messages that one query by key returns (max_msgs_num_batch)."""
_READ: Final = 512
_END_OF_TIME_MS: Final = 2**63 - 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplayChoice:
    """The choice of a replay's messages in `topic`: by `key`, by `ids`, or by store time, from `begin_ms` on and before
    `end_ms` (ms since 1970). Raises InvalidArgumentError unless exactly one of these three ways is used."""

    topic: str
    key: str | None = None
    ids: tuple[str, ...] = ()
    begin_ms: int | None = None
    end_ms: int | None = None

    def __post_init__(self) -> None:
        check_topic(self.topic)
        by_time = self.begin_ms is not None or self.end_ms is not None
        if sum((self.key is not None, bool(self.ids), by_time)) != 1:
            raise InvalidArgumentError("choose the messages to replay: pass a key, ids, or begin_ms and end_ms")


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay to the topic `target`.

    `chosen`: the number of chosen messages. `sent`: the number of messages that this run sent; 0 for a dry run.
    `sent_before`: the number of messages that earlier runs sent. `complete`: False if more messages were chosen than
    the replay may send. `unreadable`: the number of chosen messages that were left out because their bodies cannot be
    read.
    """

    target: str
    chosen: int
    sent: int
    sent_before: int
    complete: bool
    unreadable: int = 0


class ReplayAdmin(MessageAdmin):
    """The administration call `replay`, which sends stored messages again."""

    @bounded(max_messages=POSITIVE, rate=RATE, begin_ms=POINT_IN_TIME_MS, end_ms=POINT_IN_TIME_MS)
    def replay(
        self,
        topic: str,
        *,
        key: str | None = None,
        ids: Sequence[str] = (),
        begin_ms: int | None = None,
        end_ms: int | None = None,
        to_topic: str | None = None,
        to_group: str | None = None,
        name: str = "",
        max_messages: int = REPLAY_MAX_MESSAGES,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int], None] = lambda count: None,
    ) -> Replay:
        """Send copies of messages of `topic` to another topic, or to one group. The group gets the copies whatever its
        subscriptions are; no other group gets them.

        Choose messages by `key`, by `ids`, or by the time at which they were stored, from `begin_ms` on and before
        `end_ms`. This call sends at most `max_messages` copies, at most `rate` per second. `progress` is called with
        the number of messages that each step has finished. A repeated replay with the same choice, target and `name`
        sends only copies that are not sent yet. With another `name`, it is a new replay. `dry_run`: only count.
        Messages that cannot be read are left out, counted and logged.

        On success all chosen messages, up to the limit, are stored in the target, as durably as the cluster's settings
        require. After a failure some of them are stored, and the replay can be repeated. Raises TopicNotExistError or
        GroupNotExistError if a topic or the group does not exist, NoPermissionError if the target is not writable, and
        InvalidArgumentError if an argument is invalid. Raises RequestTimeoutError or ServiceNotAvailableError while
        brokers are unreachable.
        """
        choice = ReplayChoice(topic, key, (ids,) if isinstance(ids, str) else tuple(ids), begin_ms, end_ms)
        target = self._target(to_topic, to_group)
        run = _Run(self, choice, target, name, to_group is not None, rate, dry_run, progress)
        return run.send(self._chosen(choice, target.topic), max_messages)

    def _target(self, to_topic: str | None, to_group: str | None) -> TopicRoute:
        """Return the route of the topic to which the copies are sent. Raises GroupNotExistError if the group `to_group`
        does not exist."""
        if (to_topic is None) == (to_group is None):
            raise InvalidArgumentError("choose one target of the replay: to_topic or to_group")
        target = check_user_topic(to_topic) if to_topic is not None else retry_topic(check_group(to_group or ""))
        self._routes.invalidate(target)
        try:
            return self._routes.wait(target, REPLAY_TIMEOUT_S)
        except TopicNotExistError:
            if to_group is None:
                raise
            raise self._group_not_exist(to_group) from None

    def _chosen(self, choice: ReplayChoice, target: str) -> Iterator[tuple[MessageQueue, list[MessageExt]]]:
        """Yield the chosen messages in lists of one queue each, ordered by queue and by offset. If the target is the
        source topic, leaves out messages that are copies sent by a replay."""
        if choice.key is None and not choice.ids:
            found = self._by_time(choice)
        else:
            found = _by_queue(self._by_ids(choice) if choice.ids else self._by_key(choice))
        own = target == choice.topic
        for queue, messages in found:
            wanted = [message for message in messages if not (own and _is_copy(message))]
            if wanted:
                yield queue, wanted

    def _by_ids(self, choice: ReplayChoice) -> list[MessageExt]:
        return [message for one in dict.fromkeys(choice.ids) for message in self.query_by_id(choice.topic, one)]

    def _by_key(self, choice: ReplayChoice) -> list[MessageExt]:
        """Return all messages with the chosen key. The index returns the newest messages before a time. So each query
        ends at the oldest store time of the previous page."""
        found: dict[tuple[MessageQueue, int], MessageExt] = {}
        for broker_name in self._routes.wait(choice.topic, REPLAY_TIMEOUT_S).brokers:
            end_ms = _END_OF_TIME_MS
            while True:
                page = self.query_by_key(
                    choice.topic, choice.key or "", max_messages=_PAGE, end_ms=end_ms, broker_name=broker_name
                )
                before = len(found)
                # A damaged message has no offset: `_number` identifies it by its physical offset.
                found |= {(message.queue, _number(message)): message for message in page}
                if len(page) < _PAGE:
                    break
                if len(found) == before:
                    raise InvalidArgumentError(
                        f"broker group {broker_name!r} has at least {_PAGE} messages with key {choice.key!r} in "
                        "one second, as many as one query returns: choose these messages by begin_ms and end_ms"
                    )
                end_ms = min(stored_times(page))
        return list(found.values())

    def _by_time(self, choice: ReplayChoice) -> Iterator[tuple[MessageQueue, list[MessageExt]]]:
        spans = []
        for queue in self._routes.wait(choice.topic, REPLAY_TIMEOUT_S).subscribe_queues:
            bounds = self._queue_bounds(queue)
            start = bounds.min_offset if choice.begin_ms is None else self.offset_by_time(queue, choice.begin_ms)
            end = bounds.max_offset if choice.end_ms is None else self.offset_by_time(queue, choice.end_ms)
            spans.append((queue, start, min(end, bounds.max_offset)))
        for queue, start, end in spans:
            offset = start
            while offset < end:
                try:
                    result = self.pull(queue, offset, max_messages=min(_READ, end - offset))
                # Retention has deleted messages after the offset range of the replay was chosen. Skip the deleted
                # messages: continue at the queue's first existing offset.
                except OffsetOutOfRangeError as error:
                    offset = max(error.min_offset, offset + 1)
                    continue
                messages = [message for message in result.messages if message.queue_offset < end]
                yield queue, messages
                if result.next_offset <= offset:
                    break
                offset = result.next_offset


class _Run:
    """One run of a replay, which sends the chosen messages again."""

    def __init__(
        self,
        admin: ReplayAdmin,
        choice: ReplayChoice,
        target: TopicRoute,
        name: str,
        to_group: bool,
        rate: float | None,
        dry_run: bool,
        progress: Callable[[int], None],
    ) -> None:
        self._routes, self._storages = admin._routes, admin._storages
        self._source, self._target, self._queues = choice.topic, target.topic, target.require_all_queues()
        self._has_levels = target.attributes.has_levels
        self._retries = {PROPERTY_RETRY_TOPIC: choice.topic} if to_group else {}
        self._rate, self._dry_run, self._progress = rate, dry_run, progress
        text = json.dumps([asdict(choice), target.topic, name])
        self._identity = hashlib.sha256(text.encode()).hexdigest()[:24]
        self._next_s = time.monotonic()
        self._unreadable = 0
        self._behind: dict[tuple[MessageQueue, MessageQueue], int] = {}
        """For each queue of the source topic and its target queue, the offset after the last message that an earlier
        run of the replay sent."""

    def send(self, chosen: Iterator[tuple[MessageQueue, list[MessageExt]]], most: int) -> Replay:
        """Send at most `most` of the chosen messages, without the messages that earlier runs have sent. Returns the
        result of the run."""
        count = sent = 0
        for source, target, found in self._readable(chosen):
            behind = 0 if self._dry_run else self._sent_before(source, target)
            new = [message for message in found if message.queue_offset >= behind]
            count += len(found)
            self._progress(len(found) - len(new))
            cut = new[: most - sent]
            for batch in [] if self._dry_run else _batches(cut):
                self._append(source, target, batch)
                self._progress(len(batch))
            if self._dry_run:
                self._progress(len(cut))
            sent += len(cut)
            if len(cut) < len(new):
                count -= len(new) - len(cut)
                return self._result(count, sent, complete=False)
        return self._result(count, sent, complete=True)

    def _result(self, count: int, sent: int, *, complete: bool) -> Replay:
        chosen = count + self._unreadable
        return Replay(
            self._target, chosen, 0 if self._dry_run else sent, count - sent, complete, unreadable=self._unreadable
        )

    def _note_unreadable(self, messages: Sequence[MessageExt], count: int) -> None:
        """Add `count` unreadable messages to the total, and log the error of the first unreadable message in
        `messages`."""
        if not count:
            return
        self._unreadable += count
        self._progress(count)
        error = next(message.body_error for message in messages if message.body_error is not None)
        logger.warning("the replay to %s skips %d messages: %s", self._target, count, error)

    def _readable(
        self, chosen: Iterator[tuple[MessageQueue, list[MessageExt]]]
    ) -> Iterator[tuple[MessageQueue, MessageQueue, list[MessageExt]]]:
        """Yield the chosen messages that can be read, in their order, by source queue and target queue. Count the other
        messages."""
        for source, messages in chosen:
            by_target: dict[MessageQueue, list[MessageExt]] = {}
            for message in messages:
                if message.body_error is None:
                    by_target.setdefault(self._target_queue(source, message), []).append(message)
            self._note_unreadable(messages, len(messages) - sum(map(len, by_target.values())))
            for target, found in by_target.items():
                yield source, target, found

    def _target_queue(self, source: MessageQueue, message: MessageExt) -> MessageQueue:
        """Return the queue to which the copy of a message of the queue `source` is sent."""
        queues: Sequence[MessageQueue] = self._queues
        if self._has_levels:
            queues = level_queues(queues, message.priority or 0)
        return queues[crc32(str(source).encode()) % len(queues)]

    def _producer_id(self, source: MessageQueue) -> str:
        return f"{REPLAY_PRODUCER}{self._identity}/{source.broker_name}/{source.queue_id}"

    def _sent_before(self, source: MessageQueue, target: MessageQueue) -> int:
        """Return the offset after the last message of a queue that an earlier run of the replay sent to a queue."""
        if (source, target) not in self._behind:
            identity = ProducerIdentity(self._producer_id(source), 0)
            stored = StoredSequences(self._target, identity, self._routes, self._storages)
            self._behind[source, target] = stored.ask([target], REPLAY_TIMEOUT_S)[target]
        return self._behind[source, target]

    def _append(self, source: MessageQueue, queue: MessageQueue, messages: Sequence[MessageExt]) -> None:
        """Store copies of consecutive messages of a queue. Retries while the store does not answer; the store drops
        copies that it already has, so a retry is safe."""
        producer_id = self._producer_id(source)
        batch = self._encode(queue, ProducerSequence(producer_id, 0, messages[0].queue_offset), messages)
        time.sleep(max(self._next_s - time.monotonic(), 0.0))
        if self._rate is not None:
            self._next_s = max(self._next_s, time.monotonic()) + len(messages) / self._rate
        call_master(
            self._routes,
            self._storages,
            queue,
            REPLAY_TIMEOUT_S,
            lambda storage, left_s: storage.append([batch], min(left_s, REPLAY_APPEND_TIMEOUT_S)),
        )

    def _encode(self, queue: MessageQueue, producer: ProducerSequence, messages: Sequence[MessageExt]) -> EncodedBatch:
        stored = parse_offset_message_id(messages[0].offset_message_id)
        copies = [
            copied_message(
                message, self._target, {**self._retries, PROPERTY_ORIGIN_MESSAGE_ID: message.offset_message_id}
            )
            for message in messages
        ]
        return encode_batch(
            copies,
            queue.queue_id,
            born_host=(stored.host, stored.port),
            born_timestamp_ms=time.time_ns() // 1_000_000,
            message_ids=[message.message_id for message in messages],
            producer=producer,
            compression=Compression(CompressionType.ZSTD),
        )


def _batches(messages: Sequence[MessageExt]) -> Iterator[list[MessageExt]]:
    """Divide messages of a queue into parts of consecutive messages that fit in one append."""
    part: list[MessageExt] = []
    size = 0
    for message in messages:
        if part and (
            message.queue_offset != part[-1].queue_offset + 1
            or len(part) >= REPLAY_BATCH_MESSAGES
            or size + len(message.body) > REPLAY_BATCH_BYTES
        ):
            yield part
            part, size = [], 0
        part.append(message)
        size += len(message.body)
    if part:
        yield part


def _by_queue(found: Sequence[MessageExt]) -> Iterator[tuple[MessageQueue, list[MessageExt]]]:
    """Group messages by queue. Each queue's messages are sorted by offset, without duplicates."""
    by_queue: dict[MessageQueue, dict[int, MessageExt]] = {}
    for message in found:
        by_queue.setdefault(message.queue, {})[_number(message)] = message
    for queue in sorted(by_queue):
        yield queue, [message for _, message in sorted(by_queue[queue].items())]


def _number(message: MessageExt) -> int:
    """Return a number that identifies a message within its queue. It is the message's queue offset. For a damaged
    message, whose queue offset is unknown, it is a negative number computed from the physical offset."""
    return message.queue_offset if message.queue_offset >= 0 else -message.physical_offset - 1


def _is_copy(message: MessageExt) -> bool:
    return message.system_properties.get(PROPERTY_PRODUCER_ID, "").startswith(REPLAY_PRODUCER)
