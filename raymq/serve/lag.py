"""The lag of a task queue's replicas, also while there has been none yet."""

from __future__ import annotations

from raymq.client.admin.admin import Admin
from raymq.common.errors import TopicNotExistError
from raymq.common.protocol.group import GroupQueueProgress, GroupSummary


def tasks_summary(admin: Admin, group: str, queue: str) -> GroupSummary:
    """The state of `group`, the replicas of task queue `queue`. Before the first replica has started, every task that
    the queue holds counts. GroupNotExistError, ServiceNotAvailableError, RequestTimeoutError."""
    summary = admin.group_summary(group)
    if any(progress.queue.topic == queue for progress in summary.queues):
        return summary
    try:
        described = admin.describe_topic(queue)
    except TopicNotExistError:
        return summary
    queues = tuple(GroupQueueProgress(group, one.queue, None, one.min_offset, one.max_offset) for one in described)
    lag = sum(progress.lag for progress in queues)
    return GroupSummary(group, queues, lag, 0, summary.retry_lag, summary.dead_letters)
