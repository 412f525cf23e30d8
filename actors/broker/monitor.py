"""A broker's counters, its protection against slow groups, its list of groups whose unread messages were deleted, and
the limits of bounded topics.

Counters, and checks that run at an interval, belong in this module. Their state does not survive the broker process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from actors.broker.state_log import StateLog
from actors.core.broker.backlog import bounded_topics, decide_skip, kept_messages
from actors.core.broker.state import BrokerState, Change
from actors.core.broker.stats import (
    GROUP_GET_NUMS,
    SNDBCK2DLQ_TIMES,
    SNDBCK_PUT_NUMS,
    TOPIC_PUT_NUMS,
    TOPIC_PUT_SIZE,
    BrokerStats,
)
from raymq.common.config.cluster import BrokerOptions
from raymq.common.message import MessageExt
from raymq.common.protocol.bounds import BoundedTopic, TopicBacklog
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.stats import GroupStats, TopicStats
from raymq.common.protocol.store import DeletedRange, FetchRequest, StoreStatistics
from raymq.common.retry import persist_until
from raymq.records.kernels.messages import read_messages
from raymq.remoting.storage_client import StorageClient
from raymq.telemetry.metrics.histogram import Histogram, HistogramFigures

TOPIC_CREATION: Final = "raymq_topic_create_execution_time_milliseconds"
GROUP_CREATION: Final = "raymq_consumer_group_create_execution_time_milliseconds"
READ_TIMEOUT_S: Final = 20.0
DAMAGED_MAX: Final = 8
"""Maximum number of consecutive damaged messages that are skipped while searching for a message with a readable store
time."""
BOUNDS_INTERVAL_S: Final = 0.5
"""Interval in seconds at which the backlogs of bounded topics are measured."""
FULL_INTERVAL_S: Final = 0.1
"""The interval while producers wait for room in a topic, or while a topic refuses messages."""
UNBOUNDED_INTERVAL_S: Final = 5.0
"""Interval in seconds at which a broker without bounded topics tells its store so. A store that was opened again may
have read from its files that a topic has a limit, although the limit was removed just before."""
_FIRST: Final = np.zeros(1, np.int64)

logger = logging.getLogger(__name__)


class CreationTimes:
    """Histograms of the time that creating topics and groups took, separately for success and failure.
    Thread-safe."""

    def __init__(self) -> None:
        self._histograms = {
            (name, status): Histogram(name)
            for name in (TOPIC_CREATION, GROUP_CREATION)
            for status in ("success", "failure")
        }

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record how long the `with` block took under `name`: TOPIC_CREATION or GROUP_CREATION. An error in the block
        is recorded as a failure and raised again."""
        start_s, status = time.monotonic(), "failure"
        try:
            yield
            status = "success"
        finally:
            self._histograms[name, status].add((time.monotonic() - start_s) * 1000)

    def figures(self) -> dict[tuple[str, str], HistogramFigures]:
        """Return the histograms of the time that it took to create topics and groups. The keys are the metric's name
        and "success" or "failure"."""
        return {key: histogram.figures() for key, histogram in self._histograms.items()}


