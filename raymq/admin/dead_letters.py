"""Administration: dead letters, the messages that a group could not consume in all its attempts.

They wait in `%DLQ%group`, one queue per broker group, like any message until retention deletes them. A replay brings
them back to the group: each is consumed as if for the first time, by this group only, and keeps its id. The group's
offset in the dead-letter queue separates those that were brought back, so each is brought back once, in the order they
died; a replay that is interrupted may bring the last one back twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Final, TypeVar

from raymq.consumer.group_offsets import GroupOffsets
from raymq.errors import InvalidArgumentError, RaymqError
from raymq.message import PROPERTY_RETRY_TOPIC, ConsumeFromWhere, MessageExt, MessageQueue, PullStatus
from raymq.names import check_group, dlq_topic
from raymq.protocol.group import OffsetCommit, StartOffsetQuery
from raymq.protocol.store import FetchRequest, FetchResult
from raymq.record.check import record_starts
from raymq.record.decode import decode_record
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients, call_master

DEAD_LETTER_TIMEOUT_S: Final = 20.0
"""Bounds each step: finding the queues, a read, a replay, and a commit."""
DEAD_LETTER_CALL_TIMEOUT_S: Final = 10.0
"""Bounds one call to a storage actor, which is repeated until DEAD_LETTER_TIMEOUT_S is over."""
DEAD_LETTER_FETCH_MESSAGES: Final = 128
DEAD_LETTER_FETCH_MAX_BYTES: Final = 4 * 1024 * 1024
_FROM_FIRST: Final = StartOffsetQuery(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter: the message as it is stored in the dead-letter topic, and `topic`, the one it was sent to.
    `replayed`: it was brought back."""

    message: MessageExt
    topic: str
    replayed: bool


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of bringing one dead letter back; `error` is empty on success."""

    letter: DeadLetter
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Found:
    letter: DeadLetter
    record: bytes


class DeadLetters:
    """The dead letters of one group. Made by `Admin.dead_letters`."""

    def __init__(self, group: str, routes: RouteCache, storages: StorageClients) -> None:
        self._group = check_group(group)
        self._routes, self._storages = routes, storages
        self._offsets = GroupOffsets(group)

    def letters(self, *, max_messages: int = 100, replayed: bool = False) -> list[DeadLetter]:
        """The oldest dead letters that were not brought back; with `replayed` also those that were.

        Empty if there are none; TopicNotExistError if the group never had any.
        """
        if max_messages < 1:
            raise InvalidArgumentError(f"max_messages must be at least 1, not {max_messages}")
        return list(islice(self.each(replayed=replayed), max_messages))

    def each(self, *, replayed: bool = False) -> Iterator[DeadLetter]:
        """As `letters`, all of them, one after another: those of one broker group after those of another."""
        for queue in self._queues():
            for found in self._read(queue, from_start=replayed):
                yield found.letter

    def replay(self, *, rate: float | None = None, max_messages: int | None = None) -> Iterator[Replayed]:
        """Bring dead letters back, one after another, at most `rate` per second; yields the result of each.

        Ends at the first that cannot be brought back: its error says why, and the next replay begins with it.
        """
        if rate is not None and not rate > 0:
            raise InvalidArgumentError(f"rate must be more than 0 per second, not {rate}")
        next_s = time.monotonic()
        count = 0
        for queue in self._queues():
            for found in self._read(queue, from_start=False):
                if count == max_messages:
                    return
                time.sleep(max(next_s - time.monotonic(), 0.0))
                next_s = max(next_s, time.monotonic() - 1.0) + (1 / rate if rate else 0.0)
                result = self._bring_back(queue, found)
                yield result
                if result.error:
                    return
                count += 1

    def _queues(self) -> list[MessageQueue]:
        topic = dlq_topic(self._group)
        self._routes.invalidate(topic)  # each broker creates it with its own first dead letter
        return list(self._routes.wait(topic, DEAD_LETTER_TIMEOUT_S).subscribe_queues)

    def _bring_back(self, queue: MessageQueue, found: _Found) -> Replayed:
        broker = ActorRef(queue.broker_name)
        try:
            # A failed call is not repeated here: it may have been carried out.
            broker.call("replay", self._group, found.record, timeout_s=DEAD_LETTER_TIMEOUT_S)
            self._commit_replayed(queue, found.letter.message.queue_offset + 1)
        except RaymqError as error:
            return Replayed(found.letter, str(error))
        return Replayed(found.letter)

    def _commit_replayed(self, queue: MessageQueue, queue_offset: int) -> None:
        """Commit that the dead letters below `queue_offset` were brought back."""
        version = self._offsets.start_offset(queue, _FROM_FIRST, 0, DEAD_LETTER_TIMEOUT_S).reset_version
        self._offsets.commit_offsets({queue: OffsetCommit(queue_offset, 0, version)}, DEAD_LETTER_TIMEOUT_S)

    def _read(self, queue: MessageQueue, *, from_start: bool) -> Iterator[_Found]:
        """The dead letters that one queue holds now, oldest first; without `from_start` those that were not brought
        back."""
        bounds = self._call_storage(
            queue, lambda storage, left_s: storage.queue_bounds(queue.topic, queue.queue_id, left_s)
        )
        done = max(self._offsets.committed_offset(queue) or 0, bounds.min_offset)
        offset = bounds.min_offset if from_start else done
        while offset < bounds.max_offset:
            result = self._fetch(queue, offset)
            if result.status is PullStatus.OFFSET_ILLEGAL or not result.count:
                if result.next_offset <= offset:
                    return
            else:
                starts = [*record_starts(result.records).tolist(), len(result.records)]
                for start, end in pairwise(starts):
                    yield _found(result.records[start:end], queue, done)
            offset = result.next_offset

    def _fetch(self, queue: MessageQueue, offset: int) -> FetchResult:
        request = FetchRequest(queue.topic, queue.queue_id, offset, DEAD_LETTER_FETCH_MESSAGES)
        [result] = self._call_storage(
            queue, lambda storage, left_s: storage.fetch([request], DEAD_LETTER_FETCH_MAX_BYTES, 0.0, left_s)
        )
        return result

    def _call_storage(self, queue: MessageQueue, call: Callable[[StorageClient, float], T]) -> T:
        """Call the storage actor that leads the queue's broker group (call_master)."""
        return call_master(
            self._routes,
            self._storages,
            queue,
            DEAD_LETTER_TIMEOUT_S,
            lambda storage, left_s: call(storage, min(left_s, DEAD_LETTER_CALL_TIMEOUT_S)),
        )


def _found(record: bytes, queue: MessageQueue, done: int) -> _Found:
    message = decode_record(record, broker_name=queue.broker_name)
    topic = message.system_properties.get(PROPERTY_RETRY_TOPIC, message.topic)
    return _Found(DeadLetter(message, topic, message.queue_offset < done), bytes(record))
