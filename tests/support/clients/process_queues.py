"""Helpers for tests of ProcessQueues, the core that decides a consumer's fetches and deliveries: make a started
ProcessQueues, grant its queues, and complete its fetches."""

from __future__ import annotations

from actors.core.consume.process_queue import ConsumeTask, ProcessQueue
from actors.core.consume.process_queues import ProcessQueues
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.subscription import Subscription
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import QueueOffset
from raymq.common.protocol.membership import GroupAssignment
from tests.support.clients.records import records_of

GENERATION = 7
SETTINGS = ("billing", (Subscription.parse("orders"),))


def make_process_queues(*queues: MessageQueue, start: int = 0, reset_version: int = 0, **settings) -> ProcessQueues:
    """Return the ProcessQueues of a consumer instance with a running listener. The instance holds `queues`, which were
    granted in GENERATION and start at offset `start`."""
    core = ProcessQueues(PushSettings(*SETTINGS, **settings))
    core.listener_back()
    grant(core, *queues)
    for process_queue in core.starting():
        core.started(process_queue, QueueOffset(start, reset_version))
    return core


def grant(core: ProcessQueues, *queues: MessageQueue, generation: int = GENERATION, at_s: float = 0.0) -> None:
    """Grant the consumer these queues and revoke all others, as the group's Rebalance actor does."""
    core.assignment_received(GroupAssignment(generation, frozenset(queues), 1), at_s)


def fetch(core: ProcessQueues, queue: MessageQueue, *offsets: int, reconsume_times: int = 0) -> None:
    """Complete the consumer's pending fetch of a queue with messages at the given offsets."""
    records = records_of(offsets, reconsume_times=reconsume_times)
    core.fetched(queue, core.wanted(0.0)[queue], records, offsets[-1] + 1, 0.0)


def process_queue_of(core: ProcessQueues, queue: MessageQueue) -> ProcessQueue:
    """Return the process queue of a queue that the consumer holds."""
    return next(process_queue for process_queue in core.process_queues() if process_queue.queue == queue)


def offsets_of(task: ConsumeTask) -> list[int]:
    """Return the queue offsets of a task's messages."""
    return list(task.messages.offsets)
