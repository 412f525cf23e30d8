"""Where consumer groups stand in their queues, and who may say so.

    offsets    topic, group, queue → QueueOffset: durable, each change is a state record (actors.core.broker.state)
    owners     group, topic, queue → the newest generation whose owner was heard of: in memory only

A committed offset never goes back by itself. It goes back where somebody resets it, which its `reset_version` counts,
and where the program that consumes seeks back and says so. What a member commits counts unless its ownership is older
than another's (*fenced*), or its knowledge is older than the last reset (*reset*).

A topic that is deleted and made again begins with a reset version above all those before, so that whoever still holds
an offset of the former is told to begin anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raymq.errors import InvalidArgumentError
from raymq.protocol.group import OffsetCommit, QueueOffset

QueueOffsets = dict[int, QueueOffset]


@dataclass(slots=True)
class OffsetTable:
    """The durable part. `tables` is keyed by (topic, group); `first_versions` by topic, 0 where absent.

    `get`, `committed` and `topics` may be asked by any thread while another changes the table.
    """

    tables: dict[tuple[str, str], QueueOffsets] = field(default_factory=dict)
    first_versions: dict[str, int] = field(default_factory=dict)

    def get(self, group: str, topic: str, queue_id: int) -> QueueOffset | None:
        """The committed offset, None where there is none."""
        return self.tables.get((topic, group), {}).get(queue_id)

    def version(self, group: str, topic: str, queue_id: int) -> int:
        """The reset version a queue has, or begins with."""
        known = self.get(group, topic, queue_id)
        return self.first_versions.get(topic, 0) if known is None else known.reset_version

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Queue id to committed offset; queues without one are absent."""
        table = self.tables.get((topic, group), {}).copy()
        return {queue_id: known.queue_offset for queue_id, known in table.items()}

    def topics(self, group: str) -> list[str]:
        """Topics in which the group has committed offsets, sorted."""
        return sorted(topic for topic, name in list(self.tables) if name == group)

    def next_version(self, topic: str) -> int:
        """A version above all that the topic's queues have."""
        used = [
            known.reset_version for key, table in self.tables.items() if key[0] == topic for known in table.values()
        ]
        return max([self.first_versions.get(topic, 0), *used]) + 1

    def set(self, group: str, topic: str, offsets: Mapping[int, int], versions: Mapping[int, int]) -> None:
        """Set offsets outright; a queue that is not in `versions` keeps its own."""
        known = {queue_id: versions.get(queue_id, self.version(group, topic, queue_id)) for queue_id in offsets}
        table = self.tables.setdefault((topic, group), {})
        table.update({queue_id: QueueOffset(offset, known[queue_id]) for queue_id, offset in offsets.items()})

    def drop_topic(self, topic: str, next_version: int) -> None:
        """Forget the offsets in a topic; one of the same name begins with `next_version`."""
        self.first_versions[topic] = next_version
        for key in [key for key in self.tables if key[0] == topic]:
            del self.tables[key]

    def drop_group(self, group: str) -> None:
        """Forget a group's offsets."""
        for key in [key for key in self.tables if key[1] == group]:
            del self.tables[key]


class Owners:
    """The newest generation of an owner of each queue. Generation 0 is nobody: who is no member of a group."""

    def __init__(self) -> None:
        self._generations: dict[tuple[str, str, int], int] = {}

    def note(self, group: str, topic: str, queue_id: int, generation: int) -> None:
        """An owner of this generation has begun with the queue, or goes on."""
        key = (group, topic, queue_id)
        if generation > self._generations.get(key, 0):
            self._generations[key] = generation

    def fences(self, group: str, topic: str, queue_id: int, generation: int) -> bool:
        """Whether a newer owner than this one has been heard of."""
        return 0 < generation < self._generations.get((group, topic, queue_id), 0)

    def forget(self, group: str | None = None, topic: str | None = None) -> None:
        """Forget a group's queues, or a topic's."""
        for key in [key for key in self._generations if key[0] == group or key[1] == topic]:
            del self._generations[key]


@dataclass(slots=True)
class TopicCommits:
    """What becomes of commits in one topic: offsets to set, and queue ids that are answered otherwise."""

    offsets: dict[int, int] = field(default_factory=dict)
    reset: QueueOffsets = field(default_factory=dict)
    fenced: list[int] = field(default_factory=list)


def judge_commits(
    table: OffsetTable, owners: Owners, group: str, topic: str, commits: Mapping[int, OffsetCommit]
) -> TopicCommits:
    """Decide about commits by queue id, and note their owners. InvalidArgumentError for a negative offset.

    A queue that was reset without an offset to go on from (its topic was deleted and made again) begins at 0.
    """
    verdict = TopicCommits()
    for queue_id, commit in commits.items():
        if commit.queue_offset is not None and commit.queue_offset < 0:
            raise InvalidArgumentError(f"cannot commit offset {commit.queue_offset}: offsets start at 0")
        if owners.fences(group, topic, queue_id, commit.generation):
            verdict.fenced.append(queue_id)
            continue
        owners.note(group, topic, queue_id, commit.generation)
        known, version = table.get(group, topic, queue_id), table.version(group, topic, queue_id)
        if commit.reset_version < version:
            verdict.reset[queue_id] = known or QueueOffset(0, version)
        elif commit.queue_offset is not None and _moves(known, commit.queue_offset, commit.backwards):
            verdict.offsets[queue_id] = commit.queue_offset
    return verdict


def _moves(known: QueueOffset | None, offset: int, backwards: bool) -> bool:
    if known is None:
        return True
    return offset != known.queue_offset if backwards else offset > known.queue_offset
