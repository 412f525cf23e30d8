"""Administration of dead letters: messages that a group could not consume in all its attempts.

Dead letters are stored in `%DLQ%group`, one queue per broker group, until retention deletes them. A replay sends a dead
letter to its group again. Only this group consumes the message, as a first attempt, and the message keeps its id.

Each replay leaves a trace, so that no dead letter is replayed twice. If dead letters are replayed in order, the trace
is the group's committed offset in the dead-letter queue, which lies after the last replayed dead letter. If the caller
chose a dead letter by broker group, queue id and offset, the trace is the copy in the group's retry topic. The copy has
the same id, a later store time and no attempts. A replay that is interrupted may send its last message twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.client.consumer.pull_once import CheckedFetch, CheckedQuery, FetchedRecord, read_checked, read_query
from raymq.client.consumer.repair_wait import read_repaired, wait_at_masters
from raymq.common.closing import OfProcess
from raymq.common.errors import InvalidArgumentError, RaymqError, TopicNotExistError
from raymq.common.message import (
    PROPERTY_DLQ_ORIGIN_ERROR,
    PROPERTY_RETRY_TOPIC,
    ConsumeFromWhere,
    MessageExt,
    MessageQueue,
)
from raymq.common.names import check_group, dlq_topic, retry_topic
from raymq.common.numbers import NOT_NEGATIVE, POSITIVE, RATE, bounded
from raymq.common.protocol.group import OffsetCommit, StartOffsetQuery
from raymq.common.protocol.store import PHYSICAL_QUEUE_ID, FetchRequest, QueryResult
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients, call_master

DEAD_LETTER_TIMEOUT_S: Final = 20.0
"""Timeout in seconds of each step of a call about dead letters: finding the queues, a read, a replay, or a
commit."""
DEAD_LETTER_CALL_TIMEOUT_S: Final = 10.0
"""Timeout in seconds of one call to a storage actor. The call is retried until DEAD_LETTER_TIMEOUT_S has
passed."""
DEAD_LETTER_FETCH_MESSAGES: Final = 128
DEAD_LETTER_FETCH_MAX_BYTES: Final = 4 * 1024 * 1024
_FROM_FIRST: Final = StartOffsetQuery(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)

T = TypeVar("T")


class LetterPlace(NamedTuple):
    """The broker group, queue id and offset of a dead letter in its group's dead-letter topic."""

    broker_name: str
    queue_id: int
    queue_offset: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message in a group's dead-letter topic. `message`: the message as it is stored in that topic. `topic`: the
    topic to which it was sent. `replayed`: True if the message was sent to the group again."""

    message: MessageExt
    topic: str
    replayed: bool

    @property
    def reason(self) -> str:
        """Why the last attempt to consume the dead letter failed, in one line; empty if the reason is unknown."""
        return self.message.system_properties.get(PROPERTY_DLQ_ORIGIN_ERROR, "")

    @property
    def place(self) -> LetterPlace:
        """The place (broker group, queue id and offset) of the dead letter. `DeadLetters.replay` takes places to choose
        dead letters."""
        return LetterPlace(self.message.broker_name, self.message.queue_id, self.message.queue_offset)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of replaying one dead letter. `error`: why the replay failed; empty on success."""

    letter: DeadLetter
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Found:
    letter: DeadLetter
    record: bytes


