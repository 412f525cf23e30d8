"""The offsets that consumer groups have committed, and the rules that decide whether a commit is accepted.

    offsets    topic, group, queue → QueueOffset: durable, each change is a state record (actors.core.broker.state)
    owners     group, topic, queue → the newest known generation of an owner: in memory only

A committed offset goes back only in two cases: an operator resets it, which increases its `reset_version`, or the
consuming program seeks back and requests this in its commit. A member's commit is rejected as *fenced* if another owner
of the queue is newer. It is rejected as *reset* if the member made it before it received the last reset.

A topic that is deleted and created again begins with a reset version above all earlier versions. So a member that still
has an offset of the deleted topic gets an answer that makes the member start again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raymq.common.errors import InvalidArgumentError
from raymq.common.protocol.group import OffsetCommit, QueueOffset

QueueOffsets = dict[int, QueueOffset]


@dataclass(slots=True)
class OffsetTable:
    """The durable committed offsets of consumer groups. `tables`: offsets by (topic, group). `first_versions`: the
    first reset version by topic; 0 if absent.

    Any thread may call `get`, `committed` and `topics` while another thread changes the table.
    """

    tables: dict[tuple[str, str], QueueOffsets] = field(default_factory=dict)
    first_versions: dict[str, int] = field(default_factory=dict)

    def copy(self) -> OffsetTable:
        """Return an independent copy of the committed offsets."""
        return OffsetTable({key: dict(table) for key, table in self.tables.items()}, dict(self.first_versions))

    def get(self, group: str, topic: str, queue_id: int) -> QueueOffset | None:
        """Return a queue's committed offset; None if the group has committed none."""
        return self.tables.get((topic, group), {}).get(queue_id)

    def of(self, group: str, topic: str) -> Mapping[int, QueueOffset]:
        """Return the committed offsets of a topic's queues, by queue id. Do not store the returned mapping: later
        commits change it."""
        return self.tables.get((topic, group), {})

    def version(self, group: str, topic: str, queue_id: int) -> int:
        """Return the reset version of a group's offset in a queue: a number that grows with each reset of the offset.
        If the group has committed no offset in the queue, return the topic's first reset version."""
        known = self.get(group, topic, queue_id)
        return self.first_versions.get(topic, 0) if known is None else known.reset_version

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Return the offsets that a group has committed in a topic, by queue id. Queues without a committed offset are
        absent."""
        table = self.tables.get((topic, group), {}).copy()
        return {queue_id: known.queue_offset for queue_id, known in table.items()}

    def topics(self, group: str) -> list[str]:
        """Return the topics in which the group has committed offsets, sorted."""
        return sorted(topic for topic, name in list(self.tables) if name == group)

    def next_version(self, topic: str) -> int:
        """Return a reset version (a number that grows with each reset of an offset) above the reset versions of all
        queues of the topic."""
        used = [
            known.reset_version for key, table in self.tables.items() if key[0] == topic for known in table.values()
        ]
        return max([self.first_versions.get(topic, 0), *used]) + 1

    def set(self, group: str, topic: str, offsets: Mapping[int, int], versions: Mapping[int, int]) -> None:
        """Set a group's committed offsets in a topic, by queue id. `versions`: the new reset versions (numbers that
        grow with each reset of an offset), by queue id. A queue without a new version keeps its old one."""
        table = self.tables.setdefault((topic, group), {})
        first = self.first_versions.get(topic, 0)
        for queue_id, offset in offsets.items():
            known = table.get(queue_id)
            version = versions.get(queue_id, first if known is None else known.reset_version)
            table[queue_id] = QueueOffset(offset, version)

    def drop_topic(self, topic: str, next_version: int) -> None:
        """Drop all committed offsets in a deleted topic. If a topic of the same name is created later, it begins with
        the reset version `next_version`."""
        self.first_versions[topic] = next_version
        for key in [key for key in self.tables if key[0] == topic]:
            del self.tables[key]

    def drop(self, group: str, topic: str) -> None:
        """Drop a group's committed offsets in a topic. The group's next commit begins with the topic's first reset
        version, a number that grows with each reset of an offset."""
        self.tables.pop((topic, group), None)

    def drop_group(self, group: str) -> None:
        """Drop all offsets of a group."""
        for key in [key for key in self.tables if key[1] == group]:
            del self.tables[key]


class Owners:
    """For each group and queue: the newest known assignment generation of the consumer that owns the queue. Generation
    0 stands for a consumer outside the group."""

    def __init__(self) -> None:
        self._generations: dict[tuple[str, str, int], int] = {}

    def note(self, group: str, topic: str, queue_id: int, generation: int) -> None:
        """Record the assignment generation of the member that now consumes the queue. Does nothing if a newer
        generation is already recorded."""
        key = (group, topic, queue_id)
        if generation > self._generations.get(key, 0):
            self._generations[key] = generation

    def fences(self, group: str, topic: str, queue_id: int, generation: int) -> bool:
        """Return True if the queue has an owner with a newer generation than `generation`, so that commits of this
        generation are rejected."""
        return 0 < generation < self._generations.get((group, topic, queue_id), 0)

    def forget(self, group: str | None = None, topic: str | None = None) -> None:
        """Drop the recorded owners of a group's queues, or of a topic's queues."""
        for key in [key for key in self._generations if key[0] == group or key[1] == topic]:
            del self._generations[key]


@dataclass(slots=True)
class TopicCommits:
    """The decision about a group's commits in one topic: the offsets to set, the queues that were reset, and the queues
    whose commits are fenced."""

    offsets: dict[int, int] = field(default_factory=dict)
    reset: QueueOffsets = field(default_factory=dict)
    fenced: list[int] = field(default_factory=list)


def is_dead(committed: Mapping[int, int], first: Mapping[int, int]) -> bool:
    """Return True if a group cannot use its committed offsets in a topic any more.

    This is the case if every message before the group's offset is deleted in every queue. `first`: the offset of the
    first message that each queue still has. RocketMQ uses this test for a group's offsets in a topic to which no
    consumer of the group subscribes.
    """
    return all(offset <= first.get(queue_id, 0) for queue_id, offset in committed.items())


def judge_commits(
    table: OffsetTable, owners: Owners, group: str, topic: str, commits: Mapping[int, OffsetCommit]
) -> TopicCommits:
    """Check a group's offset commits in a topic against the committed offsets and the queues' owners, and record the
    owners. Returns the accepted offsets and the rejected queues. Raises InvalidArgumentError if an offset is negative.

    A queue that was reset without a new offset (because its topic was deleted and created again) begins at 0.
    """
    verdict = TopicCommits()
    offsets, first = table.of(group, topic), table.first_versions.get(topic, 0)
    for queue_id, commit in commits.items():
        if commit.queue_offset is not None and commit.queue_offset < 0:
            raise InvalidArgumentError(f"cannot commit offset {commit.queue_offset}: offsets start at 0")
        if owners.fences(group, topic, queue_id, commit.generation):
            verdict.fenced.append(queue_id)
            continue
        owners.note(group, topic, queue_id, commit.generation)
        known = offsets.get(queue_id)
        version = first if known is None else known.reset_version
        if commit.reset_version < version:
            verdict.reset[queue_id] = known or QueueOffset(0, version)
        elif commit.queue_offset is not None and _moves(known, commit.queue_offset, commit.backwards):
            verdict.offsets[queue_id] = commit.queue_offset
    return verdict


def _moves(known: QueueOffset | None, offset: int, backwards: bool) -> bool:
    if known is None:
        return True
    return offset != known.queue_offset if backwards else offset > known.queue_offset
