"""MemberQueues, the queues of a simulated member. The simulation uses the product's consumer code only through this
class."""

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
    """One call of a member's listener, with the messages of `queue` from offset `first` up to `end`
    (exclusive)."""

    queue: MessageQueue
    first: int
    end: int
    task: ConsumeTask


class MemberQueues:
    """The queues of one simulated member: grants, fetches, deliveries, commits, revocations and releases."""

    def __init__(self, fence_after_s: float) -> None:
        self._queues = ProcessQueues(SETTINGS, fence_after_s=fence_after_s)
        self._queues.listener_back()

    @property
    def holding(self) -> frozenset[MessageQueue]:
        return self._queues.holding

    def process_queue(self, queue: MessageQueue) -> ProcessQueue | None:
        """Return the process queue of a queue that the member holds; None if the member does not hold the
        queue."""
        return next(
            (process_queue for process_queue in self._queues.process_queues() if process_queue.queue == queue), None
        )

    def may_deliver(self, queue: MessageQueue) -> bool:
        process_queue = self.process_queue(queue)
        return process_queue is not None and not process_queue.revoked

    def assignment_received(self, assignment: GroupAssignment, sent_s: float) -> None:
        self._queues.assignment_received(assignment, sent_s)

    def starting(self) -> list[ProcessQueue]:
        """Return the granted queues whose start offset the member has yet to request."""
        return self._queues.starting()

    def started(self, process_queue: ProcessQueue, start: QueueOffset) -> bool:
        """Begin to consume a granted queue at the start offset that the broker returned. Returns False if the member
        has lost the queue, or the queue was revoked."""
        self._queues.started(process_queue, start)
        return process_queue.state is AssignmentState.STARTED

    def stop(self, now_s: float) -> None:
        """Accept no further queues, and revoke the queues that the member holds."""
        self._queues.stop(now_s)

    def release(self, now_s: float) -> list[MessageQueue]:
        """Release the revoked queues that the member may release now. Returns the released queues."""
        return self._queues.release(now_s)

    def lose(self, queue: MessageQueue) -> None:
        """Give up a queue at once, without a commit."""
        self._queues.lose([queue])

    def fence(self, now_s: float) -> bool:
        """Give up all queues if the member's lease has expired, because other members may then own the queues. Returns
        True if the queues were given up."""
        return self._queues.fence(now_s)

    def fetch(self, end_of: Callable[[MessageQueue], int], now_s: float) -> None:
        """Fetch the messages that the member needs now: at most FETCH_MESSAGES messages of each queue, and none after
        the queue's end."""
        for queue, offset in self._queues.wanted(now_s).items():
            end = min(end_of(queue), offset + FETCH_MESSAGES)
            if end > offset:
                self._queues.fetched(queue, offset, records_of(range(offset, end)), end, now_s)

    def deliveries(self, now_s: float) -> list[Delivery]:
        """Return the batches that the member can deliver to the listener now."""
        return [
            Delivery(task.queue, task.messages.offsets[0], task.messages.offsets[-1] + 1, task)
            for task in self._queues.deliverable(now_s)
        ]

    def ended(self, delivery: Delivery, now_s: float, *, consumed: bool) -> None:
        """Record that the listener has finished a delivery. If `consumed` is False, the listener failed at the
        delivery's first message."""
        rest = tuple(range(1, len(delivery.task.messages)))
        report = ConsumeReport() if consumed else ConsumeReport(rest, (Failure(0, 1, "it failed"),))
        self._queues.reported(delivery.task, report, now_s)

    def commits(self, broker_name: str, *, ask: bool) -> dict[MessageQueue, OffsetCommit]:
        """Return the offset commits for queues that have finished but uncommitted messages. If `ask` is true, also
        return a reset query (a commit without an offset) for each other started queue. The broker's answer then names
        all queues whose offsets were reset."""
        queries = self._queues.reset_queries(broker_name) if ask else {}
        return queries | self._queues.uncommitted(broker_name)

    def committed(self, commits: Mapping[MessageQueue, OffsetCommit], answer: CommitAnswer) -> None:
        """Apply the broker's answer to a member's offset commits."""
        self._queues.commit_answered(commits, answer)