class BrokerMonitor:
    """Counters of one broker and its protection against slow groups. Thread-safe."""

    def __init__(
        self,
        log: StateLog,
        storage: Callable[[], StorageClient],
        options: BrokerOptions,
        update_group: Callable[[GroupConfig], None],
    ) -> None:
        self._log = log
        self._storage = storage
        self.options = options
        """The broker's options; replaced when live settings change."""
        self._update_group = update_group
        self._lock = threading.Lock()
        self._stats = BrokerStats()
        self.creations = CreationTimes()
        self._committed: dict[str, dict[str, dict[int, int]]] = {}
        """The committed offsets of each queue, as of the last call of `note_deletions`, by group, topic and
        queue id."""
        self._unread: dict[tuple[str, str, int], DeletedRange] = {}

    def count(self, kind: str, key: str, value: int) -> None:
        """Add `value` to a counter (actors.core.broker.stats)."""
        with self._lock:
            self._stats.add(kind, key, value)

    def forget(self, topic: str | None = None, group: str | None = None) -> None:
        """Drop the figures of a deleted topic or group: its counters, and the record of its messages that were lost
        unread."""
        with self._lock:
            for key in [key for key in self._unread if group == key[0] or topic == key[1]]:
                del self._unread[key]
            self._stats.forget(topic, group)

    def topic_stats(self, topic: str) -> TopicStats:
        """Return how many messages and bytes were stored in a topic."""
        with self._lock:
            return TopicStats(self._stats.figures(TOPIC_PUT_NUMS, topic), self._stats.figures(TOPIC_PUT_SIZE, topic))

    def group_stats(self, group: str) -> dict[str, GroupStats]:
        """Return, by topic, the number of messages that a group has consumed, and the number that it has sent
        back."""
        with self._lock:
            keys = {key for kind in (GROUP_GET_NUMS, SNDBCK_PUT_NUMS) for key in self._stats.keys(kind)}
            return {
                key.partition("@")[0]: GroupStats(
                    self._stats.figures(GROUP_GET_NUMS, key), self._stats.figures(SNDBCK_PUT_NUMS, key)
                )
                for key in sorted(keys)
                if key.partition("@")[2] == group
            }

    def sample(self) -> None:
        """Add the store's counters to the broker's counters, and take a sample of all counters."""
        statistics: StoreStatistics = self._storage().control("statistics", timeout_s=READ_TIMEOUT_S)
        topics = self._log.ready().topics
        with self._lock:
            for topic, puts in statistics.topics.items():
                if topic in topics:
                    self._stats.take_total(TOPIC_PUT_NUMS, topic, puts.messages)
                    self._stats.take_total(TOPIC_PUT_SIZE, topic, puts.bytes)
            self._stats.sample(time.monotonic())

    def note_deletions(self) -> None:
        """Record the groups that lost unread messages because the store deleted them early on a full disk
        (clean_file_forcibly_enable).

        A group that reaches a deleted range skips the range, and soon commits an offset after it. So the currently
        committed offset does not show the loss. This method therefore uses the offsets that were committed before its
        previous call.
        """
        deleted: list[DeletedRange] | None = self._storage().control("deleted_young", timeout_s=READ_TIMEOUT_S)
        if deleted is None:
            return
        state = self._log.ready()
        for group, topics in self._committed.items():
            for lost in deleted:
                committed = topics.get(lost.topic, {}).get(lost.queue_id)
                if committed is not None and committed < lost.end_offset:
                    self._note_unread(group, replace(lost, begin_offset=max(lost.begin_offset, committed)))
        self._committed = {
            group: {topic: state.offsets.committed(group, topic) for topic in state.offsets.topics(group)}
            for group in list(state.groups)
        }

    def _note_unread(self, group: str, lost: DeletedRange) -> None:
        key = (group, lost.topic, lost.queue_id)
        with self._lock:
            known = self._unread.get(key)
            if known is not None:
                lost = replace(lost, begin_offset=min(known.begin_offset, lost.begin_offset))
            self._unread[key] = lost
        if lost != known:
            logger.warning(
                "group %s has lost messages %d to %d of queue %s:%d: a full disk deleted them before the "
                "group had read them",
                *(group, lost.begin_offset, lost.end_offset - 1, lost.topic, lost.queue_id),
            )

    def unread(self) -> list[dict[str, Any]]:
        """Return, by group and topic, the number of unread messages that the store deleted early because the disk was
        full.

        Counts only deletions since this broker started.
        """
        with self._lock:
            noted = sorted(self._unread.items())
        counts: dict[tuple[str, str], int] = {}
        for (group, topic, _), lost in noted:
            counts[group, topic] = counts.get((group, topic), 0) + lost.end_offset - lost.begin_offset
        return [{"group": group, "topic": topic, "messages": count} for (group, topic), count in counts.items()]

    def protect(self) -> None:
        """Switch consume_enable off for groups whose lag is too large, if the settings require it (spec/messaging.md
        §2.4). A group with a large lag reads messages that are no longer in memory. These reads keep the disk busy,
        which delays all other groups."""
        if not self.options.disable_consume_if_consumer_read_slowly:
            return
        state = self._log.ready()
        end = int(self._storage().control("status", timeout_s=READ_TIMEOUT_S)["max_physical_offset"])
        for group, config in list(state.groups.items()):
            behind = self._behind_bytes(state, group, end)
            if config.consume_enable and behind > self.options.consumer_fallbehind_threshold_bytes:
                logger.warning(
                    "group %s has a lag of %d bytes; its setting consume_enable is switched off", group, behind
                )
                self._update_group(replace(config, consume_enable=False))

    def consumed(self) -> dict[tuple[str, str], int]:
        """Return the number of messages that were consumed since this broker was started, by group and topic."""
        return self._by_group_and_topic(GROUP_GET_NUMS)

    def sent_back(self) -> dict[tuple[str, str], int]:
        """Return the number of messages that were sent back since this broker was started, by group and topic."""
        return self._by_group_and_topic(SNDBCK_PUT_NUMS)

    def dead(self) -> dict[tuple[str, str], int]:
        """Return the number of messages that became dead letters since this broker was started, by group and
        topic."""
        return self._by_group_and_topic(SNDBCK2DLQ_TIMES)

    def _by_group_and_topic(self, kind: str) -> dict[tuple[str, str], int]:
        with self._lock:
            totals = self._stats.totals(kind)
        return {(group, topic): total for key, total in totals.items() for topic, _, group in [key.partition("@")]}

    def _behind_bytes(self, state: BrokerState, group: str, end: int) -> int:
        """Return how far a group lags, in bytes of the log: from the first message that the group has not committed up
        to `end`."""
        behind = 0
        for topic in state.offsets.topics(group):
            for queue_id, offset in state.offsets.committed(group, topic).items():
                message = self.message_at(topic, queue_id, offset)
                behind = max(behind, 0 if message is None else end - message.physical_offset)
        return behind

    def message_at(self, topic: str, queue_id: int, offset: int) -> MessageExt | None:
        """Return the message at an offset, without its body. If this message was deleted or is damaged, return the next
        message that can be read.

        Returns None if the queue has no such message, and after DAMAGED_MAX damaged messages in a row.
        """
        for _ in range(DAMAGED_MAX + 1):
            read = partial(self._storage().fetch, [FetchRequest(topic, queue_id, offset, 1)], 1, 0.0)
            [result] = persist_until(time.monotonic() + READ_TIMEOUT_S, read)
            if result.count:
                [message] = read_messages(result.records, _FIRST, broker_name="", check_crc=False, keeps_bodies=False)
                if message.offset_message_id:
                    return message
            if result.next_offset == offset:
                break
            offset = result.next_offset
        return None


