"""Administration: reads a queue without a group, finds messages by offset, key, id or time, and tails a topic.

A tail is a series of repeated reads, without a group, for a person who watches new messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypeVar

from raymq.client.admin.base import ADMIN_TIMEOUT_S, AdminBase
from raymq.client.consumer.pull_once import (
    PULL_MAX_MESSAGES,
    PULL_MAX_WAIT_S,
    CheckedQuery,
    pull_messages,
    read_checked,
    read_fetched,
    read_query,
    stored_times,
)
from raymq.client.consumer.repair_wait import read_repaired
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import BodyUnreadableError, DataLossError, InvalidArgumentError, RaymqError
from raymq.common.message import MessageExt, MessageQueue, PullResult, checked_queue
from raymq.common.names import check_topic
from raymq.common.numbers import NOT_NEGATIVE, POINT_IN_TIME_MS, POSITIVE, NumberRange, bounded
from raymq.common.parallel import map_parallel
from raymq.common.protocol.store import PHYSICAL_QUEUE_ID, Boundary, FetchRequest, FetchResult, QueryResult
from raymq.common.retry import persist_until
from raymq.records.format.check import check_record
from raymq.records.format.decode import decode_record
from raymq.records.format.inner_batch import split_inner_batch
from raymq.records.format.inner_batch_encode import is_inner_batch
from raymq.records.format.layout import RecordError, read_header
from raymq.records.format.message_id import parse_offset_message_id
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import call_master

QUERY_TIMEOUT_S: Final = 10.0
"""Timeout in seconds of one query of a store. The query is retried until ADMIN_TIMEOUT_S has passed."""

T = TypeVar("T")


class MessageAdmin(AdminBase):
    """Administration calls that read messages. They change nothing."""

    @bounded(max_messages=NumberRange(1, PULL_MAX_MESSAGES), wait_s=NumberRange(0.0, PULL_MAX_WAIT_S))
    def pull(
        self, queue: MessageQueue, offset: int, *, max_messages: int = 32, tags: str = "*", wait_s: float = 0.0
    ) -> PullResult:
        """Read a queue from `offset` without a group. Waits a few seconds for the repair of damaged messages; a message
        that is not repaired has a `body_error`. Raises OffsetOutOfRangeError if the queue does not hold `offset`, and
        InvalidArgumentError if an argument is invalid."""
        queue = checked_queue("queue", queue)
        route = self._routes.wait(check_topic(queue.topic), ADMIN_TIMEOUT_S)
        data = next((data for data in route.queues if data.broker_name == queue.broker_name), None)
        if data is None:
            raise InvalidArgumentError(f"topic {queue.topic!r} has no queue in broker group {queue.broker_name!r}")
        nums, subscription = data.read_queue_nums, Subscription.parse(queue.topic, tags)

        def pull(storage: StorageClient, left_s: float) -> tuple[PullResult, list[int]]:
            damaged: list[int] = []
            arguments = (queue, nums, subscription, offset, max_messages, wait_s)
            return pull_messages(storage, *arguments, on_damage=damaged.extend), damaged

        def read() -> tuple[PullResult, list[int]]:
            return call_master(self._routes, self._storages, queue, ADMIN_TIMEOUT_S, pull)

        return read_repaired(read, lambda found: {queue: found[1]}, self._repairs)[0]

    @bounded(max_messages=POSITIVE, begin_ms=POINT_IN_TIME_MS, end_ms=POINT_IN_TIME_MS)
    def query_by_key(
        self,
        topic: str,
        key: str,
        *,
        max_messages: int = 32,
        begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
        broker_name: str | None = None,
    ) -> list[MessageExt]:
        """Return the newest messages of `topic` that have `key` and were stored between two times (ms since 1970),
        oldest first.

        Times have a resolution of one second, and each broker group returns at most 64 messages (max_msgs_num_batch).
        With `broker_name`, only that broker group is queried. A damaged message is included, with its `body_error`.
        Raises TopicNotExistError if the topic does not exist, and InvalidArgumentError if an argument is invalid.
        """
        arguments = (key, max_messages, begin_ms, end_ms)
        found = self._query(topic, "query_by_key", *arguments, broker_name=broker_name)
        return [message for _, message in sorted(found, key=itemgetter(0))][-max_messages:]

    def query_by_id(self, topic: str, message_id: str) -> list[MessageExt]:
        """Return the messages of `topic` with this `message_id`: a unique id, or an offset message id.

        The list is empty if no message has the id. Several messages have one unique id if the producer sent the message
        more than once. All messages of an inner batch share its offset message id. A damaged message is included, with
        its `body_error`. Raises TopicNotExistError if the topic does not exist, and InvalidArgumentError if an argument
        is invalid.
        """
        found = [message for _, message in self._query(topic, "query_by_unique_id", message_id)]
        return found or self._query_by_offset_id(topic, message_id.upper())

    @bounded(timestamp_ms=POINT_IN_TIME_MS)
    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int, boundary: Boundary = Boundary.LOWER) -> int:
        """Return the offset of the first message of `queue` stored at or after a time. With UPPER, returns the offset
        of the last message stored at or before the time."""
        queue = checked_queue("queue", queue)
        check_topic(queue.topic)
        return call_master(
            self._routes,
            self._storages,
            queue,
            ADMIN_TIMEOUT_S,
            lambda storage, left_s: storage.offset_by_time(queue.topic, queue.queue_id, timestamp_ms, left_s, boundary),
        )

    def _query(
        self, topic: str, method: str, *args: Any, broker_name: str | None = None
    ) -> list[tuple[int, MessageExt]]:
        """Run a query method on the stores of all broker groups that have the topic, or of one broker group. Returns
        the messages found, each with the time in ms since 1970 at which it was stored."""
        route = self._routes.wait(check_topic(topic), ADMIN_TIMEOUT_S)
        if broker_name is not None and broker_name not in route.brokers:
            raise InvalidArgumentError(f"topic {topic!r} has no queue in broker group {broker_name!r}")
        messages: list[tuple[int, MessageExt]] = []
        for name in route.brokers if broker_name is None else (broker_name,):
            storage = self._storages.get(route.master_storage(name))
            queue = MessageQueue(topic, name, PHYSICAL_QUEUE_ID)
            checked = self._find(queue, partial(_call_with_time_left, getattr(storage, method), (topic, *args)))
            found = _messages_of(checked, queue)
            messages += zip(stored_times(found), found, strict=True)
        return messages

    def _query_by_offset_id(self, topic: str, offset_id: str) -> list[MessageExt]:
        try:
            physical_offset = parse_offset_message_id(offset_id).physical_offset
        except InvalidArgumentError:
            return []  # return no message: `offset_id` is a unique message id, so it contains no physical offset
        route = self._routes.get(topic)
        damaged: list[MessageExt] = []
        for broker_name in route.brokers:
            queue = MessageQueue(topic, broker_name, PHYSICAL_QUEUE_ID)
            try:
                record, reason = self._record_at(queue, physical_offset)
            except (InvalidArgumentError, DataLossError):
                continue  # skip this store: none of its records starts at `physical_offset`
            # The damaged record may have the wanted id. Continue, because another store may have the message undamaged.
            if not record:
                damaged.append(_damaged(queue, physical_offset, reason))
                continue
            messages = _messages_at(record, broker_name)
            if messages[0].offset_message_id == offset_id and messages[0].topic == topic:
                return messages
        return damaged

    def _find(self, queue: MessageQueue, query: Callable[[float], QueryResult]) -> CheckedQuery:
        """Run a query of a store, and wait a few seconds for the repair of damaged records that it finds. `queue`: the
        topic and the broker group."""

        def read() -> CheckedQuery:
            return read_query(persist_until(time.monotonic() + ADMIN_TIMEOUT_S, query), queue)

        return read_repaired(read, lambda checked: {queue: checked.damaged}, self._repairs)

    def _record_at(self, queue: MessageQueue, physical_offset: int) -> tuple[bytes, str]:
        """Return the record at a physical offset of a store, and the reason why it is damaged, empty if it is intact.
        Waits a few seconds for its repair. The record is empty if it cannot be parsed. `queue`: the topic and the
        broker group."""

        def read() -> tuple[bytes, str]:
            storage = self._storages.get(self._routes.get(queue.topic).master_storage(queue.broker_name))
            call = partial(_call_with_time_left, storage.record_at, (physical_offset,))
            try:
                record = persist_until(time.monotonic() + ADMIN_TIMEOUT_S, call)
            except BodyUnreadableError as error:
                return b"", error.reason
            return record, "" if check_record(record).ok else "its body is damaged"

        return read_repaired(read, lambda found: {queue: [physical_offset] if found[1] else []}, self._repairs)


def _messages_of(checked: CheckedQuery, queue: MessageQueue) -> list[MessageExt]:
    """Return the messages that a store's query has found, including damaged messages, in the order in which they were
    stored."""
    found = [one.message for one in checked.found]
    found += [_damaged(queue, physical_offset, "its record is damaged") for physical_offset in checked.result.damaged]
    return sorted(found, key=lambda message: message.physical_offset)


def _messages_at(record: bytes, broker_name: str) -> list[MessageExt]:
    """Decode the message of a record, or the messages of an inner batch. Returns one damaged message for a damaged
    batch."""
    queue = MessageQueue("", broker_name, -1)
    if not is_inner_batch(record):
        return [one.message for one in read_fetched(record, queue)]
    batch = read_header(record)
    try:
        return [decode_record(one, broker_name=broker_name) for one in split_inner_batch(record)]
    except RecordError as error:
        [message] = [one.message for one in read_fetched(record, queue)]
        body = BodyUnreadableError(str(message.queue), batch.queue_offset, batch.physical_offset, error.reason)
        return [message._replaced(body=body)]


def _damaged(queue: MessageQueue, physical_offset: int, reason: str) -> MessageExt:
    """Make a placeholder message for a damaged record. Only its broker group and physical offset are known."""
    name = f"{queue.topic}@{queue.broker_name}"
    return MessageExt.damaged(BodyUnreadableError(name, -1, physical_offset, reason, True), queue)


def _call_with_time_left(method: Callable[..., T], args: tuple[Any, ...], left_s: float) -> T:
    return method(*args, min(left_s, QUERY_TIMEOUT_S))


TAIL_TIMEOUT_S: Final = 3.0
"""Timeout in seconds of one call to a broker group for the new messages of a tailed topic."""
TAIL_MESSAGES_MAX: Final = 1024
TAIL_MAX_BYTES: Final = 4 * 1024 * 1024
"""Maximum bytes of records that one broker group returns per read of a tailed topic."""
TAIL_BROKERS_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Arrived:
    """The new messages of a topic that one read returned, oldest first. `skipped`: the number of messages that the read
    left out because of its limits. `positions`: by queue, the offset from which the next read continues. `size_bytes`:
    the size of the records that the read fetched."""

    messages: tuple[MessageExt, ...]
    positions: dict[MessageQueue, int]
    skipped: int = 0
    size_bytes: int = 0


class TailAdmin(AdminBase):
    """The administration call that follows a topic's newest messages (tail). The call only reads."""

    @bounded(positions=NOT_NEGATIVE, max_messages=NumberRange(1, TAIL_MESSAGES_MAX))
    def tail(
        self, topic: str, positions: Mapping[MessageQueue, int] | None = None, *, max_messages: int = 100
    ) -> Arrived:
        """Return the messages at or after `positions`, without waiting: at most the newest `max_messages`, and at most
        4 MiB of each broker group. Older messages are skipped. Without `positions`, returns the end offsets of the
        queues, and no message.

        A damaged message, and the messages after it in its queue, are returned by a later call: after the repair, or
        with a `body_error` if no other replica repairs it within 15 s. Positions stay before it so long.

        Makes one call for each broker group, all at the same time. If a broker group does not answer, its positions
        stay unchanged. If no broker group answers, or if one does not answer a call without `positions`, raises the
        error. Raises TopicNotExistError if the topic does not exist, and InvalidArgumentError if an argument is
        invalid.
        """

        queues: dict[str, list[MessageQueue]] = {}
        for queue in self._routes.get(check_topic(topic)).subscribe_queues:
            queues.setdefault(queue.broker_name, []).append(queue)

        def read(own: Sequence[MessageQueue]) -> list[FetchResult] | RaymqError:
            try:
                return self._read_behind(own, positions, max_messages)
            except RaymqError as error:
                return error

        answers = map_parallel(read, queues.values(), threads_max=TAIL_BROKERS_AT_ONCE, name="tail")
        failures = [answer for answer in answers if isinstance(answer, RaymqError)]
        if failures and (positions is None or len(failures) == len(answers)):
            raise failures[0]
        following = dict(positions or {})
        found: list[tuple[int, MessageExt]] = []
        skipped = size_bytes = 0
        for own, answer in zip(queues.values(), answers, strict=True):
            if isinstance(answer, RaymqError):
                continue
            for queue, result in zip(own, answer, strict=True):
                following[queue] = result.max_offset
                size_bytes += len(result.records)
                if positions is not None:
                    start = positions.get(queue, -1)
                    checked = read_checked(result, queue, start)
                    waits_at = self._first_in_repair(queue, checked.damaged)
                    arrived = [one.message for one in checked.found]
                    if waits_at is None:
                        skipped += result.max_offset - result.next_offset
                    else:
                        following[queue] = waits_at
                        arrived = [message for message in arrived if message.queue_offset < waits_at]
                    found += zip(stored_times(arrived), arrived, strict=True)
        found.sort(key=itemgetter(0))
        newest = tuple(message for _, message in found[-max_messages:])
        return Arrived(newest, following, skipped + len(found) - len(newest), size_bytes)

    def _first_in_repair(self, queue: MessageQueue, damaged: Sequence[int]) -> int | None:
        """Report damaged messages of a queue. Returns the offset of the first one that is repaired or may be repaired
        soon, so that the next call should read it; None if all are returned as they are."""
        if not damaged:
            return None
        if self._repairs.wait(queue, damaged, 0.0):
            return damaged[0]
        return next((offset for offset in damaged if self._repairs.is_waiting(queue, offset)), None)

    def _read_behind(
        self, queues: Sequence[MessageQueue], positions: Mapping[MessageQueue, int] | None, max_messages: int
    ) -> list[FetchResult]:
        """Fetch the new records of queues of one broker group. Returns one result per queue. If `positions` is None,
        the results have offsets only."""
        requests = [
            FetchRequest(queue.topic, queue.queue_id, (positions or {}).get(queue, 0), max_messages) for queue in queues
        ]
        max_bytes = 0 if positions is None else TAIL_MAX_BYTES
        return call_master(
            self._routes,
            self._storages,
            queues[0],
            TAIL_TIMEOUT_S,
            lambda storage, left_s: storage.fetch(requests, max_bytes, 0.0, left_s),
        )
