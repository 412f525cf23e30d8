"""A pull consumer by its own account, for administrators: the queues that it holds, and their offsets."""

from __future__ import annotations

import os

from raymq.client.consumer.pull.assigned_message_queue import AssignedMessageQueue
from raymq.client.consumer.pull.subscription_state import SubscriptionState
from raymq.common.errors import NoPermissionError
from raymq.common.members.questions import RunningInfo, RunningQueue
from raymq.common.message import MessageModel


def running_info(core: SubscriptionState, group: str, client_id: str, host: str, member: str) -> RunningInfo:
    """The consumer called `member` of `group` in this process, whose state is `core`."""
    return RunningInfo(
        *(client_id, host, os.getpid(), member, group, "PULL", MessageModel.CLUSTERING.value, core.expressions),
        queues=tuple(_running_queue(assigned, core.forbidden.get(assigned.queue)) for assigned in core.held_queues),
    )


def _running_queue(assigned: AssignedMessageQueue, forbidden: NoPermissionError | None) -> RunningQueue:
    """A queue that is held; what polls returned and the program has not finished counts as in flight. `forbidden`: why
    the group may not read it now."""
    state = "paused" if assigned.paused else assigned.state.value
    return RunningQueue(
        assigned.queue,
        state if forbidden is None else "forbidden",
        assigned.fetch_offset,
        assigned.commit_offset,
        assigned.committed,
        assigned.buffered_count,
        assigned.buffered_bytes,
        in_flight=max(0, assigned.position - assigned.commit_offset),
        trouble="" if forbidden is None else str(forbidden),
    )
