"""FeedClient is a Listener's way to the Pull actor that feeds it: over lanes, else as actor calls of the same meaning.

Both calls are safe to repeat: a hand-over that was lost on its way comes again, and a report counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from raymq.common.protocol.consume_result import ConsumeReport, HandOver
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.calls import decode_result, encode_call
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane_pool import LanePool

NEXT_WAIT_S: Final = 5.0
"""How long a Pull actor that has no task keeps a Listener's question for one."""
FEED_CALL_TIMEOUT_S: Final = 5.0
"""For a call to the Pull actor, beside that wait."""

TaskReport = tuple[int, ConsumeReport]
"""A task's number, and the Listener's progress with it."""


@dataclass(frozen=True, slots=True)
class PullDescription:
    """The answer of a Pull actor to `describe`."""

    lane: LaneAddress


class _FeedLane:
    """One lane to a Pull actor. Not shared between threads at the same time."""

    def __init__(self, address: LaneAddress, timeout_s: float) -> None:
        self._lane = Lane(address, timeout_s=timeout_s)

    @property
    def closed(self) -> bool:
        return self._lane.closed

    def close(self) -> None:
        self._lane.close()

    def next_tasks(self, name: str, life: str, epoch: int, got: int, timeout_s: float) -> HandOver:
        payload = encode_call("next_tasks", (name, life, epoch, got))
        return read_hand_over(self._lane.call(FrameKind.CALL, (payload,), timeout_s).payload)

    def report(self, name: str, life: str, epoch: int, reports: Sequence[TaskReport], timeout_s: float) -> bool:
        self._lane.call(FrameKind.CALL, (encode_call("report", (name, life, epoch, reports)),), timeout_s)
        return True


class FeedClient:
    """Calls of the instance `name`, in a process that calls itself `life`, to the Pull actor `pull`. Thread-safe.

    They raise what the Pull actor raised (ServiceNotAvailableError while it does not host the instance), and
    ServiceNotAvailableError or RequestTimeoutError without an answer.
    """

    def __init__(self, pull: str, name: str, life: str) -> None:
        self._name, self._life = name, life
        self._actor = ActorRef(pull)
        self._lanes: LanePool[PullDescription, _FeedLane] = LanePool(
            self._actor, pull, lambda description, timeout_s: _FeedLane(description.lane, timeout_s)
        )

    def next_tasks(self, epoch: int, got: int) -> HandOver:
        """The next hand-over behind number `got` of life `epoch`, or one without tasks after NEXT_WAIT_S."""
        me = (self._name, self._life, epoch, got)
        return self._lanes.call(
            "next_tasks",
            lambda lane, left_s: lane.next_tasks(*me, left_s),
            lambda left_s: read_hand_over(self._actor.call("next_tasks", *me, timeout_s=left_s)),
            NEXT_WAIT_S + FEED_CALL_TIMEOUT_S,
        )

    def report(self, epoch: int, reports: Sequence[TaskReport]) -> None:
        """Report about tasks of life `epoch`. The Pull actor has the reports on return."""
        me = (self._name, self._life, epoch, list(reports))
        self._lanes.call(
            "report",
            lambda lane, left_s: lane.report(*me, left_s),
            lambda left_s: self._actor.call("report", *me, timeout_s=left_s),
            FEED_CALL_TIMEOUT_S,
        )


def read_hand_over(payload: bytes | memoryview) -> HandOver:
    """The hand-over that `encode_result` has encoded. ServiceNotAvailableError if it is none."""
    hand_over: HandOver = decode_result(payload, HandOver)
    return hand_over
