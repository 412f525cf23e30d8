"""What a push-consumer instance has in its hands: the decisions of the Pull actor.

A `ProcessQueue` per queue it was granted. The table decides what is fetched (flow control, spec/messaging.md §5.6) and
committed, and when a queue may be let go; a `ConsumeService` decides what goes to the listener, and in which way.

    grant → begin → fetch, deliver, commit → revoke → released → drop

A queue being revoked takes nothing new, waits for what is at the listener, and is then released: only then may the
instance stop reporting it to the group (raymq.protocol.membership). A message that takes longer than RELEASE_PATIENCE_S
does not hold its queue back, unless the consumer is orderly: then it is delivered once more, by the new owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final

from actors.core.consume.consume_concurrently import ConsumeConcurrently
from actors.core.consume.consume_orderly import ConsumeOrderly
from actors.core.consume.consume_service import ConsumeService, Reaction, SendBack
from actors.core.consume.process_queue import ProcessQueue, Task
from raymq.consumer.push.settings import PushSettings
from raymq.message import MessageQueue
from raymq.protocol.consume_result import ConsumeReport
from raymq.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from raymq.record.memory_records import MemoryRecords

RELEASE_PATIENCE_S: Final = 10.0


class PullState(Enum):
    """Why a queue is fetched from, or not; the first that holds (spec/messaging.md §5.6)."""

    REVOKED = "revoked"
    SUSPENDED = "suspended"
    PAUSED = "paused"
    STARTING = "starting"
    TOO_MANY_MESSAGES = "too many messages"
    TOO_MANY_BYTES = "too many bytes"
    TOO_WIDE_A_SPAN = "too wide a span"
    PULLING = "pulling"


class ProcessQueues:
    """All queues of one instance. Not thread-safe."""

    def __init__(self, settings: PushSettings) -> None:
        self._settings = settings
        self._queues: dict[MessageQueue, ProcessQueue] = {}
        self._ending: dict[MessageQueue, set[Task]] = {}
        self._per_topic: Counter[str] = Counter()
        self._paused: set[MessageQueue] = set()
        self.service: ConsumeService = ConsumeOrderly(settings) if settings.orderly else ConsumeConcurrently(settings)
        self.suspended = False
        """The user wants nothing fetched and nothing delivered."""
        self.listener_away = True
        """Nothing can be delivered now: the listener's process is not known to be there."""

    # Which queues

    @property
    def holding(self) -> frozenset[MessageQueue]:
        return frozenset(self._queues)

    def held(self) -> list[ProcessQueue]:
        """All of them, for reports."""
        return list(self._queues.values())

    def grant(self, queue: MessageQueue, generation: int) -> None:
        """The group lets us have a queue. It counts as held, and is fetched from once `begin` was called. For a queue
        that is held, the generation is that of the last assignment that named it (raymq.protocol.membership)."""
        held = self._queues.get(queue)
        if held is None:
            self._queues[queue] = ProcessQueue(queue, generation)
            self._per_topic[queue.topic] += 1
        elif held.revoked_at_s is None:
            held.generation = generation

    def starting(self, broker_name: str) -> list[ProcessQueue]:
        """A broker group's queues whose start offset is not known yet."""
        return [
            held
            for held in self._queues.values()
            if held.fetch_offset is None and held.revoked_at_s is None and held.queue.broker_name == broker_name
        ]

    def begin(self, held: ProcessQueue, offset: QueueOffset) -> None:
        """The broker has said where the group stands in a queue of `starting`."""
        if not held.dropped and held.fetch_offset is None:
            held.begin(offset.queue_offset, offset.reset_version)

    def revoke(self, queue: MessageQueue, now_s: float) -> None:
        """Take no more of a queue; `released` names it once what is under way has ended."""
        held = self._queues.get(queue)
        if held is not None and held.revoked_at_s is None:
            held.revoked_at_s = now_s
            held.give_up_waiting()

    def released(self, now_s: float) -> list[MessageQueue]:
        """Revoked queues that may be let go: nothing is under way, and what is finished is committed."""
        return [
            queue
            for queue, held in self._queues.items()
            if held.revoked_at_s is not None
            and held.commit_offset == held.committed_offset
            and (
                (held.idle and queue not in self._ending)
                or (not self._settings.orderly and now_s - held.revoked_at_s > RELEASE_PATIENCE_S)
            )
        ]

    def drop(self, queue: MessageQueue) -> None:
        """Forget a queue that was released, or lost. What is at the listener is not heeded any more; in order, who gets
        the queue again here waits for it."""
        held = self._queues.pop(queue, None)
        if held is None:
            return
        held.dropped = True
        self._per_topic[queue.topic] -= 1
        if held.flying and self._settings.orderly:
            self._ending.setdefault(queue, set()).update(held.flying)

    def reset(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Somebody has reset the group's offset: go on there, and drop what is held. A queue that is being let go stays
        so: its next owner waits for what is at the listener."""
        held = self._queues.get(queue)
        if held is None:
            return
        self.drop(queue)
        self.grant(queue, held.generation)
        self.begin(self._queues[queue], offset)
        if held.revoked_at_s is not None:
            self.revoke(queue, held.revoked_at_s)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Fetch and deliver nothing of these queues, held or not."""
        self._paused.update(queues)

    @property
    def paused(self) -> frozenset[MessageQueue]:
        return frozenset(self._paused)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Go on with these."""
        self._paused.difference_update(queues)

    # Fetching

    def pull_state(self, held: ProcessQueue) -> PullState:
        """Whether the queue is fetched from."""
        settings, share = self._settings, max(1, self._per_topic[held.queue.topic])
        too_many = settings.pull_threshold_for_queue
        if settings.pull_threshold_for_topic > 0:
            too_many = max(1, settings.pull_threshold_for_topic // share)
        too_many_mib = settings.pull_threshold_size_for_queue_mib
        if settings.pull_threshold_size_for_topic_mib > 0:
            too_many_mib = max(1, settings.pull_threshold_size_for_topic_mib // share)
        rows = (
            (held.revoked_at_s is not None, PullState.REVOKED),
            (self.suspended, PullState.SUSPENDED),
            (held.queue in self._paused, PullState.PAUSED),
            (held.fetch_offset is None, PullState.STARTING),
            (held.count > too_many, PullState.TOO_MANY_MESSAGES),
            (held.size_bytes > too_many_mib << 20, PullState.TOO_MANY_BYTES),
            (
                not settings.orderly and held.offsets.span > settings.consume_concurrently_max_span,
                PullState.TOO_WIDE_A_SPAN,
            ),
        )
        return next((state for holds, state in rows if holds), PullState.PULLING)

    def wanted(self, now_s: float) -> dict[MessageQueue, int]:
        """Queue to fetch offset, for the queues that are fetched from now."""
        return {
            queue: held.fetch_offset
            for queue, held in self._queues.items()
            if held.fetch_offset is not None and held.fetch_at_s <= now_s and self.pull_state(held) is PullState.PULLING
        }

    def fetched(
        self, queue: MessageQueue, from_offset: int, run: MemoryRecords, next_offset: int, now_s: float
    ) -> None:
        """Messages from `from_offset` up to `next_offset` arrived. An answer to an outdated question is ignored."""
        held = self._queues.get(queue)
        if held is None or held.revoked_at_s is not None or held.fetch_offset != from_offset:
            return
        if next_offset > from_offset:
            held.fetched(run, next_offset)
            held.fetch_at_s = now_s + self._settings.pull_interval_ms / 1000 if len(run) else 0.0

    def jump(self, queue: MessageQueue, from_offset: int, to_offset: int) -> None:
        """The store says `from_offset` is not in the queue (any more): go on at `to_offset`."""
        held = self._queues.get(queue)
        if held is None or held.revoked_at_s is not None or held.fetch_offset != from_offset:
            return
        if to_offset > from_offset or not held.count:
            held.fetch_offset = to_offset  # what is held was read before its place was gone: it is delivered first
            held.backwards = to_offset < held.committed_offset

    # Feeding the listener

    def deliverable(self, now_s: float) -> list[Task]:
        """What the listener gets now; in flight on return."""
        if self.suspended or self.listener_away:
            return []
        ready = [
            held for queue, held in self._queues.items() if queue not in self._paused and queue not in self._ending
        ]
        return self.service.next_tasks(ready, now_s)

    def next_time_s(self) -> float | None:
        """When the earliest pause ends, of a delivery or of a fetch."""
        times = [
            time_s
            for held in self._queues.values()
            for time_s in (self.service.next_time_s(held), held.fetch_at_s or None)
            if time_s is not None
        ]
        return min(times, default=None)

    def reported(self, task: Task, report: ConsumeReport, now_s: float) -> Reaction:
        """The listener has said how far it is with a task."""
        if report.ended:
            self._ended(task)
        return self.service.reported(task, report, now_s)

    def died(self, task: Task, now_s: float) -> Reaction:
        """The listener's process died with the task."""
        self._ended(task)
        return self.service.died(task, now_s)

    def sent_back(self, sent: SendBack) -> None:
        self.service.sent_back(sent)

    def send_back_failed(self, sent: SendBack, now_s: float) -> None:
        self.service.send_back_failed(sent, now_s)

    def _ended(self, task: Task) -> None:
        ending = self._ending.get(task.queue)
        if ending is not None:
            ending.discard(task)
            if not ending:
                del self._ending[task.queue]

    # Committing

    def uncommitted(self, broker_name: str, *, ask: bool = False) -> dict[MessageQueue, OffsetCommit]:
        """What to commit at a broker group now; with `ask`, its other queues too, to hear whether they were reset."""
        commits = {}
        for queue, held in self._queues.items():
            if held.fetch_offset is None or queue.broker_name != broker_name:
                continue
            offset = held.commit_offset
            if offset != held.committed_offset or ask:
                held.asked_count = held.finished_count
                wanted = offset if offset != held.committed_offset else None
                held.asked = OffsetCommit(wanted, held.generation, held.reset_version, held.backwards)
                commits[queue] = held.asked
        return commits

    def commit_is_urgent(self) -> bool:
        """Whether a queue waits for a commit: it is being let go, or much is finished that a crash would repeat."""
        limit = max(1, self.service.uncommitted_max // 2)
        return any(
            held.finished_count - held.asked_count >= limit or (held.revoked_at_s is not None and held.idle)
            for held in self._queues.values()
        )

    def committed(self, commits: Mapping[MessageQueue, OffsetCommit], answer: CommitAnswer) -> None:
        """The broker's answer to commits of `uncommitted`."""
        for queue, commit in commits.items():
            held = self._queues.get(queue)
            if held is None or held.asked is not commit:
                continue  # another tenure by now
            if queue in answer.fenced or queue in answer.gone:
                self.drop(queue)
            elif queue in answer.reset:
                self.reset(queue, answer.reset[queue])
            elif commit.queue_offset is not None:
                held.committed_offset = commit.queue_offset
                held.backwards = held.backwards and not commit.backwards
                held.finished_count -= held.asked_count
                held.asked_count = 0
