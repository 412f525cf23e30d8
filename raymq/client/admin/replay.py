"""Administration: replays, copies of chosen messages of a topic, sent again to a topic or to one group only.

    choice     by key ▶ the index of each store; by time ▶ a range of offsets per queue, fixed at the start; by id
    copies     of one queue's messages, in their order, to one queue of the target: `%RETRY%group` for a group
    once       a copy's sequence is its message's offset, and its producer id names the queue, the choice and the target

So a repeated replay continues after the copies that are stored, which the store reports. The store forgets a replay
after `dedup_producers_max` later pairs of producer and queue. If the target gets more queues, messages get other
queues. A copy has its message's id, tags, keys and properties, and ORIGIN_MESSAGE_ID. A copy for a group also names the
topic that it comes from (RETRY_TOPIC), as a message of a further attempt does.
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
from raymq.client.producer.repeatable.stored import StoredSequences
from raymq.client.producer.senders.encoder import ProducerIdentity
from raymq.common.errors import GroupNotExistError, InvalidArgumentError, OffsetOutOfRangeError, TopicNotExistError
from raymq.common.message import (
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_PRODUCER_ID,
    PROPERTY_RETRY_TOPIC,
    MessageExt,
    MessageQueue,
    SystemMessage,
)
from raymq.common.names import check_group, check_topic, check_user_topic, retry_topic
from raymq.common.numbers import POSITIVE, RATE, bounded
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.encode import EncodedBatch, ProducerSequence, encode_batch
from raymq.records.format.message_id import parse_offset_message_id
from raymq.remoting.storage_clients import call_master

REPLAY_MAX_MESSAGES: Final = 100_000
"""The most messages of one replay, unless it is asked for more."""
REPLAY_TIMEOUT_S: Final = 30.0
"""Bounds each step: finding the target's queues, asking how far it is, an append."""
REPLAY_APPEND_TIMEOUT_S: Final = 5.0
REPLAY_BATCH_MESSAGES: Final = 256
REPLAY_BATCH_BYTES: Final = 1 << 20
REPLAY_PRODUCER: Final = "rmq_sys_replay/"
_PAGE: Final = 64
"""The messages of one query by key (max_msgs_num_batch)."""
_READ: Final = 512
_END_OF_TIME_MS: Final = 2**63 - 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplayChoice:
    """The messages of `topic` that a replay chooses: messages with `key`, or with one of `ids`, that were stored from
    `begin_ms` on and before `end_ms` (ms since 1970)."""

    topic: str
    key: str | None = None
    ids: tuple[str, ...] = ()
    begin_ms: int | None = None
    end_ms: int | None = None

    def __post_init__(self) -> None:
        check_topic(self.topic)
        by_time = self.begin_ms is not None or self.end_ms is not None
        if sum((self.key is not None, bool(self.ids), by_time)) != 1:
            raise InvalidArgumentError("say which messages to replay: by key, by ids, or by begin_ms and end_ms")


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay to `target`, a topic: of the `chosen` messages `sent` were sent now, and `sent_before` by
    an earlier run; a dry run sends none. `complete` is false if there are more than the replay's bound. `unreadable`
    chosen messages are left out: their bodies cannot be read."""

    target: str
    chosen: int
    sent: int
    sent_before: int
    complete: bool
    unreadable: int = 0


class ReplayAdmin(MessageAdmin):
    """The call that sends messages again."""

    @bounded(max_messages=POSITIVE, rate=RATE)
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
        """Send copies of messages of `topic` to another topic, or to one group, which gets them whatever it subscribes
        to; no other group does.

        Choose by `key`, by `ids`, or by the time at which they were stored, from `begin_ms` on and before `end_ms`.
        At most `max_messages` are sent now, `rate` a second; `progress` is called with each number of messages that are
        done. Run again, with the same choice, target and `name`, a replay sends what it has not sent yet, and nothing
        twice; another `name` makes another replay of it. `dry_run`: only count. Messages that cannot be read are left
        out, counted and logged.

        On success all chosen messages, up to the bound, are stored in the target, as durably as the cluster's settings
        say; after a failure, some are, and the replay can be run again. TopicNotExistError, GroupNotExistError,
        NoPermissionError, InvalidArgumentError; RequestTimeoutError or ServiceNotAvailableError while brokers are away.
        """
        choice = ReplayChoice(topic, key, (ids,) if isinstance(ids, str) else tuple(ids), begin_ms, end_ms)
        target, queues = self._target(to_topic, to_group)
        run = _Run(self, choice, target, queues, name, to_group is not None, rate, dry_run, progress)
        return run.send(self._chosen(choice, target), max_messages)

    def _target(self, to_topic: str | None, to_group: str | None) -> tuple[str, tuple[MessageQueue, ...]]:
        """The topic that the copies go to, and its queues."""
        if (to_topic is None) == (to_group is None):
            raise InvalidArgumentError("name one target of the replay: to_topic or to_group")
        target = check_user_topic(to_topic) if to_topic is not None else retry_topic(check_group(to_group or ""))
        self._routes.invalidate(target)
        try:
            return target, self._routes.wait(target, REPLAY_TIMEOUT_S).require_all_queues()
        except TopicNotExistError:
            if to_group is None:
                raise
            raise GroupNotExistError(to_group) from None

    def _chosen(self, choice: ReplayChoice, target: str) -> Iterator[tuple[MessageQueue, list[MessageExt]]]:
        """The messages of a choice, several of one queue at a time, in the order of the queues and of their offsets.
        Copies that a replay has put into its own source are no messages of it."""
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
        """All messages with the key: the index gives the newest of a time, so the time goes back, page by page."""
        found: dict[tuple[MessageQueue, int], MessageExt] = {}
        for broker_name in self._routes.wait(choice.topic, REPLAY_TIMEOUT_S).brokers:
            end_ms = _END_OF_TIME_MS
            while True:
                page = self.query_by_key(
                    choice.topic, choice.key or "", max_messages=_PAGE, end_ms=end_ms, broker_name=broker_name
                )
                before = len(found)
                # A damaged message has its place in the log only.
                found |= {(message.queue, _number(message)): message for message in page}
                if len(page) < _PAGE:
                    break
                if len(found) == before:
                    raise InvalidArgumentError(
                        f"{broker_name} has {_PAGE} messages or more with key {choice.key!r} of one second, as many as "
                        "a query returns: replay them by their times"
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
                except OffsetOutOfRangeError as error:  # retention was faster
                    offset = max(error.min_offset, offset + 1)
                    continue
                messages = [message for message in result.messages if message.queue_offset < end]
                yield queue, messages
                if result.next_offset <= offset:
                    break
                offset = result.next_offset


class _Run:
    """One run of a replay."""

    def __init__(
        self,
        admin: ReplayAdmin,
        choice: ReplayChoice,
        target: str,
        queues: Sequence[MessageQueue],
        name: str,
        to_group: bool,
        rate: float | None,
        dry_run: bool,
        progress: Callable[[int], None],
    ) -> None:
        self._routes, self._storages = admin._routes, admin._storages
        self._source, self._target, self._queues = choice.topic, target, queues
        self._retries = {PROPERTY_RETRY_TOPIC: choice.topic} if to_group else {}
        self._rate, self._dry_run, self._progress = rate, dry_run, progress
        text = json.dumps([asdict(choice), target, name])
        self._identity = hashlib.sha256(text.encode()).hexdigest()[:24]
        self._next_s = time.monotonic()
        self._unreadable = 0
        self._behind: dict[MessageQueue, int] = {}
        """By queue of the source, the offset after the last message that was sent."""

    def send(self, chosen: Iterator[tuple[MessageQueue, list[MessageExt]]], most: int) -> Replay:
        """Send at most so many messages."""
        count = sent = 0
        for source, chosen_here in chosen:
            found = [message for message in chosen_here if message.body_error is None]
            self._note_unreadable(chosen_here, len(chosen_here) - len(found))
            behind = 0 if self._dry_run or not found else self._sent_before(source)
            new = [message for message in found if message.queue_offset >= behind]
            count += len(found)
            self._progress(len(found) - len(new))
            cut = new[: most - sent]
            for batch in [] if self._dry_run else _batches(cut):
                self._append(source, batch)
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
        """Add `count` unreadable messages among `messages` to the total, and log the first one's error."""
        if not count:
            return
        self._unreadable += count
        self._progress(count)
        error = next(message.body_error for message in messages if message.body_error is not None)
        logger.warning("a replay to %s leaves out %d messages: %s", self._target, count, error)

    def _place(self, source: MessageQueue) -> tuple[str, MessageQueue]:
        """The producer id of the copies of a queue's messages, and their queue."""
        queue = self._queues[crc32(str(source).encode()) % len(self._queues)]
        return f"{REPLAY_PRODUCER}{self._identity}/{source.broker_name}/{source.queue_id}", queue

    def _sent_before(self, source: MessageQueue) -> int:
        """Return the offset after the last message of a queue that an earlier run sent."""
        if source not in self._behind:
            producer_id, queue = self._place(source)
            stored = StoredSequences(self._target, ProducerIdentity(producer_id, 0), self._routes, self._storages)
            self._behind[source] = stored.ask([queue], REPLAY_TIMEOUT_S)[queue]
        return self._behind[source]

    def _append(self, source: MessageQueue, messages: Sequence[MessageExt]) -> None:
        """Store copies of successive messages of a queue. Repeats the call while the store does not answer: the store
        recognises copies that it has."""
        producer_id, queue = self._place(source)
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
            SystemMessage(
                self._target,
                message.body,
                message.tags,
                message.keys,
                {**message.properties, **self._retries, PROPERTY_ORIGIN_MESSAGE_ID: message.offset_message_id},
                message.flag,
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
    """Messages that follow each other in their queue, in parts that fit in one append."""
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
    """Messages by their queues, each in the order of the offsets, each once."""
    by_queue: dict[MessageQueue, dict[int, MessageExt]] = {}
    for message in found:
        by_queue.setdefault(message.queue, {})[_number(message)] = message
    for queue in sorted(by_queue):
        yield queue, [message for _, message in sorted(by_queue[queue].items())]


def _number(message: MessageExt) -> int:
    """A number that only this message of its queue has: its offset, or a negative one of a damaged message."""
    return message.queue_offset if message.queue_offset >= 0 else -message.physical_offset - 1


def _is_copy(message: MessageExt) -> bool:
    return message.system_properties.get(PROPERTY_PRODUCER_ID, "").startswith(REPLAY_PRODUCER)