class BacklogWatch:
    """Measures the backlogs of a broker group's bounded topics, and sends their limits to the store. One thread calls
    `measure_backlogs`, at `interval_s`. A thread that has changed a bound calls it, too. Thread-safe.

    All of it is computed from the topics' attributes and the committed offsets. If the broker fails, the store keeps
    the last limits: producers may use the room that was left, and no more.
    """

    def __init__(
        self,
        broker_name: str,
        log: StateLog,
        storage: Callable[[], StorageClient],
        change: Callable[[Callable[[BrokerState], Change | None]], object],
    ) -> None:
        self._broker_name, self._log, self._storage, self._change = broker_name, log, storage, change
        self._backlogs: dict[str, tuple[BoundedTopic, TopicBacklog]] = {}
        self._skipped: dict[tuple[str, str], int] = {}
        self._told_s = -UNBOUNDED_INTERVAL_S
        self._measuring = threading.Lock()
        self._has_refused = False
        """True if a topic refused messages between the last two measurements: their producers may try again soon."""

    @property
    def interval_s(self) -> float:
        """The time in seconds between two measurements."""
        is_full = any(backlog.waiting for _, backlog in list(self._backlogs.values()))
        return FULL_INTERVAL_S if is_full or self._has_refused else BOUNDS_INTERVAL_S

    def measure_backlogs(self) -> None:
        """Measure the backlogs, send the limits to the store, and let groups skip messages if a topic's policy is drop.
        Raises RaymqError if the store does not answer."""
        with self._measuring:
            self._measure()

    def _measure(self) -> None:
        state = self._log.ready()
        bounds = bounded_topics(state, self._broker_name)
        if not bounds and not self._backlogs and time.monotonic() < self._told_s + UNBOUNDED_INTERVAL_S:
            return
        backlogs: list[TopicBacklog] = self._storage().control("limit_topics", bounds, timeout_s=READ_TIMEOUT_S)
        self._told_s = time.monotonic()
        before = {topic: backlog.refused for topic, (_, backlog) in self._backlogs.items()}
        self._has_refused = any(backlog.refused > before.get(backlog.topic, 0) for backlog in backlogs)
        self._backlogs = {bound.topic: (bound, backlog) for bound, backlog in zip(bounds, backlogs, strict=True)}
        for bound, backlog in list(self._backlogs.values()):
            kept = kept_messages(bound, backlog)
            if kept is not None:
                for group in bound.committed:
                    self._skip(group, backlog, kept)

    def _skip(self, group: str, backlog: TopicBacklog, kept: int) -> None:
        skipped = 0

        def decide(state: BrokerState) -> Change | None:
            nonlocal skipped
            change, skipped = decide_skip(state, group, backlog.topic, backlog.bounds, kept)
            return change

        self._change(decide)
        if skipped:
            key = (group, backlog.topic)
            self._skipped[key] = self._skipped.get(key, 0) + skipped
            logger.warning(
                "topic %s is full: group %s skips its %d oldest messages (backlog.policy is drop). The messages are "
                "still stored: `raymq group reset-offset` reads them again",
                *(backlog.topic, group, skipped),
            )

    def backlogs(self) -> list[tuple[BoundedTopic, TopicBacklog]]:
        """Return the bounds of the bounded topics with the backlogs that were measured last."""
        return list(self._backlogs.values())

    def skipped(self) -> dict[tuple[str, str], int]:
        """Return the number of messages that each group skipped in each topic since this broker was started, by group
        and topic."""
        return dict(self._skipped)

    def forget(self, topic: str | None = None, group: str | None = None) -> None:
        """Drop the figures of a deleted topic or group."""
        for key in [key for key in list(self._skipped) if group == key[0] or topic == key[1]]:
            self._skipped.pop(key, None)
