"""FeedClient makes a Listener's calls, over lanes, to the Pull actor that feeds the Listener.

Both calls are safe to repeat: the Pull actor resends a hand-over that was lost, and counts a report once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from raymq.common.protocol.consume_result import ConsumeReport, HandOver
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.calls import decode_result, encode_call
from raymq.remoting.lane.client import Lane, open_anywhere
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane_pool import LanePool

NEXT_WAIT_S: Final = 5.0
"""How long a Pull actor without tasks holds a Listener's request for the next tasks."""
FEED_CALL_TIMEOUT_S: Final = 5.0
"""Limits a call to the Pull actor, beside NEXT_WAIT_S."""

TaskReport = tuple[int, ConsumeReport]
"""A task's number, and the Listener's progress with it."""


@dataclass(frozen=True, slots=True)
class PullDescription:
    """The answer of a Pull actor to `describe`."""

    lane: LaneAddress


class FeedClient:
    """Calls of the instance `name`, in a process that calls itself `life`, to the Pull actor `pull`. Thread-safe.

    Each call raises what the Pull actor raised (ServiceNotAvailableError while it does not host the instance), and
    ServiceNotAvailableError or RequestTimeoutError without an answer.
    """

    def __init__(self, pull: str, name: str, life: str) -> None:
        self._name, self._life = name, life
        self._lanes: LanePool[PullDescription, Lane] = LanePool(
            ActorRef(pull), pull, lambda description, timeout_s: open_anywhere(description.lane, timeout_s)
        )

    def next_tasks(self, epoch: int, got: int) -> HandOver:
        """Return the hand-over after number `got` of life `epoch`, or one without tasks after NEXT_WAIT_S."""
        payload = encode_call("next_tasks", (self._name, self._life, epoch, got))

        def over_lane(lane: Lane, left_s: float) -> HandOver:
            return read_hand_over(lane.call(FrameKind.CALL, (payload,), left_s).payload)

        return self._lanes.call("next_tasks", over_lane, NEXT_WAIT_S + FEED_CALL_TIMEOUT_S)

    def report(self, epoch: int, reports: Sequence[TaskReport]) -> None:
        """Report about tasks of life `epoch`. The Pull actor has the reports on return."""
        payload = encode_call("report", (self._name, self._life, epoch, list(reports)))
        self._lanes.call(
            "report", lambda lane, left_s: lane.call(FrameKind.CALL, (payload,), left_s), FEED_CALL_TIMEOUT_S
        )


def read_hand_over(payload: bytes | memoryview) -> HandOver:
    """Decode a hand-over that `encode_result` has encoded. ServiceNotAvailableError if the payload is no hand-over."""
    hand_over: HandOver = decode_result(payload, HandOver)
    return hand_over
