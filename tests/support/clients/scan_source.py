"""A fake of the cluster from which a scan reads: topics in memory, with the calls that a scan's planner makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from raymq.client.scan.ranges import OffsetRange, ScanSource
from raymq.common.errors import TopicNotExistError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds

T0_MS = 1_700_000_000_000
"""Store time of offset 0, in ms since 1970. The message at each next offset is stored one second later."""


class Queues(ScanSource):
    """Fake topics whose queues have the offset ranges in `bounds`: (first offset, next offset) of each queue.

    A queue stores one message per second; the first message of each queue is stored at second 0. `committed`: committed
    offsets of a group. `size`: bytes of each message.
    """

    def __init__(
        self,
        bounds: Mapping[tuple[str, int], tuple[int, int]],
        *,
        topics: Sequence[str] = ("orders",),
        committed: Mapping[str, Mapping[MessageQueue, int]] | None = None,
        size: int = 100,
    ) -> None:
        self._bounds, self._topics, self._committed, self._size = bounds, topics, committed or {}, size
        self.calls: dict[str, int] = defaultdict(int)

    def topics(self) -> Sequence[str]:
        return self._topics

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        if topic not in self._topics:
            raise TopicNotExistError(topic)
        return [MessageQueue(topic, *key) for key in self._bounds]

    def bounds(self, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, QueueBounds]:
        self.calls["bounds"] += 1
        return {queue: QueueBounds(*self._bounds[queue.broker_name, queue.queue_id], 0) for queue in queues}

    def offsets_by_time(self, times: Mapping[MessageQueue, int]) -> Mapping[MessageQueue, int]:
        found = {}
        for queue, time_ms in times.items():
            low, high = self._bounds[queue.broker_name, queue.queue_id]
            found[queue] = min(max(low, -(-(time_ms - T0_MS) // 1000)), high)
        return found

    def committed_offsets(self, group: str, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, int]:
        return {queue: offset for queue, offset in self._committed.get(group, {}).items() if queue in queues}

    def range_bytes(self, ranges: Sequence[OffsetRange]) -> Sequence[Sequence[int]]:
        self.calls["range_bytes"] += 1
        return [[one.size * self._size] for one in ranges]
