"""A fake consumer group for tests of the pull consumer without Ray. It answers the calls that the consumer makes to its
Rebalance actor and its broker."""

from __future__ import annotations

from raymq.common.errors import NoPermissionError
from raymq.common.message import MessageQueue
from raymq.common.protocol.clients import ConsumerData
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from raymq.common.protocol.membership import GroupAssignment
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually

Q0, Q1 = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1)


class Group:
    """Fake Rebalance actor of a group and fake broker with the group's offsets, for a group with one member."""

    def __init__(self) -> None:
        self.granted: set[MessageQueue] = {Q0, Q1}
        self.generation = 1
        self.resets = 5
        self.reset: dict[MessageQueue, QueueOffset] = {}
        self.fenced: frozenset[MessageQueue] = frozenset()
        self.heartbeats: list = []
        self.committed_offsets: dict[MessageQueue, int] = {}
        self.commits: list[dict[MessageQueue, OffsetCommit]] = []
        self.failure: Exception | None = None
        self.commit_failure: Exception | None = None
        self.start_failures: list[Exception] = []
        self.announced: list[ConsumerData] = []
        self.starts: list[tuple[MessageQueue, object, int]] = []
        self.stopped: dict[MessageQueue, str] = {}

    # Methods of RebalanceClient

    def heartbeat(self, heartbeat) -> GroupAssignment:
        self.heartbeats.append(heartbeat)
        if self.failure is not None:
            raise self.failure
        return GroupAssignment(self.generation, frozenset(self.granted), 1, self.resets)

    # Methods of GroupOffsets

    def ensure_group(self, broker_name, timeout_s=20.0) -> None:
        pass

    def start_offset(self, queue, query, generation, timeout_s=20.0) -> QueueOffset:
        self.starts.append((queue, query, generation))
        if self.start_failures:
            raise self.start_failures.pop()
        if queue in self.stopped:
            raise NoPermissionError(self.stopped[queue])
        return self.reset.get(queue, QueueOffset(self.committed_offsets.get(queue, 0)))

    def start_offsets(self, generations, query, timeout_s=20.0) -> dict[MessageQueue, QueueOffset]:
        return {q: self.start_offset(q, query, at) for q, at in generations.items() if q not in self.stopped}

    def committed_offset(self, queue, timeout_s=20.0):
        return self.committed_offsets.get(queue)

    def commit_offsets(self, commits, timeout_s=20.0) -> CommitAnswer:
        if self.commit_failure is not None:
            raise self.commit_failure
        self.commits.append(dict(commits))
        reset = {q: at for q, at in self.reset.items() if q in commits and commits[q].reset_version < at.reset_version}
        refused = reset.keys() | self.fenced
        for queue, wish in commits.items():
            if queue not in refused and wish.queue_offset is not None:
                self.committed_offsets[queue] = wish.queue_offset
        stopped = {queue: reason for queue, reason in self.stopped.items() if queue in commits}
        return CommitAnswer(reset, self.fenced & commits.keys(), stopped=stopped)

    # Methods that only tests call

    def grant(self, *queues: MessageQueue) -> None:
        self.generation += 1
        self.granted = set(queues)

    def reset_to(self, queue: MessageQueue, offset: int) -> None:
        """Reset the group's committed offset of a queue, as an administrator does."""
        self.reset[queue] = QueueOffset(offset, len(self.reset) + 1)
        self.committed_offsets[queue] = offset
        self.resets += 1

    def hears(self, *queues: MessageQueue) -> None:
        """Wait until a heartbeat of the member lists exactly these queues as held."""
        count = len(self.heartbeats)
        eventually(
            lambda: any(beat.holding == frozenset(queues) for beat in self.heartbeats[count:]),
            f"holding {queues}",
            WAIT_S,
        )

    def has(self, **offsets: int) -> None:
        """Wait until the group has committed these offsets. An argument is a queue id with its offset, as in
        ``q0=3``."""
        wanted = {MessageQueue("orders", "a", int(name[1:])): offset for name, offset in offsets.items()}
        eventually(
            lambda: wanted.items() <= self.committed_offsets.items(),
            f"{wanted} committed, not {self.committed_offsets}",
            WAIT_S,
        )
