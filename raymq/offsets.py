"""A consumer group's offsets, at the brokers that hold the queues."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from raymq.errors import TopicNotExistError
from raymq.group_info import StartOffsetQuery
from raymq.message import MessageQueue
from raymq.ray_calls import ActorRef
from raymq.storage_client import persist_until

TIMEOUT_S: Final = 20.0

_log = logging.getLogger(__name__)


class GroupOffsets:
    """Reads and commits one group's offsets. Thread-safe; calls are safe to repeat and go over broker restarts."""

    def __init__(self, group: str) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._brokers: dict[str, ActorRef] = {}

    def ensure_group(self, broker_name: str, timeout_s: float = TIMEOUT_S) -> None:
        """Make the group known to a broker group."""
        broker = self._broker(broker_name)
        persist_until(
            time.monotonic() + timeout_s, lambda left_s: broker.call("ensure_group", self.group, timeout_s=left_s)
        )

    def start_offset(self, queue: MessageQueue, query: StartOffsetQuery, timeout_s: float = TIMEOUT_S) -> int:
        """The committed offset, or where the query says to start."""
        broker = self._broker(queue.broker_name)
        offset: int = persist_until(
            time.monotonic() + timeout_s,
            lambda left_s: broker.call("start_offset", self.group, queue, query, timeout_s=left_s),
        )
        return offset

    def committed(self, queue: MessageQueue, timeout_s: float = TIMEOUT_S) -> int | None:
        """The committed offset of a queue, None where there is none."""
        broker = self._broker(queue.broker_name)
        table: dict[int, int] = persist_until(
            time.monotonic() + timeout_s,
            lambda left_s: broker.call("committed_offsets", self.group, queue.topic, timeout_s=left_s),
        )
        return table.get(queue.queue_id)

    def commit(self, offsets: Mapping[MessageQueue, int], timeout_s: float = TIMEOUT_S) -> None:
        """Commit the next offset to consume, per queue. Durable on return; on failure some queues may be committed.

        Offsets in a topic that was deleted meanwhile are dropped, as the topic's were.
        """
        tables: dict[str, dict[str, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        for queue, offset in offsets.items():
            tables[queue.broker_name][queue.topic][queue.queue_id] = offset
        deadline_s = time.monotonic() + timeout_s
        for broker_name, table in tables.items():
            broker = self._broker(broker_name)
            plain = {topic: dict(by_queue) for topic, by_queue in table.items()}
            self._commit_at(broker, plain, deadline_s)

    def _commit_at(self, broker: ActorRef, offsets: dict[str, dict[int, int]], deadline_s: float) -> None:
        try:
            persist_until(
                deadline_s, lambda left_s: broker.call("commit_offsets", self.group, offsets, timeout_s=left_s)
            )
        except TopicNotExistError as error:
            _log.info("group %s: an offset is not committed: %s", self.group, error)

    def _broker(self, name: str) -> ActorRef:
        with self._lock:
            return self._brokers.setdefault(name, ActorRef(name))
