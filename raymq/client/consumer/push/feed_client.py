"""FeedClient makes a Listener's calls to the Pull actor that sends tasks to the Listener, over lanes (direct socket
connections).

Both calls, `next_tasks` and `report`, are safe to repeat: the Pull actor resends a task batch that was lost, and counts
each report once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from raymq.common.protocol.consume_result import ConsumeReport, TaskBatch
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.calls import decode_result, encode_call
from raymq.remoting.lane.client import Lane, open_anywhere
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane_pool import LanePool

NEXT_WAIT_S: Final = 5.0
"""Maximum time in s that a Pull actor delays its answer to a Listener's request for tasks while there are none (long
poll)."""
FEED_CALL_TIMEOUT_S: Final = 5.0
"""Timeout in s of a call to the Pull actor, in addition to NEXT_WAIT_S."""

TaskReport = tuple[int, ConsumeReport]
"""A task's number, and the Listener's report about the task."""


@dataclass(frozen=True, slots=True)
class PullDescription:
    """A Pull actor's answer to `describe`: the address of the actor's lane (direct socket connection)."""

    lane: LaneAddress


class FeedClient:
    """Makes the calls of the listener instance `name` to the Pull actor `pull`. `life` identifies the calling process.
    Thread-safe.

    Each call raises the error that the Pull actor raised (ServiceNotAvailableError while it does not host the
    instance). If the Pull actor does not answer, a call raises ServiceNotAvailableError or RequestTimeoutError.
    """

    def __init__(self, pull: str, name: str, life: str) -> None:
        self._name, self._life = name, life
        self._lanes: LanePool[PullDescription, Lane] = LanePool(
            ActorRef(pull), pull, lambda description, timeout_s: open_anywhere(description.lane, timeout_s)
        )

    def next_tasks(self, epoch: int, got: int) -> TaskBatch:
        """Return the task batch that follows batch number `got` of `epoch`. A new epoch begins each time a Pull actor
        starts to host the instance. If there are no tasks, returns a batch without tasks after NEXT_WAIT_S."""
        payload = encode_call("next_tasks", (self._name, self._life, epoch, got))

        def over_lane(lane: Lane, left_s: float) -> TaskBatch:
            return read_task_batch(lane.call(FrameKind.CALL, (payload,), left_s).payload)

        return self._lanes.call("next_tasks", over_lane, NEXT_WAIT_S + FEED_CALL_TIMEOUT_S)

    def report(self, epoch: int, reports: Sequence[TaskReport]) -> None:
        """Report to the Pull actor the progress of tasks that it sent in `epoch`. When the call returns, the Pull actor
        has received the reports."""
        payload = encode_call("report", (self._name, self._life, epoch, list(reports)))
        self._lanes.call(
            "report", lambda lane, left_s: lane.call(FrameKind.CALL, (payload,), left_s), FEED_CALL_TIMEOUT_S
        )


def read_task_batch(payload: bytes | memoryview) -> TaskBatch:
    """Decode a task batch that `encode_result` has encoded. Raises ServiceNotAvailableError if the payload is not a
    task batch."""
    batch: TaskBatch = decode_result(payload, TaskBatch)
    return batch
