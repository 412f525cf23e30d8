"""The consume queues of a store, by topic and queue id, and the topics that were deleted.

On disk
    consumequeue/TOPIC/QUEUE/          a queue exists if it has a directory
    consumequeue_ext/TOPIC/QUEUE/      the queue's extension, if it has one: storage/queue/consume_queue_ext.py
    compaction/TOPIC/QUEUE/            its compacted log, if it has one: storage/queue/compacted_log.py
    batchconsumequeue/TOPIC/QUEUE/     a queue of inner batches: a topic has queues of one kind
    config/deletedTopics.json          {"TOPIC" or "TOPIC:QUEUE": physical offset of the log's end at the deletion}

Messages of a deleted topic stay in the log until their log file is deleted. config/deletedTopics.json prevents recovery
from rebuilding queues for these messages. If a topic of the same name is created again, its messages lie after the
recorded offset, so they count. A replica that detects a deletion from later messages records only the queues that it
has deleted: `begin_anew`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from glob import escape
from pathlib import Path
from typing import Final, TypedDict

from raymq.common.config.store import StoreSettings
from raymq.common.config.values import CONSUME_QUEUE_UNIT_BYTES as UNIT_BYTES
from raymq.common.errors import MessageIllegalError
from raymq.common.names import is_light_queue
from raymq.records.format.layout import MIN_RECORD_SIZE
from raymq.records.logfiles.directory import BATCH_CONSUME_QUEUE_DIR, CONSUME_QUEUE_DIR, CONSUME_QUEUE_EXT_DIR
from raymq.records.logfiles.log_reader import LogReader
from storage.files import disk
from storage.files.config_files import ConfigFiles, parse_fastjson
from storage.files.write_handles import WriteHandles
from storage.queue.batch_consume_queue import BatchConsumeQueue
from storage.queue.compacted_log import COMPACTION_DIR
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.consume_queue_ext import ConsumeQueueExt, ExtendedConsumeQueue

_DELETED_TOPICS: Final = "deletedTopics.json"

AnyQueue = ConsumeQueue | BatchConsumeQueue


class _Parts(TypedDict):
    """Constructor arguments that consume queues, batch consume queues and extensions have in common."""

    reader: LogReader
    handles: WriteHandles
    repair: bool


class QueueTable:
    """All consume queues of one store. Changed under the store's append lock; `get` and `topics` may be called without
    the lock."""

    def __init__(
        self,
        root: Path,
        settings: StoreSettings,
        reader: LogReader,
        config: ConfigFiles,
        handles: WriteHandles,
        *,
        after_crash: bool,
    ) -> None:
        """Find the queues on disk, without reading their entries (units). Directories whose names are not queue ids are
        skipped."""
        self._root, self._settings = root, settings
        self._file_size = settings.mapped_file_size_consume_queue_bytes
        self._reader = reader
        self._config = config
        self._handles = handles
        self._parts: _Parts = {"reader": reader, "handles": self._handles, "repair": after_crash}
        self._batch_file_size = settings.mapper_file_size_batch_consume_queue_bytes
        self._queues: dict[tuple[str, int], AnyQueue] = {}
        self.directory = root / CONSUME_QUEUE_DIR
        self._batch_directory = root / BATCH_CONSUME_QUEUE_DIR
        disk.make_directory(self.directory)
        disk.unlink(root / "consumequeue.new")
        for path in sorted(self.directory.glob("*/*")):
            if path.is_dir() and path.name.isdecimal():
                self.get_or_create(path.parent.name, int(path.name))
        for path in sorted(self._batch_directory.glob("*/*")):
            if path.is_dir() and path.name.isdecimal():
                self.get_or_create_batch(path.parent.name, int(path.name))
        text = config.read(_DELETED_TOPICS)
        self._deleted: dict[str, int] = parse_fastjson(text) if text else {}

    def __iter__(self) -> Iterator[AnyQueue]:
        return iter(list(self._queues.values()))

    @property
    def plain(self) -> list[ConsumeQueue]:
        """The consume queues of single messages, without queues of inner batches."""
        return [queue for queue in self if isinstance(queue, ConsumeQueue)]

    def __len__(self) -> int:
        return len(self._queues)

    def get(self, topic: str, queue_id: int) -> AnyQueue | None:
        """Return the queue with this topic and queue id, of single messages or of inner batches. Return None if it does
        not exist."""
        return self._queues.get((topic, queue_id))

    def get_plain(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return the consume queue of a topic and queue id. Return None if the queue does not exist, or if it holds
        inner batches."""
        queue = self._queues.get((topic, queue_id))
        return queue if isinstance(queue, ConsumeQueue) else None

    def holds_batches(self, topic: str, queue_id: int) -> bool:
        """True if the queue with this topic and queue id exists and holds inner batches."""
        return isinstance(self._queues.get((topic, queue_id)), BatchConsumeQueue)

    def get_or_create_batch(self, topic: str, queue_id: int) -> BatchConsumeQueue | None:
        """Return the batch queue of a topic and queue id, and create it if it does not exist. Returns None if the
        existing queue contains single messages."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            queue = BatchConsumeQueue(self._root, topic, queue_id, self._batch_file_size, **self._parts)
            self._queues[topic, queue_id] = queue
        return queue if isinstance(queue, BatchConsumeQueue) else None

    def get_or_create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the consume queue of a topic and queue id, for single messages. Create it if it does not exist. A new
        queue is empty, and has no files before its first `reserve`.

        Raises MessageIllegalError if the queue contains inner batches.
        """
        queue = self._queues.get((topic, queue_id))
        if isinstance(queue, ConsumeQueue):
            return queue
        if queue is not None:
            raise MessageIllegalError(
                f"queue {queue_id} of topic {topic!r} stores inner batches (its queue type is batch), not single "
                "messages: send messages with a producer, and without a delay"
            )
        plain = self._queues[topic, queue_id] = self._make_plain(topic, queue_id)
        return plain

    def _make_plain(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Create the object of a queue of single messages. It is an ExtendedConsumeQueue only if the queue has an
        extension or will get one."""
        ext = ConsumeQueueExt.of_queue(self._settings, topic, queue_id, **self._parts)
        if ext is None:
            return ConsumeQueue(self._root, topic, queue_id, self._file_size, **self._parts)
        return ExtendedConsumeQueue(self._root, topic, queue_id, self._file_size, ext, **self._parts)

    def topics(self) -> dict[str, list[int]]:
        """Return the ids of the queues on disk by topic; topics and ids are sorted."""
        topics: dict[str, list[int]] = {}
        for (topic, queue_id), queue in sorted(self._queues.copy().items(), key=lambda item: item[0]):
            if queue.exists:
                topics.setdefault(topic, []).append(queue_id)
        return topics

    def count_topics(self, prefix: str) -> int:
        """Return the number of topics whose names begin with `prefix`."""
        return len({topic for topic, _ in self._queues if topic.startswith(prefix)})

    def has_topic(self, topic: str) -> bool:
        """True if a queue of the topic has a directory.

        A topic that RocketMQ deleted has no queue directory. RocketMQ 4.9 keeps the directory of the topic itself.
        """
        queues = (path for kind in (self.directory, self._batch_directory) for path in kind.glob(f"{escape(topic)}/*"))
        return any(path.name.isdecimal() and path.is_dir() for path in queues)

    def was_deleted_after(self, key: tuple[str, int], physical_offset: int) -> bool:
        """True if a queue was deleted after a message at `physical_offset` was stored. `key`: the queue's topic and
        queue id."""
        if not self._deleted:
            return False
        return physical_offset < max(self._deleted.get(key[0], 0), self._deleted.get(_name(*key), 0))

    def has_deletions_after(self, topic: str, physical_offset: int) -> bool:
        """True if a queue of `topic` was deleted after a message at `physical_offset` was stored."""
        return any(physical_offset < end and name.partition(":")[0] == topic for name, end in self._deleted.items())

    def end_deletions_at(self, end_offset: int) -> None:
        """Correct recorded deletions whose log offset lies after the log's end: set this offset to `end_offset`, the
        log's end.

        Otherwise new messages would count as deleted. (With ASYNC_FLUSH a power cut can remove the end of the log, but
        not the record of the deletion.)
        """
        late = {topic: end_offset for topic, offset in self._deleted.items() if offset > end_offset}
        if late:
            self._deleted.update(late)
            self._config.write(_DELETED_TOPICS, json.dumps(self._deleted, indent=1))

    def delete_topic(self, topic: str, *, end_offset: int, min_offset: int) -> list[AnyQueue]:
        """Delete the queues of `topic`, and return them. The deletion is on disk before the first file is deleted."""
        queues = [queue for queue in self if queue.topic == topic]
        if queues:
            self._note_deletions([topic], end_offset, min_offset)
            self._remove(topic, queues)
        return queues

    def begin_anew(self, topic: str, queue_id: int, *, end_offset: int, min_offset: int) -> list[AnyQueue]:
        """Delete the queues that remain of a deleted topic, because a queue of the recreated topic must begin at offset
        0.

        Returns the deleted queues, which `queues_before` finds. `end_offset` and `min_offset` are the end and the start
        of the log. As with `delete_topic`, the deletion is recorded on disk before the first file is deleted.
        """
        old = self.queues_before(topic, queue_id)
        self._note_deletions([_name(topic, queue.queue_id) for queue in old], end_offset, min_offset)
        self._remove(topic, old)
        return old

    def queues_before(self, topic: str, queue_id: int) -> list[AnyQueue]:
        """Return the queues that certainly existed before a topic was deleted. Queue `queue_id` of the topic is known
        to be one of them.

        The topic was deleted only after the last record of each such queue. Suppose that another queue's first record
        lies before this last record: then this queue also existed before the deletion. A queue that begins later may
        belong to a new topic of the same name.
        """
        old = [self._queues[topic, queue_id]]
        rest = [queue for queue in self if queue.topic == topic and queue is not old[0]]
        end_offset = old[0].max_physical_offset
        while older := [queue for queue in rest if (queue.first_physical_offset or 0) < end_offset]:
            old += older
            rest = [queue for queue in rest if queue not in older]
            end_offset = max(end_offset, *(queue.max_physical_offset for queue in older))
        return old

    def _note_deletions(self, names: Sequence[str], end_offset: int, min_offset: int) -> None:
        """Record that the topics or queues `names` were deleted: their messages before `end_offset` in the log are
        deleted, too. Drop recorded deletions whose messages are no longer in the log."""
        self._deleted = {name: offset for name, offset in self._deleted.items() if offset > min_offset}
        self._deleted.update(dict.fromkeys(names, end_offset))
        self._config.write(_DELETED_TOPICS, json.dumps(self._deleted, indent=1))

    def finish_deletions(self, min_physical_offset: int) -> None:
        """Finish deletions that a crash interrupted: delete the remaining queues. Called after recovery has found the
        ends of the queues.

        A queue that has no entries (units) is deleted too if the log, which starts at `min_physical_offset`, still has
        the deleted messages: the log scan then finds all later messages. Otherwise the queue must stay, because only
        the queue itself records its next offset.
        """
        left: dict[str, list[AnyQueue]] = {}
        for queue in self:
            first = queue.first_physical_offset
            if self.was_deleted_after((queue.topic, queue.queue_id), min_physical_offset if first is None else first):
                left.setdefault(queue.topic, []).append(queue)
        for topic, queues in left.items():
            self._remove(topic, queues)

    def _remove(self, topic: str, queues: Sequence[AnyQueue]) -> None:
        """Delete `queues`, which belong to one topic. If the topic has no queue left, delete everything else in its
        directories too."""
        for queue in queues:
            self._queues.pop((topic, queue.queue_id))
            queue.delete()
        is_left = any(queue.topic == topic for queue in self)
        names = [f"{topic}/{queue.queue_id}" for queue in queues] if is_left else [topic]
        for kind in (COMPACTION_DIR, CONSUME_QUEUE_DIR, BATCH_CONSUME_QUEUE_DIR, CONSUME_QUEUE_EXT_DIR):
            for directory in (self._root / kind / name for name in names):
                if directory.parent.is_dir():
                    disk.remove_tree(directory)
                    disk.sync_directory(directory.parent)
                    self._reader.maps.drop_maps_below(str(directory))

    def sweep_light_queue(self, queue: AnyQueue) -> bool:
        """Delete a light queue (LMQ) if retention has deleted all of its messages. Returns True if the queue was
        deleted.

        The queue is created again when a message names it. The new queue begins after all offsets that the deleted
        queue has had (`first_light_offset`).
        """
        if not is_light_queue(queue.topic) or queue.min_offset < queue.next_offset:
            return False
        del self._queues[queue.key]
        queue.delete()
        disk.remove_tree(queue.directory.parent)
        self._reader.maps.drop_maps_below(str(queue.directory.parent))
        return True

    def first_light_offset(self, log_start: int, log_end: int) -> int:
        """Return the queue offset at which a new light queue begins. The log contains the physical offsets
        [`log_start`, `log_end`).

        A deleted queue of the same name (`sweep_light_queue`) may have existed before, and its consumers may have
        committed an offset. So that they miss no messages, the new queue must begin after all offsets of the deleted
        queue. All records of the deleted queue lay before `log_start`. So its offsets are smaller than the number of
        records that fit into the log before `log_start`. The new queue begins at this number, rounded up to the start
        of a queue file. The number is not rounded if the log is too short for the rounded offset.
        """
        least = log_start // MIN_RECORD_SIZE
        units = self._file_size // UNIT_BYTES
        rounded = -(-least // units) * units
        return rounded if rounded <= log_end // MIN_RECORD_SIZE else least

    def forget_queue(self, queue: AnyQueue) -> None:
        """Delete a queue that recovery created for a record. Called if the record turns out to belong to
        another queue."""
        del self._queues[queue.key]
        queue.delete()

    def delete_all(self) -> None:
        """Delete every queue, because the log to which they pointed no longer exists (spec §5)."""
        for queue in self:
            del self._queues[queue.topic, queue.queue_id]
            queue.delete()

    def close(self) -> None:
        """Close the queue files that are open for writing. Idempotent."""
        self._handles.close()


def _name(topic: str, queue_id: int) -> str:
    """Return the key of a queue in config/deletedTopics.json. It is unambiguous, because topic names contain no
    colon."""
    return f"{topic}:{queue_id}"
