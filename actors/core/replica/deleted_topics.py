"""The topics whose messages a store rejects, because the topics were deleted and not created again.

A client may keep a route to a topic for half a minute after the topic's deletion. Messages that the client sends in
this time must not be acknowledged. The names are stored in config/closedTopics.json, before a deletion is carried out.
The list is bounded: if it has more than CLOSED_TOPICS_MAX names, the oldest name is dropped, long after every route to
its topic has expired.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from itertools import pairwise
from typing import Final

import numpy as np

from raymq.common.delay import names_real_topic
from raymq.common.errors import TopicNotExistError
from raymq.common.message import PROPERTY_REAL_TOPIC
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.layout import RecordError, decode_properties
from raymq.records.format.rewrite import split_record

CLOSED_TOPICS_FILE: Final = "closedTopics.json"
CLOSED_TOPICS_MAX: Final = 10_000


class DeletedTopics:
    """The deleted topics of one store. `read` and `write` are functions that read and write the store's config files.
    Thread-safe."""

    def __init__(self, read: Callable[[str], str | None], write: Callable[[str, str], None]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._names: dict[str, None] = dict.fromkeys(json.loads(read(CLOSED_TOPICS_FILE) or "[]"))

    def __contains__(self, topic: str) -> bool:
        return topic in self._names

    def check(self, batches: Iterable[EncodedBatch]) -> None:
        """Raise TopicNotExistError if a batch is for a deleted topic, or contains a delayed message whose target is a
        deleted topic."""
        if self._names:
            for batch in batches:
                for topic in real_topics(batch) if names_real_topic(batch.topic) else (batch.topic,):
                    self.require(topic)

    def require(self, topic: str) -> None:
        """Raise TopicNotExistError if `topic` is a deleted topic."""
        if topic in self._names:
            raise TopicNotExistError(topic)

    def add(self, topic: str) -> None:
        """Reject messages for `topic` from now on. Durable on return."""
        with self._lock:
            names = [*(name for name in self._names if name != topic), topic][-CLOSED_TOPICS_MAX:]
            self._save(names)

    def remove(self, topics: Collection[str]) -> None:
        """Accept messages for `topics` again. Durable on return."""
        with self._lock:
            if any(topic in self._names for topic in topics):
                self._save([name for name in self._names if name not in topics])

    def agree(self, existing: Collection[str], stored: Iterable[str]) -> None:
        """Accept messages for the `existing` topics, and reject messages for all other `stored` topics. Durable on
        return.

        Called when a store becomes the master: topics may have been deleted and created while other replicas were the
        master.
        """
        with self._lock:
            names = [name for name in dict.fromkeys([*self._names, *stored]) if name not in existing]
            if names != list(self._names):
                self._save(names[-CLOSED_TOPICS_MAX:])

    def _save(self, names: list[str]) -> None:
        self._write(CLOSED_TOPICS_FILE, json.dumps(names))
        self._names = dict.fromkeys(names)


def topics_of_state(text: str) -> tuple[frozenset[str], int]:
    """Return the names of the topics in a broker's config file, and the offset of the first state record that the file
    does not include.

    The offset is 0 for a file that RocketMQ wrote. See actors.core.broker.snapshot.
    """
    snapshot = json.loads(text)
    return frozenset(snapshot.get("topicConfigTable", ())), int(snapshot.get("queueOffset", 0))


def real_topics(batch: EncodedBatch) -> list[str]:
    """Return the topics to which a batch of delayed messages will be delivered. Damaged records are ignored: the store
    rejects them later."""
    ends = [0, *np.cumsum(batch.sizes).tolist()]
    records = [memoryview(batch.records)[start:end] for start, end in pairwise(ends)]
    topics = []
    for record in records:
        with suppress(RecordError):
            topics.append(decode_properties(split_record(record).properties).get(PROPERTY_REAL_TOPIC, ""))
    return topics
