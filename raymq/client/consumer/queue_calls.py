"""QueueCalls reads queues and moves committed offsets for programs that are no members of a group.

A gateway makes these calls for its pull consumers: they choose queues and offsets themselves. All names are full names,
with their namespace.
"""

from __future__ import annotations

from typing import Final

from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.client.consumer.pull_once import PULL_CALL_TIMEOUT_S, pull_messages
from raymq.client.consumer.queue_lookup import QueueLookup
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import GroupNotExistError, NoPermissionError
from raymq.common.message import ConsumeFromWhere, MessageQueue, PullResult
from raymq.common.protocol.group import OffsetCommit, StartOffsetQuery
from raymq.common.protocol.store import QueueBounds
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients, call_master

NO_MEMBER_GENERATION: Final = 0
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
