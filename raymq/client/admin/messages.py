"""Administration: reads a queue without a group, finds messages by offset, key, id or time, and tails a topic.

A tail is read repeatedly, without a group, by a person who watches new messages.
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
    pull_messages,
    read_fetched,
    stored_times,
)
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import BodyUnreadableError, DataLossError, InvalidArgumentError, RaymqError
from raymq.common.message import MessageExt, MessageQueue, PullResult, checked_queue
from raymq.common.names import check_topic
from raymq.common.numbers import NOT_NEGATIVE, POSITIVE, NumberRange, bounded
from raymq.common.parallel import map_parallel
from raymq.common.protocol.store import Boundary, FetchRequest, FetchResult, QueryResult
from raymq.common.retry import persist_until
from raymq.records.format.decode import decode_record
from raymq.records.format.inner_batch import split_inner_batch
from raymq.records.format.inner_batch_encode import is_inner_batch
from raymq.records.format.layout import RecordError, read_header
from raymq.records.format.message_id import parse_offset_message_id
from raymq.remoting.storage_clients import call_master

QUERY_TIMEOUT_S: Final = 10.0
"""Bounds one query of a store, which is repeated until ADMIN_TIMEOUT_S is over."""

T = TypeVar("T")


class MessageAdmin(AdminBase):
    """Calls that read messages. They change nothing."""

    @bounded(max_messages=NumberRange(1, PULL_MAX_MESSAGES), wait_s=NumberRange(0.0, PULL_MAX_WAIT_S))
    def pull(
        self, queue: MessageQueue, offset: int, *, max_messages: int = 32, tags: str = "*", wait_s: float = 0.0
    ) -> PullResult:
        """Read a queue from `offset` without a group. OffsetOutOfRangeError, InvalidArgumentError."""
        queue = checked_queue("queue", queue)
        route = self._routes.wait(check_topic(queue.topic), ADMIN_TIMEOUT_S)
        data = next((data for data in route.queues if data.broker_name == queue.broker_name), None)
        if data is None:
            raise InvalidArgumentError(f"topic {queue.topic!r} has no queue in {queue.broker_name!r}")
        nums, subscription = data.read_queue_nums, Subscription.parse(queue.topic, tags)
        return call_master(
            self._routes,
            self._storages,
            queue,
            ADMIN_TIMEOUT_S,
            lambda storage, left_s: pull_messages(storage, queue, nums, subscription, offset, max_messages, wait_s),
        )

    @bounded(max_messages=POSITIVE)
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
        """The newest messages of `topic` that have `key`, oldest first, stored between two times (ms since 1970).

        Times count by whole seconds, and at most 64 messages come from one broker group (max_msgs_num_batch). With
        `broker_name`, only that broker group is asked. A damaged message is among them, with its `body_error`.
        TopicNotExistError, InvalidArgumentError.
        """
        arguments = (key, max_messages, begin_ms, end_ms)
        found = self._query(topic, "query_by_key", *arguments, broker_name=broker_name)
        return [message for _, message in sorted(found, key=itemgetter(0))][-max_messages:]

    def query_by_id(self, topic: str, message_id: str) -> list[MessageExt]:
        """Return the messages of `topic` with this `message_id`: a unique id, or an offset message id.

        Empty if no message has the id. Several messages have one unique id if the producer sent the message more than
        once. All messages of an inner batch share its offset message id. A damaged message is included, with its
        `body_error`.
        Raises TopicNotExistError, InvalidArgumentError.
        """
        found = [message for _, message in self._query(topic, "query_by_unique_id", message_id)]
        return found or self._query_by_offset_id(topic, message_id.upper())

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int, boundary: Boundary = Boundary.LOWER) -> int:
        """The first offset of `queue` stored at or after a time; with UPPER the last one stored at or before it."""
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
        """The messages that a query method finds in the stores of all broker groups that have the topic, or of one,
        with the times, in ms since 1970, at which they were stored."""
        route = self._routes.wait(check_topic(topic), ADMIN_TIMEOUT_S)
        if broker_name is not None and broker_name not in route.brokers:
            raise InvalidArgumentError(f"topic {topic!r} has no queue in {broker_name!r}")
        messages: list[tuple[int, MessageExt]] = []
        for name in route.brokers if broker_name is None else (broker_name,):
            storage = self._storages.get(route.master_storage(name))
            result: QueryResult = persist_until(
                time.monotonic() + ADMIN_TIMEOUT_S,
                partial(_call_with_time_left, getattr(storage, method), (topic, *args)),
            )
            found = _messages_of(result, MessageQueue(topic, name, -1))
            messages += zip(stored_times(found), found, strict=True)
        return messages

    def _query_by_offset_id(self, topic: str, offset_id: str) -> list[MessageExt]:
        try:
            physical_offset = parse_offset_message_id(offset_id).physical_offset
        except InvalidArgumentError:
            return []  # a unique id of another kind
        route = self._routes.get(topic)
        damaged: list[MessageExt] = []
        for broker_name in route.brokers:
            storage = self._storages.get(route.master_storage(broker_name))
            try:
                record = persist_until(
                    time.monotonic() + ADMIN_TIMEOUT_S,
                    partial(_call_with_time_left, storage.record_at, (physical_offset,)),
                )
            except (InvalidArgumentError, DataLossError):
                continue  # no record of this store starts at that offset
            except BodyUnreadableError as error:  # it may have the wanted id; another store may have the message, too
                damaged.append(_damaged(MessageQueue(topic, broker_name, -1), physical_offset, error.reason))
                continue
            messages = _messages_at(record, broker_name)
            if messages[0].offset_message_id == offset_id and messages[0].topic == topic:
                return messages
        return damaged


def _messages_of(result: QueryResult, queue: MessageQueue) -> list[MessageExt]:
    """The messages that a store's query has found, damaged ones among them, in the order they were stored."""
    found = [one.message for one in read_fetched(result.records, queue)]
    found += [_damaged(queue, physical_offset, "its record is damaged") for physical_offset in result.damaged]
    return sorted(found, key=lambda message: message.physical_offset)