class DeadLetters(OfProcess):
    """Lists and replays the dead letters of one group. Made by `Admin.dead_letters`."""

    def __init__(
        self, group: str, routes: RouteCache, storages: StorageClients, require_group: Callable[[], object]
    ) -> None:
        """`require_group`: a function that raises GroupNotExistError if the group does not exist."""
        self._group = check_group(group)
        self._require_group = require_group
        self._routes, self._storages = routes, storages
        self._offsets = GroupOffsets(group)
        self._repairs = wait_at_masters(routes, storages)

    @bounded(max_messages=POSITIVE)
    def letters(self, *, max_messages: int = 100, replayed: bool = False) -> list[DeadLetter]:
        """Return the oldest dead letters that were not replayed. With `replayed`, includes the replayed dead letters.

        The list is empty if the group has no dead letters. Raises GroupNotExistError if the group does not exist and no
        dead letters of it are stored.
        """
        return list(islice(self.each(replayed=replayed), max_messages))

    def each(self, *, replayed: bool = False) -> Iterator[DeadLetter]:
        """Iterate over the dead letters that were not replayed, one broker group after another. With `replayed`,
        includes the replayed dead letters."""
        return self.behind(None, replayed=replayed)

    def behind(self, after: LetterPlace | None, *, replayed: bool = False) -> Iterator[DeadLetter]:
        """Iterate over the dead letters after the place `after` (broker group, queue id and offset), one broker group
        after another. If `after` is None, iterate over all dead letters."""
        for queue in sorted(self._queues()):
            here = queue.broker_name, queue.queue_id
            if after is not None and here < after[:2]:
                continue
            begin = after.queue_offset + 1 if after is not None and here == after[:2] else 0
            for found in self._read(queue, from_start=replayed, begin=begin):
                letter = self._marked(queue, found.letter)
                if replayed or not letter.replayed:
                    yield letter

    @bounded(rate=RATE, max_messages=NOT_NEGATIVE)
    def replay(
        self,
        *,
        rate: float | None = None,
        max_messages: int | None = None,
        letters: Iterable[LetterPlace | DeadLetter] | None = None,
    ) -> Iterator[Replayed]:
        """Replay dead letters: send each dead letter to its group again, at most `rate` per second. Yields one result
        for each dead letter.

        Without `letters`, replays all dead letters that were not replayed yet. A damaged dead letter yields an error,
        and the replay continues. At any other error, the replay yields the error and stops. The next replay begins with
        the failed dead letter.

        With `letters`, replays the chosen dead letters in the given order. If a dead letter fails or was replayed
        before, its result has an error, and the replay continues. Raises InvalidArgumentError, before anything is sent,
        if no dead letter is stored at the place (broker group, queue id and offset) of one of `letters`.
        """
        pace = _Pace(rate)
        if letters is not None:
            chosen = [self._at(one.place if isinstance(one, DeadLetter) else one) for one in letters]
            for queue, found in chosen[:max_messages]:
                pace.wait()
                yield self._bring_chosen(queue, found)
            return
        for result in islice(self._replay_all(pace), max_messages):
            yield result
            if result.error and result.letter.message.body_error is None:
                return

    def _replay_all(self, pace: _Pace) -> Iterator[Replayed]:
        for queue in self._queues():
            for found in self._read(queue, from_start=False):
                if self._marked(queue, found.letter).replayed:
                    self._commit_replayed(queue, found.letter.message.queue_offset + 1)
                    continue
                pace.wait()
                yield self._bring_back(queue, found)

    def _bring_chosen(self, queue: MessageQueue, found: _Found) -> Replayed:
        broker = ActorRef(queue.broker_name)
        try:
            letter = self._marked(queue, found.letter)
            if letter.replayed:
                return Replayed(letter, "it was replayed before")
            # Do not retry a failed replay call: the broker may have carried it out, and a retry would send the message
            # twice.
            broker.call("replay", self._group, found.record, timeout_s=DEAD_LETTER_TIMEOUT_S)
        except RaymqError as error:
            return Replayed(found.letter, str(error))
        return Replayed(replace(found.letter, replayed=True))

    def _at(self, place: LetterPlace) -> tuple[MessageQueue, _Found]:
        """Return the dead letter at a place (broker group, queue id and offset). Raises InvalidArgumentError if no dead
        letter is stored at the place."""
        queue = MessageQueue(dlq_topic(self._group), place.broker_name, place.queue_id)
        if queue in self._queues():
            found = next(self._read(queue, from_start=True, begin=place.queue_offset), None)
            if found is not None and found.letter.message.queue_offset == place.queue_offset:
                return queue, found
        raise InvalidArgumentError(
            f"group {self._group!r} has no dead letter at {place.broker_name}:{place.queue_id}:{place.queue_offset}; "
            f"see `raymq dlq list {self._group}`"
        )

    def _marked(self, queue: MessageQueue, letter: DeadLetter) -> DeadLetter:
        """Return a copy of `letter` with `replayed` set to True if the group's retry topic has a replayed copy of its
        message. Otherwise return `letter` itself."""
        if letter.replayed or letter.message.record_damaged:
            return letter
        message_id, topic = letter.message.message_id, retry_topic(self._group)
        copied = MessageQueue(topic, queue.broker_name, PHYSICAL_QUEUE_ID)

        def read() -> CheckedQuery:
            def query(storage: StorageClient, left_s: float) -> QueryResult:
                return storage.query_by_unique_id(topic, message_id, left_s)

            return read_query(self._call_storage(queue, query), copied)

        checked = read_repaired(read, lambda checked: {copied: checked.damaged}, self._repairs)
        died_ms = letter.message.store_timestamp_ms
        copies = [one.message for one in checked.found]
        replayed = any(copy.reconsume_times == 0 and copy.store_timestamp_ms >= died_ms for copy in copies)
        return replace(letter, replayed=replayed)

    def _queues(self) -> list[MessageQueue]:
        topic = dlq_topic(self._group)
        # Fetch the route again. The cached route may lack a queue, because each broker creates its dead-letter queue
        # only with its first dead letter.
        self._routes.invalidate(topic)
        try:
            return list(self._routes.wait(topic, DEAD_LETTER_TIMEOUT_S).subscribe_queues)
        except TopicNotExistError:
            # the group may exist without a dead-letter topic, which its first dead letter creates
            self._require_group()
            return []

    def _bring_back(self, queue: MessageQueue, found: _Found) -> Replayed:
        broker = ActorRef(queue.broker_name)
        try:
            # Do not retry a failed replay call: the broker may have carried it out, and a retry would send the message
            # twice.
            broker.call("replay", self._group, found.record, timeout_s=DEAD_LETTER_TIMEOUT_S)
            self._commit_replayed(queue, found.letter.message.queue_offset + 1)
        except RaymqError as error:
            return Replayed(found.letter, str(error))
        return Replayed(found.letter)

    def _commit_replayed(self, queue: MessageQueue, queue_offset: int) -> None:
        """Commit that the dead letters below `queue_offset` were replayed."""
        version = self._offsets.start_offset(queue, _FROM_FIRST, 0, DEAD_LETTER_TIMEOUT_S).reset_version
        self._offsets.commit_offsets({queue: OffsetCommit(queue_offset, 0, version)}, DEAD_LETTER_TIMEOUT_S)

    def _read(self, queue: MessageQueue, *, from_start: bool, begin: int = 0) -> Iterator[_Found]:
        """Yield the dead letters of one queue from offset `begin` on, oldest first. Without `from_start`, skips the
        dead letters before the group's committed offset."""
        bounds = self._call_storage(
            queue, lambda storage, left_s: storage.queue_bounds(queue.topic, queue.queue_id, left_s)
        )
        done = max(self._offsets.committed_offset(queue) or 0, bounds.min_offset)
        offset = max(bounds.min_offset if from_start else done, begin)
        while offset < bounds.max_offset:
            result, found, _ = self._fetch(queue, offset)
            if result.next_offset <= offset and not found:
                return
            for one in found:
                yield _found(one, queue, done)
            offset = result.next_offset

    def _fetch(self, queue: MessageQueue, offset: int) -> CheckedFetch:
        """Read dead letters of a queue from `offset` on. Waits a few seconds for the repair of damaged ones."""
        request = FetchRequest(queue.topic, queue.queue_id, offset, DEAD_LETTER_FETCH_MESSAGES)

        def read() -> CheckedFetch:
            [result] = self._call_storage(
                queue, lambda storage, left_s: storage.fetch([request], DEAD_LETTER_FETCH_MAX_BYTES, 0.0, left_s)
            )
            return read_checked(result, queue, offset)

        return read_repaired(read, lambda checked: {queue: checked.damaged}, self._repairs)

    def _call_storage(self, queue: MessageQueue, call: Callable[[StorageClient, float], T]) -> T:
        """Run `call` with the storage actor of the queue's master, and retry as `call_master` does."""
        return call_master(
            self._routes,
            self._storages,
            queue,
            DEAD_LETTER_TIMEOUT_S,
            lambda storage, left_s: call(storage, min(left_s, DEAD_LETTER_CALL_TIMEOUT_S)),
        )


class _Pace:
    """Limits a loop to `rate` steps per second. A loop that is late may run faster for a while, to catch up with at
    most one second of its schedule."""

    def __init__(self, rate: float | None) -> None:
        self._pause_s = 1 / rate if rate else 0.0
        self._next_s = time.monotonic()

    def wait(self) -> None:
        """Sleep until the loop may begin its next step at the allowed rate."""
        time.sleep(max(self._next_s - time.monotonic(), 0.0))
        self._next_s = max(self._next_s, time.monotonic() - 1.0) + self._pause_s


def _found(one: FetchedRecord, queue: MessageQueue, done: int) -> _Found:
    message = one.alone()
    topic = message.system_properties.get(PROPERTY_RETRY_TOPIC, message.topic)
    return _Found(DeadLetter(message, topic, message.queue_offset < done), bytes(one.record))
