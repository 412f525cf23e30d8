"""Lists the topics of one store with their queues, and deletes topics."""

from __future__ import annotations

from collections.abc import Collection

from raymq.common.errors import StoreNotWritableError
from raymq.common.names import STATE_TOPIC, TRANSACTION_TOPICS, is_light_queue, is_system_topic
from raymq.common.protocol.attributes import TopicMessageType
from raymq.common.protocol.store import LightQueue
from storage.append.write_gate import WriteGate
from storage.parts import StoreParts
from storage.queue.topic_attributes import StoredAttributes
from storage.read.long_polls import LongPolls
from storage.retention.cleaner import Cleaner
from storage.running_flags import AGAINST_STATE
from storage.stats import StoreStats


class StoreTopics:
    """The topics that have queues in one store. Thread-safe, except for the method `fifo`. Deletions take the append
    lock.

    Each method except `delete_before` raises ServiceNotAvailableError if the store is closed.
    """

    def __init__(
        self, parts: StoreParts, gate: WriteGate, cleaner: Cleaner, polls: LongPolls, stats: StoreStats
    ) -> None:
        self._parts, self._gate, self._cleaner, self._polls, self._stats = parts, gate, cleaner, polls, stats
        self._queues = parts.queues
        self._attributes = StoredAttributes(parts.config)

    def queue_ids(self) -> dict[str, list[int]]:
        """Return, by topic, the ids of the existing queues."""
        self._gate.require_open()
        return self._queues.topics()

    def message_types(self) -> dict[str, TopicMessageType]:
        """Return the type of each topic that has attributes, according to the broker's file config/topics.json.

        Only one thread at a time may call this method.
        """
        self._gate.require_open()
        return {topic: one.message_type for topic, one in self._attributes.read().items()}

    def light_queues(self) -> list[LightQueue]:
        """Return the light queues (LMQ) that exist, sorted by name. A light queue exists from its first message until
        retention removes the empty queue."""
        self._gate.require_open()
        light = [queue for queue in self._queues if is_light_queue(queue.topic) and queue.exists]
        return sorted(LightQueue(queue.topic, queue.min_offset, queue.visible_offset) for queue in light)

    def delete(self, topic: str) -> None:
        """Delete the queues of `topic`, if it has any. On return the deletion is on disk. If the topic is created
        again, it starts at offset 0.

        The messages are removed from the disk later, with their log files. Raises StoreNotWritableError if the disk
        fails. It is then unknown whether the topic is deleted, and the store accepts no more appends.
        """
        with self._parts.append_lock:
            self._gate.require_writable(AGAINST_STATE)  # Deleting is allowed on a full disk, because it frees space.
            self._delete_queues(topic)

    def delete_before(self, existing: Collection[str], position: int) -> list[str]:
        """Delete the queues of topics that do not exist in a broker's state, and return the topics' names.

        Used by a replica that follows a master: the master deleted the topics, and the log does not record that
        deletion.

        `existing`: the topics of the broker's state before record `position` of STATE_TOPIC. If this log does not
        contain the record before `position`, nothing is deleted. A topic with a later message stays, because it may
        have been created again. The server's own topics and light queues stay, too. Raises StoreNotWritableError as
        `delete` does.
        """
        gone: list[str] = []
        states = self._queues.get_plain(STATE_TOPIC, 0)
        if states is None or not states.min_offset < position <= states.next_offset:
            return gone
        [last] = states.units(position - 1, 1)
        last_offset = int(last["physical_offset"])
        for topic in self._queues.topics():
            if topic in existing or is_system_topic(topic) or topic in TRANSACTION_TOPICS or is_light_queue(topic):
                continue
            with self._parts.append_lock:
                if all(one.max_physical_offset <= last_offset for one in self._queues if one.topic == topic):
                    self._delete_queues(topic)
                    gone.append(topic)
        return gone

    def _delete_queues(self, topic: str) -> None:
        """Delete the queues of a topic. Called under the append lock.

        The deletion is recorded for all records up to the log's end. So the queues stay deleted even if a snapshot of
        this store still lists them.
        """
        end_offset, min_offset = self._parts.log.end_offset, self._cleaner.log_start_on_disk
        try:
            queues = self._queues.delete_topic(topic, end_offset=end_offset, min_offset=min_offset)
        except OSError as error:
            self._gate.fail(error)
            raise StoreNotWritableError(f"{self._gate.failure}; topic {topic!r} may or may not be deleted") from error
        self._parts.dedup.forget_topic(topic)
        self._stats.forget_topic(topic)
        for queue in queues:
            self._polls.wake_queue((topic, queue.queue_id))