def _messages_at(record: bytes, broker_name: str) -> list[MessageExt]:
    """The message of a record, or the messages of an inner batch; one damaged message for a batch that is damaged."""
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
    """Stand in for a damaged record whose broker group and place in the log are all that is known."""
    name = f"{queue.topic}@{queue.broker_name}"
    return MessageExt.damaged(BodyUnreadableError(name, -1, physical_offset, reason, True), queue)


def _call_with_time_left(method: Callable[..., T], args: tuple[Any, ...], left_s: float) -> T:
    return method(*args, min(left_s, QUERY_TIMEOUT_S))


TAIL_TIMEOUT_S: Final = 3.0
"""Bounds the call to one broker group."""
TAIL_MESSAGES_MAX: Final = 1024
TAIL_MAX_BYTES: Final = 4 * 1024 * 1024
"""The most bytes of records that one broker group answers."""
TAIL_BROKERS_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Arrived:
    """Messages that have arrived in a topic, oldest first. `skipped` are left out for the bounds. `positions`: the
    offsets to go on from, by queue."""

    messages: tuple[MessageExt, ...]
    positions: dict[MessageQueue, int]
    skipped: int = 0


class TailAdmin(AdminBase):
    """The call for watching a topic. It changes nothing."""

    @bounded(positions=NOT_NEGATIVE, max_messages=NumberRange(1, TAIL_MESSAGES_MAX))
    def tail(
        self, topic: str, positions: Mapping[MessageQueue, int] | None = None, *, max_messages: int = 100
    ) -> Arrived:
        """Return the messages after `positions`, without waiting: the newest `max_messages`, and at most 4 MiB of each
        broker group. All others are skipped. Without `positions` returns the ends of the queues, and no message.

        Makes one call for each broker group, all at the same time. A broker group that does not answer keeps its
        positions. If none answers, raises the error. Raises TopicNotExistError, InvalidArgumentError.
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
        skipped = 0
        for own, answer in zip(queues.values(), answers, strict=True):
            if isinstance(answer, RaymqError):
                continue
            for queue, result in zip(own, answer, strict=True):
                following[queue] = result.max_offset
                if positions is not None:
                    skipped += result.max_offset - result.next_offset
                    bounds = positions.get(queue, -1), result.next_offset
                    arrived = [one.message for one in read_fetched(result.records, queue, *bounds)]
                    found += zip(stored_times(arrived), arrived, strict=True)
        found.sort(key=itemgetter(0))
        newest = tuple(message for _, message in found[-max_messages:])
        return Arrived(newest, following, skipped + len(found) - len(newest))

    def _read_behind(
        self, queues: Sequence[MessageQueue], positions: Mapping[MessageQueue, int] | None, max_messages: int
    ) -> list[FetchResult]:
        """One result for each of the queues, which are of one broker group; only offsets without positions."""
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
