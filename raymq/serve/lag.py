"""Computes the lag of one task queue: the tasks that its Ray Serve replicas have not finished. The lag is also defined
before the first replica has started."""

from __future__ import annotations

from raymq.client.admin.admin import Admin
from raymq.common.errors import TopicNotExistError
from raymq.common.protocol.group import GroupQueueProgress, GroupSummary


def tasks_summary(admin: Admin, group: str, queue: str) -> GroupSummary:
    """Return the group summary of `group`, the consumer group of the Ray Serve replicas that work on task queue
    `queue`. Before the first replica has started, all tasks in the queue count as lag. Raises GroupNotExistError if the
    group does not exist, and ServiceNotAvailableError or RequestTimeoutError if a broker does not answer."""
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
