"""A pull consumer by its own account, for administrators: the queues that it holds, and their offsets."""

from __future__ import annotations

import os

from raymq.consumer.pull.assigned_message_queue import AssignedMessageQueue
from raymq.consumer.pull.subscription_state import SubscriptionState
from raymq.members.questions import RunningInfo, RunningQueue
from raymq.message import MessageModel


def running_info(core: SubscriptionState, group: str, client_id: str, host: str, member: str) -> RunningInfo:
    """The consumer called `member` of `group` in this process, whose state is `core`."""
    return RunningInfo(
        *(client_id, host, os.getpid(), member, group, "PULL", MessageModel.CLUSTERING.value, core.expressions),
        queues=tuple(_running_queue(assigned) for assigned in core.held_queues),
    )


def _running_queue(assigned: AssignedMessageQueue) -> RunningQueue:
    """A queue that is held; what polls returned and the program has not finished counts as in flight."""
    return RunningQueue(
        assigned.queue,
        "paused" if assigned.paused else assigned.state.value,
        assigned.fetch_offset,
        assigned.commit_offset,
        assigned.committed,
        assigned.buffered_count,
        assigned.buffered_bytes,
        in_flight=max(0, assigned.position - assigned.commit_offset),
    )
