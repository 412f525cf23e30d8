"""A fake cluster for the planner of a read: topics whose queues have given bounds, and store one message per
ms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import TopicNotExistError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds

FIRST_MS = 1_700_000_000_000
"""Store time of offset 0 of each queue, in ms. Offset n was stored n ms later."""
PARTS = 4


class FakeSource:
    """Fake queues with their bounds: minimum offset and end offset. The object counts the requests for bounds."""

    def __init__(self, bounds: Mapping[MessageQueue, tuple[int, int]]) -> None:
        self._bounds = dict(bounds)
        self.asked = 0

    def topics(self) -> Sequence[str]:
        return sorted({queue.topic for queue in self._bounds})

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        if topic not in self.topics():
            raise TopicNotExistError(topic)
        return [queue for queue in self._bounds if queue.topic == topic]

    def bounds(self, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, QueueBounds]:
        self.asked += 1
        return {queue: QueueBounds(*self._bounds[queue], 0) for queue in queues}

    def creations(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        return {topic: {queue.broker_name: "1" for queue in self.queues(topic)} for topic in topics}

    def range_bytes(self, ranges: Sequence[OffsetRange]) -> Sequence[Sequence[int]]:
        return [[one.size * 1000 // PARTS] * PARTS for one in ranges]

    def offsets_by_time(self, times: Mapping[MessageQueue, int]) -> Mapping[MessageQueue, int]:
        return {
            queue: min(max(time_ms - FIRST_MS, self._bounds[queue][0]), self._bounds[queue][1])
            for queue, time_ms in times.items()
        }

    def committed_offsets(self, group: str, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, int]:
        return {}
