"""Retention per topic: a topic's own reserved time (reserve.time), shorter or longer than the store's.

On disk
    config/topics.json              the topics' attributes, as the broker writes them, some seconds after a change
    config/topicMinOffsets.json     {"TOPIC": {"QUEUE": [first offset, physical offset of the message before it]}}

If a topic's time is shorter than the store's, a queue's first offset advances past messages that are old enough by
their store time, as if their log files had been deleted. The files stay until the store's own reserved time has passed,
because they also contain messages of other topics. A new first offset is on disk before readers see it, so expired
messages do not reappear after a crash.

If a topic's time is longer, log files from the first message on that is not old enough stay. With
clean_file_forcibly_enable a nearly full disk deletes these files anyway.

Each replica moves its own queues' first offsets, by the store times in the records, which are the same on all replicas.
In addition, a message must have been on this replica for the reserved time (storage.files.age_marks), because a store
time may come from a wrong clock. So a replica that was copied anew keeps its messages longer than the other replicas.
Queues of inner batches use the store's reserved time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from storage.files.config_files import parse_fastjson
from storage.parts import StoreParts
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.topic_attributes import SETTLED_MS, StoredAttributes

OldUntil = Callable[[int], int]
"""Function that returns the physical offset before which all records are at least as old as a time in ms."""

MIN_OFFSETS_FILE: Final = "topicMinOffsets.json"


class TopicTimes:
    """The topics of one store that have their own reserved time. Only one thread at a time may use the object."""

    def __init__(self, parts: StoreParts) -> None:
        """Set each queue's first offset to its value at the time when the store was closed, or crashed."""
        self._parts, self._queues, self._log = parts, parts.queues, parts.log
        self._attributes = StoredAttributes(parts.config)
        text = parts.config.read(MIN_OFFSETS_FILE)
        self._moved: dict[str, dict[str, list[int]]] = parse_fastjson(text) if text else {}
        for queue, (offset, physical_offset) in self._known():
            # Skip a queue's stored first offset if the offset's record lies before the log's start. Then the log has
            # lost all earlier messages anyway, and the stored offset may belong to a deleted topic of the same name.
            if physical_offset >= self._log.min_offset:
                queue.forget_before(offset)

    def times(self) -> Mapping[str, int]:
        """Return the reserved time in ms of each topic that has its own reserved time. Compacted topics are
        omitted."""
        return {
            topic: max(values.reserve_time_ms, SETTLED_MS)
            for topic, values in self._attributes.read().items()
            if values.reserve_time_ms is not None and not values.is_compacted
        }

    def trim(self, now_ms: int, settled_offset: int, old_until: OldUntil) -> list[Path]:
        """Drop expired messages from the queues whose topic has its own reserved time: move each queue's first offset
        past them. Messages at or after the physical offset `settled_offset` are never dropped. `old_until`:
        AgeMarks.old_until.

        Returns the queue files that the caller must delete. Raises OSError if the disk fails.
        """
        moved: dict[ConsumeQueue, tuple[int, int]] = {}
        for queue, time_ms in self._timed():
            kept_from = min(settled_offset, old_until(time_ms))
            first = min(queue.first_stored_at(now_ms - time_ms), queue.first_at_or_after(kept_from))
            if first > queue.min_offset:
                [before] = queue.units(first - 1, 1)
                moved[queue] = first, int(before["physical_offset"])
        if not moved:
            return []
        known = {(queue.topic, queue.queue_id): list(place) for queue, place in self._known()}
        known |= {(queue.topic, queue.queue_id): list(place) for queue, place in moved.items()}
        self._moved = {}
        for (topic, queue_id), place in sorted(known.items()):
            self._moved.setdefault(topic, {})[str(queue_id)] = place
        self._parts.config.write(MIN_OFFSETS_FILE, json.dumps(self._moved))
        files: list[Path] = []
        for queue, (first, _) in moved.items():
            with self._parts.append_lock:
                # Skip a queue that no longer exists: its topic was deleted after the queue's new first offset was
                # computed.
                if self._queues.get(*queue.key) is queue:
                    queue.forget_before(first)
                    files += queue.drop_files_before_min()
        return files

    def reserved_from(self, now_ms: int, longer_than_ms: int, old_until: OldUntil) -> int:
        """Return the physical offset of the first message that must be kept only because its topic has a longer
        reserved time than the store (`longer_than_ms`). `old_until`: AgeMarks.old_until.

        Returns the log's end if no such message exists.
        """
        start = self._log.end_offset
        for queue, time_ms in self._timed():
            if time_ms > longer_than_ms:
                young = queue.first_at_or_after(old_until(time_ms))
                first = max(min(queue.first_stored_at(now_ms - time_ms), young), queue.min_offset)
                for unit in queue.next_unit(first, queue.visible_offset):
                    start = min(start, int(unit["physical_offset"]))
        return start

    def _timed(self) -> list[tuple[ConsumeQueue, int]]:
        times = self.times()
        return [(queue, times[queue.topic]) for queue in self._queues.plain if queue.topic in times] if times else []

    def _known(self) -> list[tuple[ConsumeQueue, tuple[int, int]]]:
        """Return the queues whose first offsets were moved, with the new offsets. Queues whose topics were deleted
        later are omitted."""
        known = []
        for topic, queues in self._moved.items():
            for queue_id, (offset, physical_offset) in queues.items():
                queue = self._queues.get_plain(topic, int(queue_id))
                if queue is not None and not self._queues.was_deleted_after(queue.key, physical_offset):
                    known.append((queue, (int(offset), int(physical_offset))))
        return known
