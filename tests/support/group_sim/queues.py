"""What a simulated member has in its hands: all that the simulation asks of the product's ProcessQueues is here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from actors.core.consume.process_queue import ProcessQueue, Task
from actors.core.consume.process_queues import ProcessQueues
from raymq.consumer.push.settings import PushSettings
from raymq.consumer.subscription import Subscription
from raymq.message import MessageQueue
from raymq.protocol.consume_result import ConsumeReport, Failure
from raymq.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from tests.support.clients.records import records_of

RUN_MESSAGES = 4
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
    task: Task


class Hands:
    """The queues of one member: granted, fetched, delivered, committed, revoked, released."""

    def __init__(self) -> None:
        self._queues = ProcessQueues(SETTINGS)
        self._queues.listener_away = False

    @property
    def holding(self) -> frozenset[MessageQueue]:
        return self._queues.holding

    def held(self, queue: MessageQueue) -> ProcessQueue | None:
        """What stands for one tenure of a queue."""
        return next((held for held in self._queues.held() if held.queue == queue), None)

    def may_deliver(self, queue: MessageQueue) -> bool:
        held = self.held(queue)
        return held is not None and held.revoked_at_s is None

    def begin(self, queue: MessageQueue, start: QueueOffset, generation: int) -> None:
        """The member was granted a queue, and the broker has said where the group stands in it."""
        self._queues.grant(queue, generation)
        held = self.held(queue)
        assert held is not None
        self._queues.begin(held, start)

    def revoke(self, queues: Iterable[MessageQueue], now_s: float) -> None:
        for queue in queues:
            self._queues.revoke(queue, now_s)

    def released(self, now_s: float) -> list[MessageQueue]:
        """Revoked queues that may be let go."""
        return self._queues.released(now_s)

    def drop(self, queue: MessageQueue) -> None:
        """Let go, or lose, a queue."""
        self._queues.drop(queue)

    def fetch(self, end_of: Callable[[MessageQueue], int], now_s: float) -> None:
        """Fetch what there is, up to the queues' ends."""
        for queue, offset in self._queues.wanted(now_s).items():
            end = min(end_of(queue), offset + RUN_MESSAGES)
            if end > offset:
                self._queues.fetched(queue, offset, records_of(range(offset, end)), end, now_s)

    def deliveries(self, now_s: float) -> list[Delivery]:
        """What the listener gets now."""
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
        """What is finished and not committed; with `ask`, the other queues too, to hear of resets."""
        return self._queues.uncommitted(broker_name, ask=ask)

    def committed(self, commits: Mapping[MessageQueue, OffsetCommit], answer: CommitAnswer) -> None:
        """The broker has answered."""
        self._queues.committed(commits, answer)
