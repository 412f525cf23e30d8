"""QueueCalls reads queues and messages, and moves committed offsets, for programs that are no members of a group.

A gateway makes these calls for its pull consumers: they choose queues and offsets themselves. All names are full names,
with their namespace.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.client.consumer.pull_once import PULL_CALL_TIMEOUT_S, pull_messages, read_fetched
from raymq.client.consumer.queue_lookup import QueueLookup
from raymq.client.consumer.subscription import Subscription
from raymq.common.delay import TIMER_TOPIC
from raymq.common.errors import GroupNotExistError, NoPermissionError, ServiceNotAvailableError
from raymq.common.message import ConsumeFromWhere, MessageExt, MessageQueue, PullResult
from raymq.common.protocol.group import OffsetCommit, StartOffsetQuery
from raymq.common.protocol.store import QueueBounds
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients, call_master

NO_MEMBER_GENERATION: Final = 0
RECENT_S: Final = 600.0
"""Maximum age in seconds of the messages that `QueueCalls.stored` finds, by the clocks of caller and store. So a store
need not read the old files of its index."""
_NO_QUEUE_ID: Final = -1
"""Queue id for messages of several queues."""
_FROM_FIRST: Final = StartOffsetQuery(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)


class QueueCalls:
    """The calls about single queues. Thread-safe. All calls block; they are repeated while a server restarts, and then
    raise ServiceNotAvailableError or RequestTimeoutError."""

    def __init__(self, routes: RouteCache, storages: StorageClients) -> None:
        self._routes, self._storages = routes, storages
        self._lookup = QueueLookup(routes, storages)

    def pull(self, queue: MessageQueue, subscription: Subscription, offset: int, max_messages: int) -> PullResult:
        """Return the wanted messages among the next `max_messages` messages of a queue from `offset`, without a wait.

        Raises OffsetOutOfRangeError if the queue does not hold `offset`. Raises TopicNotExistError or
        InvalidArgumentError if the topic or the queue does not exist.
        """
        stored = self._lookup.check(queue)
        return call_master(
            self._routes,
            self._storages,
            stored,
            PULL_CALL_TIMEOUT_S,
            lambda storage, _: pull_messages(
                storage, stored, stored.queue_id + 1, subscription, offset, max_messages, 0.0
            ),
        )

    def bounds(self, queue: MessageQueue) -> QueueBounds:
        """Return a queue's first offset, and the offset of its next message."""
        return self._lookup.bounds(queue)

    def offset_at(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the offset of the first message that was stored at or after a time in ms since 1970."""
        return self._lookup.offsets_for_times({queue: time_ms})[queue]

    def stored(
        self, topic: str, broker_name: str, message_ids: Sequence[str], timeout_s: float, *, delayed: bool = False
    ) -> list[MessageExt]:
        """Return the messages of a topic with one of these unique ids that a broker group has stored before the call.
        `delayed`: True also returns messages that wait for their delivery time.

        No failover loses these messages. Raises ServiceNotAvailableError or RequestTimeoutError if the broker group
        could not answer within `timeout_s`. Messages that were stored more than RECENT_S ago are not found.
        """
        since_ms = time.time_ns() // 1_000_000 - int(RECENT_S * 1000)
        place = MessageQueue(topic, broker_name, _NO_QUEUE_ID)

        def ask(storage: StorageClient, left_s: float) -> list[MessageExt]:
            found: list[MessageExt] = []
            for name in (topic, TIMER_TOPIC) if delayed else (topic,):
                result = storage.query_by_unique_ids(name, message_ids, since_ms, left_s)
                if not result.complete:
                    raise ServiceNotAvailableError(
                        f"broker group {broker_name!r} cannot tell yet which messages of topic {topic!r} it has stored"
                    )
                queue = MessageQueue(name, broker_name, _NO_QUEUE_ID)
                found += [one.message for one in read_fetched(result.records, queue)]
            return found

        return call_master(self._routes, self._storages, place, timeout_s, ask)

    def committed(self, group: str, queue: MessageQueue) -> int | None:
        """Return a group's committed offset of a queue; None if the group has committed nothing there."""
        self._lookup.check(queue)
        try:
            return GroupOffsets(group).committed_offset(queue)
        except GroupNotExistError:
            return None

    def commit(self, group: str, queue: MessageQueue, offset: int) -> None:
        """Commit an offset of a queue, also a lower one. Durable on return.

        Raises GroupNotExistError if the group does not exist and brokers create no groups. Raises NoPermissionError if
        a member of the group reads the queue: only the member may commit then.
        """
        self._lookup.check(queue)
        offsets = GroupOffsets(group)
        offsets.ensure_group(queue.broker_name)
        version = offsets.start_offset(queue, _FROM_FIRST, NO_MEMBER_GENERATION).reset_version
        commit = OffsetCommit(offset, NO_MEMBER_GENERATION, version, backwards=True)
        answer = offsets.commit_offsets({queue: commit})
        if queue in answer.fenced:
            raise NoPermissionError(f"a member of group {group!r} reads queue {queue}, and commits its offsets")
