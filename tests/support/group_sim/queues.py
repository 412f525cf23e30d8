"""MemberQueues are the queues of a simulated member: everything the simulation asks of the product is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from actors.core.consume.process_queue import ConsumeTask, ProcessQueue
from actors.core.consume.process_queues import ProcessQueues
from raymq.client.consumer.assignment.assigned_queue import AssignmentState
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.subscription import Subscription
from raymq.common.message import MessageQueue
from raymq.common.protocol.consume_result import ConsumeReport, Failure
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from raymq.common.protocol.membership import GroupAssignment
from tests.support.clients.records import records_of

FETCH_MESSAGES = 4
SETTINGS = PushSettings(
    "billing",
    (Subscription.parse("orders"), Subscription.parse("audit")),
    orderly=True,
    pull_batch_size=8,
    pull_threshold_for_queue=16,
)


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """Messages `first` to `end` - 1 of a queue, for one call of the listener."""

    queue: MessageQueue
    first: int
    end: int
    task: ConsumeTask


class MemberQueues:
    """The queues of one member: granted, fetched, delivered, committed, revoked, released."""

    def __init__(self, fence_after_s: float) -> None:
        self._queues = ProcessQueues(SETTINGS, fence_after_s=fence_after_s)
        self._queues.listener_back()

    @property
    def holding(self) -> frozenset[MessageQueue]:
        return self._queues.holding

    def process_queue(self, queue: MessageQueue) -> ProcessQueue | None:
        """The process queue of a held queue; None if it is not held."""
        return next(
            (process_queue for process_queue in self._queues.process_queues() if process_queue.queue == queue), None
        )

    def may_deliver(self, queue: MessageQueue) -> bool:
        process_queue = self.process_queue(queue)
        return process_queue is not None and not process_queue.revoked

    def assignment_received(self, assignment: GroupAssignment, sent_s: float) -> None:
        self._queues.assignment_received(assignment, sent_s)

    def starting(self) -> list[ProcessQueue]:
        """The granted queues whose start offset is to be asked for."""
        return self._queues.starting()

    def started(self, process_queue: ProcessQueue, start: QueueOffset) -> bool:
        """Start with a granted queue at the offset the broker has told. False if it was lost or revoked meanwhile."""
        self._queues.started(process_queue, start)
        return process_queue.state is AssignmentState.STARTED

    def stop(self, now_s: float) -> None:
        """Take no further queue, and revoke those held."""
        self._queues.stop(now_s)

    def release(self, now_s: float) -> list[MessageQueue]:
        """Release the revoked queues that may go."""
        return self._queues.release(now_s)

    def lose(self, queue: MessageQueue) -> None:
        """Give up a queue at once."""
        self._queues.lose([queue])

    def fence(self, now_s: float) -> bool:
        """Give up all queues if other members may have them. True if so."""
        return self._queues.fence(now_s)

    def fetch(self, end_of: Callable[[MessageQueue], int], now_s: float) -> None:
        """Fetch what there is, up to the queues' ends."""
        for queue, offset in self._queues.wanted(now_s).items():
            end = min(end_of(queue), offset + FETCH_MESSAGES)
            if end > offset:
                self._queues.fetched(queue, offset, records_of(range(offset, end)), end, now_s)

    def deliveries(self, now_s: float) -> list[Delivery]:
        """The batches that the listener gets now."""
        return [
            Delivery(task.queue, task.messages.offsets[0], task.messages.offsets[-1] + 1, task)
            for task in self._queues.deliverable(now_s)
        ]

    def ended(self, delivery: Delivery, now_s: float, *, consumed: bool) -> None:
        """The listener has finished a delivery, or failed at its first message."""
        rest = tuple(range(1, len(delivery.task.messages)))
        report = ConsumeReport() if consumed else ConsumeReport(rest, (Failure(0, 1, "it failed"),))
        self._queues.reported(delivery.task, report, now_s)

    def commits(self, broker_name: str, *, ask: bool) -> dict[MessageQueue, OffsetCommit]:
        """The commits of finished messages; with `ask`, of the other queues too, to be told of resets."""
        queries = self._queues.reset_queries(broker_name) if ask else {}
        return queries | self._queues.uncommitted(broker_name)

    def committed(self, commits: Mapping[MessageQueue, OffsetCommit], answer: CommitAnswer) -> None:
        """Take the answer of the broker to commits."""
        self._queues.commit_answered(commits, answer)
