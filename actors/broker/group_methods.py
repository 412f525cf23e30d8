"""The consumer-group methods of the Broker actor: configuration, offsets, and messages that consumers send back.

Remote methods about consumer groups belong in this module; the decisions themselves are in actors.core.broker.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from actors.broker.master_store import MasterStore
from actors.broker.monitor import GROUP_CREATION, BrokerMonitor
from actors.broker.readings import take_readings
from actors.broker.state_log import DecidedChanges, StateLog
from actors.broker.stored_state import LEASE_CLOCK
from actors.core.broker.offsets import Owners, TopicCommits, is_dead
from actors.core.broker.send_back import ReturnedRecord, ReturnWriter, read_replayed, read_returned
from actors.core.broker.state import BrokerState, Change
from actors.core.broker.stats import GROUP_GET_NUMS, SNDBCK2DLQ_TIMES, SNDBCK_PUT_NUMS
from raymq.common.config.cluster import BrokerSettings
from raymq.common.errors import InvalidArgumentError, NoPermissionError, TopicNotExistError
from raymq.common.message import ConsumeFromWhere, MessageQueue
from raymq.common.names import RETRY_PREFIX, dlq_topic, retry_topic
from raymq.common.protocol.group import (
    CommitAnswer,
    GroupConfig,
    GroupQueueProgress,
    OffsetCommit,
    QueueOffset,
    SendBackAnswer,
    StartOffsetQuery,
)
from raymq.common.protocol.stats import BrokerReadings, GroupStats
from raymq.common.protocol.store import QueueBounds

APPEND_TIMEOUT_S: Final = 5.0

logger = logging.getLogger(__name__)


class _Commit:
    """A commit of offsets by a consumer group, and its outcome."""

    def __init__(self, group: str, commits: Mapping[str, Mapping[int, OffsetCommit]], owners: Owners) -> None:
        self.group, self.commits = group, commits
        self._owners = owners
        self.verdicts: dict[str, TopicCommits] = {}
        self.gone: Mapping[str, Sequence[int]] = {}
        """The queues, by topic, for which offsets are committed but which this broker group does not have."""
        self.before: dict[str, dict[int, int]] = {}
        """The previously committed offsets by topic and queue id; queues without a committed offset are
        missing."""
        self._stopped: dict[str, str] = {}
        """The topics that the group may not read now. Maps each topic to the reason."""

    def decide(self, state: BrokerState) -> list[Change]:
        """Check the group's offset commit against the broker's state, and return the records to store."""
        changes, self.verdicts, self.gone = state.decide_commits(self._owners, self.group, self.commits)
        self._stopped = {topic: reason for topic in self.verdicts if (reason := state.stop_reason(self.group, topic))}
        for topic, verdict in self.verdicts.items():
            known = state.offsets.of(self.group, topic)
            self.before[topic] = {q: known[q].queue_offset for q in verdict.offsets if q in known}
        return changes

    def answer(self, broker_name: str) -> CommitAnswer:
        """Return the broker's answer to an offset commit, after the commit's records are stored. A queue is reported
        only once. If the queue is fenced or missing, it is not also reported as stopped, even if the group may not read
        its topic."""

        def queue(topic: str, queue_id: int) -> MessageQueue:
            return MessageQueue(topic, broker_name, queue_id)

        fenced = frozenset(queue(topic, q) for topic, one in self.verdicts.items() for q in one.fenced)
        return CommitAnswer(
            {queue(topic, q): at for topic, one in self.verdicts.items() for q, at in one.reset.items()},
            fenced,
            gone := frozenset(queue(topic, q) for topic, queue_ids in self.gone.items() for q in queue_ids),
            {
                stopped: reason
                for topic, reason in self._stopped.items()
                for q in self.commits[topic]
                if (stopped := queue(topic, q)) not in fenced | gone
            },
        )


class GroupMethods(ABC):
    """The Broker's methods for consumer groups; the Broker actor inherits from this class. Thread-safe.

    Every change of a group is a record in the state log, and is durable on return.
    """

    def __init__(self, settings: BrokerSettings, log: StateLog, store: MasterStore, monitor: BrokerMonitor) -> None:
        self._settings, self._log, self._store, self._monitor = settings, log, store, monitor
        self._owners = Owners()
        """The newest owner (consumer) of each queue. Changed only while the lock of the state log is held."""
        self._returns = ReturnWriter(f"send-back-{secrets.token_hex(8)}", secrets.randbelow)
        self._returns_lock = threading.Lock()

    @abstractmethod
    def delete_topic(self, topic: str) -> None:
        """Remove a topic, its queues and the offsets committed in it. Raises TopicNotExistError if the topic does not
        exist."""

    @abstractmethod
    def _change(self, decide: Callable[[BrokerState], DecidedChanges]) -> bool:
        """Apply a change of consumer groups to the broker's state; the change is durable on return. Returns True if the
        change also altered topics and all NameServers have the altered topics."""

    def ensure_group(self, group: str) -> None:
        """Create a consumer group and its retry topic, if they do not exist yet.

        Raises IllegalNameError if the name is invalid, and GroupNotExistError if the group is new and
        auto_create_subscription_group is off.
        """
        auto_create = self._settings.options.auto_create_subscription_group
        if group in self._log.ready().groups:
            self._change(lambda state: state.decide_group(group, auto_create=auto_create))
            return
        with self._monitor.creations.measure(GROUP_CREATION):
            self._change(lambda state: state.decide_group(group, auto_create=auto_create))

    def group_config(self, group: str) -> GroupConfig:
        """Return a group's configuration in this broker group. Raises GroupNotExistError if the group does not
        exist."""
        return self._log.ready().require_group(group)

    def check_broadcast(self, group: str, topics: Sequence[str] = ()) -> None:
        """Raise NoPermissionError if a group may not consume in the mode BROADCASTING, or may not read one of `topics`.

        Raises nothing for a group that does not exist.
        """
        self._log.ready().check_broadcast(group, topics)

    def forbid_topic(self, group: str, topic: str, forbidden: bool) -> None:
        """Forbid a group to read a topic, or allow it again. Creates the group if it is new. Durable on return.

        Members that read the topic stop after their next commit, which may be empty. Every few seconds they ask the
        broker whether they may read again. Simple consumers receive no more messages of the topic. Repeating the call
        changes nothing. Raises IllegalNameError if the group's name is invalid.
        """
        self._change(lambda state: state.decide_forbid(group, topic, forbidden=forbidden))

    def forbidden_topics(self, group: str) -> list[str]:
        """Return the topics that a group may not read, sorted. Raises GroupNotExistError if the group does not
        exist."""
        state = self._log.ready()
        state.require_group(group)
        return sorted(state.forbidden.get(group, ()))

    def update_group(self, config: GroupConfig) -> None:
        """Set a group's configuration, and create the group if it is new. Raises IllegalNameError if the name is
        invalid, and InvalidArgumentError if a value is invalid."""
        self.update_groups([config])

    def update_groups(self, configs: Sequence[GroupConfig]) -> list[str]:
        """Set the configurations of several groups atomically: all of them, or none if an error is raised. See
        `update_group`.

        Returns the groups whose consume_enable has changed. The caller should notify their members, so that the members
        contact the broker (raymq.client.consumer.rebalance_client.offsets_reset).
        """
        switched: list[str] = []

        def decide(state: BrokerState) -> list[Change]:
            known = ((one, state.groups.get(one.group)) for one in configs)
            switched[:] = [one.group for one, old in known if old and old.consume_enable != one.consume_enable]
            return [change for one in configs for change in state.decide_group_config(one)]

        self._change(decide)
        return switched

    def delete_group(self, group: str, dead_letters: bool = False) -> None:
        """Delete a group, its offsets and its retry topic; with `dead_letters` also its dead-letter topic.

        Raises GroupNotExistError if the group does not exist.
        """
        self._change(lambda state: state.decide_group_delete(group))
        self._log.read(lambda state: self._owners.forget(group=group))
        self._monitor.forget(group=group)
        for topic in [retry_topic(group)] + ([dlq_topic(group)] if dead_letters else []):
            with suppress(TopicNotExistError):
                self.delete_topic(topic)

    def groups(self) -> list[str]:
        """Return the names of all groups of this broker group, sorted."""
        return sorted(self._log.ready().groups)

    def _commit_soon(
        self,
        group: str,
        commits: Mapping[str, Mapping[int, OffsetCommit]],
        answer: Callable[[CommitAnswer], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Commit offsets, by topic and queue id, without waiting. An offset is the offset of the next message to
        consume. Raises SystemBusyError if the broker is too busy.

        After the commit is durable or has failed, the writing thread calls `answer` or `fail`. Neither callback may
        block. The answer names the queues whose commits were rejected, and why. If the group's consume_enable is off,
        or the group may not read the topic, the commits are stored, and the answer names the queues as stopped. `fail`
        gets GroupNotExistError or InvalidArgumentError.
        """
        commit = _Commit(group, commits, self._owners)

        def done(_: bool, error: Exception | None) -> None:
            if error is not None:
                fail(error)
                return
            try:
                answer(self._committed(commit))
            # catch programming errors too: without a call of `fail`, the client would wait for an answer until its
            # timeout
            except Exception as failure:
                fail(failure)

        self._log.submit_with(commit.decide, done)

    def _committed(self, commit: _Commit) -> CommitAnswer:
        """Return the broker's answer to a request that committed offsets. Called after the commit is durable. Also
        counts the consumed messages."""
        group = commit.group
        for topic, verdict in commit.verdicts.items():
            got = sum(max(at - commit.before[topic].get(q, at), 0) for q, at in verdict.offsets.items())
            self._monitor.count(GROUP_GET_NUMS, f"{topic}@{group}", got)
        return commit.answer(self._settings.broker_name)

    def reset_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Set a group's committed offset in each given queue, forwards or backwards. Members receive the new offsets
        with their next commit or start_offset.

        Durable on return. Raises GroupNotExistError if the group does not exist, TopicNotExistError if the topic does
        not exist, and InvalidArgumentError if an offset is invalid.
        """
        self._change(lambda state: state.decide_reset(group, topic, offsets))

    def delete_offsets(self, group: str, topics: Sequence[str]) -> list[str]:
        """Delete a group's committed offsets in topics, as if the group had never consumed them. Durable on return.

        Returns the topics in which the group had committed offsets in this broker group, sorted. Raises
        GroupNotExistError if the group does not exist.
        """
        dropped: list[str] = []

        def decide(state: BrokerState) -> list[Change]:
            change = state.decide_offsets_delete(group, topics)
            dropped[:] = [] if change is None else change["topics"]
            return [] if change is None else [change]

        self._change(decide)
        return dropped

    def _sweep_offsets(self) -> None:
        """Drop committed offsets of groups in topics to which no consumer of the group subscribes, if the group cannot
        use these offsets again.

        Groups without consumers keep their offsets.
        """
        subscriptions = self._subscriptions()
        if subscriptions is None:
            return
        for group, topics in self._log.ready().left_topics(subscriptions).items():
            dead = [topic for topic in topics if self._is_dead(group, topic)]
            if dead and (dropped := self.delete_offsets(group, dead)):
                logger.info(
                    "broker %s: deleted the offsets of group %s in topic %s, because the group no longer "
                    "subscribes to it",
                    *(self._settings.broker_name, group, ", ".join(dropped)),
                )

    def _is_dead(self, group: str, topic: str) -> bool:
        committed = self._log.ready().offsets.committed(group, topic)
        bounds = self._store.bounds_of_queues([(topic, queue_id) for queue_id in committed])
        return is_dead(committed, {q: one.min_offset for q, one in zip(committed, bounds, strict=True)})

    @abstractmethod
    def _subscriptions(self) -> Mapping[str, Collection[str]] | None:
        """Return, for each group, the topics to which its consumers subscribe. Returns None if some consumers may not
        have sent a heartbeat yet."""

    def committed_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Return the group's committed offset in each queue of a topic, by queue id. Queues without a committed offset
        are absent."""
        return self._log.ready().offsets.committed(group, topic)

    def start_offset(self, group: str, queue: MessageQueue, query: StartOffsetQuery, generation: int) -> QueueOffset:
        """Return the offset at which the group starts to read one queue; see `start_offsets`.

        Raises TopicNotExistError or GroupNotExistError if the topic or the group does not exist, and
        InvalidArgumentError if an argument is invalid. Raises NoPermissionError if the group's consume_enable is off,
        if nobody may read the topic, or if this group may not read it.
        """
        self._log.ready().check_readable(group, queue.topic)
        return self._start_offsets(group, {queue.topic: {queue.queue_id: generation}}, query)[queue.topic][
            queue.queue_id
        ]

    def start_offsets(
        self, group: str, generations: Mapping[str, Mapping[int, int]], query: StartOffsetQuery
    ) -> dict[str, dict[int, QueueOffset]]:
        """Return the offsets at which the group starts to read queues (spec/messaging.md §2.9, §5.4), by topic and
        queue id.

        The start offset of a queue is its committed offset, or else the offset that `query` selects. A member of the
        group passes the generation of its assignment of each queue. If the group has committed no offset in a queue
        yet, this call commits the start offset durably, so that no message is skipped if the member crashes at once.
        From then on commits of older generations are fenced. With generation 0 the call commits nothing.

        A queue is young while its first message is still in memory. In a young queue, CONSUME_FROM_LAST_OFFSET starts
        at 0, but CONSUME_FROM_END does not. A retry topic always starts at its first message.

        Topics that cannot be read are left out; `start_offset` raises the reason. Raises GroupNotExistError if the
        group does not exist.
        """
        state = self._log.ready()
        readable = {}
        for topic, by_queue in generations.items():
            with suppress(TopicNotExistError, NoPermissionError, InvalidArgumentError):
                state.check_readable(group, topic)
                state.check_queues(topic, by_queue)
                readable[topic] = by_queue
        return self._start_offsets(group, readable, query)

    def _start_offsets(
        self, group: str, generations: Mapping[str, Mapping[int, int]], query: StartOffsetQuery
    ) -> dict[str, dict[int, QueueOffset]]:
        # Read the queues' first offsets from the store before locking the broker's state. This read may take long, for
        # example if another replica becomes the master.
        first = self._first_offsets(group, generations, query)

        def decide(state: BrokerState) -> list[Change]:
            changes = []
            for topic, by_queue in generations.items():
                starting = {q: first[topic][q] for q, generation in by_queue.items() if generation}
                change = state.decide_starts(group, topic, starting)
                changes += [] if change is None else [change]
                for queue_id in starting:
                    self._owners.note(group, topic, queue_id, by_queue[queue_id])
            return changes

        def committed(state: BrokerState) -> dict[str, dict[int, QueueOffset]]:
            table = state.offsets
            return {
                topic: {
                    q: table.get(group, topic, q) or QueueOffset(offset, table.version(group, topic, q))
                    for q, offset in offsets.items()
                }
                for topic, offsets in first.items()
            }

        if any(generation for by_queue in generations.values() for generation in by_queue.values()):
            self._change(decide)
        return self._log.read(committed)

    def _first_offsets(
        self, group: str, queues: Mapping[str, Iterable[int]], query: StartOffsetQuery
    ) -> dict[str, dict[int, int]]:
        """Return, by topic and queue id, the offsets that `query` selects as the group's start offsets. If the group
        has already committed an offset in a queue, the queue's value is 0. This value is not used, because the group
        continues at its committed offset."""
        known = self._log.ready().offsets
        first = {topic: dict.fromkeys(queue_ids, 0) for topic, queue_ids in queues.items()}
        new = [(topic, q) for topic, by_queue in first.items() for q in by_queue if not known.get(group, topic, q)]
        for (topic, queue_id), bounds in zip(new, self._store.bounds_of_queues(new), strict=True):
            first[topic][queue_id] = self._first_offset(topic, queue_id, bounds, query)
        return first

    def _first_offset(self, topic: str, queue_id: int, bounds: QueueBounds, query: StartOffsetQuery) -> int:
        if query.where is ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET or topic.startswith(RETRY_PREFIX):
            return bounds.min_offset
        if query.where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
            return self._store.call(
                lambda storage, left_s: storage.offset_by_time(topic, queue_id, query.timestamp_ms, left_s)
            )
        young = bounds.min_offset == 0 and bounds.first_in_memory == 0
        at_end = query.where is ConsumeFromWhere.CONSUME_FROM_END or not young
        return bounds.max_offset if at_end else 0

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(topic, self._settings.broker_name, queue_id)

    def send_back(
        self,
        group: str,
        records: bytes,
        *,
        delay_level: int = 0,
        max_reconsume_times: int = -1,
        reason: str = "",
        failure: str = "",
        attempts: int = 0,
    ) -> SendBackAnswer:
        """Take back messages that the group could not consume. `records`: the records of these messages, unchanged and
        concatenated.

        Each message is delivered again from `%RETRY%group` after `delay_level`. With `delay_level` 0 the group's
        retry_intervals_s count. The message is stored in `%DLQ%group` instead (spec/messaging.md §5.9) in three
        cases: after `max_reconsume_times` returns (negative: the group's retry_max_times), with a negative
        `delay_level`, or with a `reason`. `reason` states why the messages cannot be read. `failure`: why the messages
        failed; a dead letter stores this text. `attempts`: how often the messages were delivered, if the consumer
        counts deliveries itself.

        Durable on return. A repeated call may return the messages twice. Raises GroupNotExistError if the group does
        not exist, InvalidArgumentError if a record is damaged, and MessageIllegalError if the properties are too long.
        """
        config = self._log.ready().require_group(group)
        returned, answer = read_returned(
            records,
            config,
            delay_level=delay_level,
            max_reconsume_times=max_reconsume_times,
            now_ms=time.time_ns() // 1_000_000,
            reason=reason,
            failure=failure,
            attempts=attempts,
        )
        topics = ([retry_topic(group)] if answer.retried else []) + ([dlq_topic(group)] if answer.dead else [])
        for topic in topics:
            nums = config.retry_queue_nums if topic == retry_topic(group) else 1
            self._change(partial(BrokerState.decide_group_topic, topic=topic, queue_nums=nums))
        self._store_returned(config, returned)
        for item in returned:
            self._monitor.count(SNDBCK_PUT_NUMS, f"{item.parts.topic}@{group}", 1)
            if item.level is None:
                self._monitor.count(SNDBCK2DLQ_TIMES, f"{item.parts.topic}@{group}", 1)
        return answer

    def replay(self, group: str, records: bytes) -> None:
        """Let the group consume dead letters again, as if for the first time. `records`: records of `%DLQ%group`,
        concatenated.

        Durable on return. A repeated call may replay the messages twice. Raises the errors of `send_back`.
        """
        config = self._log.ready().require_group(group)
        self._store_returned(config, read_replayed(records))

    def _store_returned(self, config: GroupConfig, returned: Sequence[ReturnedRecord]) -> None:
        with self._returns_lock:
            self._returns.store_host_ipv6 = ":" in self._store.storage.describe().store_host[0]
            batches = self._returns.batches(config.group, returned, config.retry_queue_nums)
            if batches:
                self._store.call(lambda storage, left_s: storage.append(batches, min(left_s, APPEND_TIMEOUT_S)))

    def group_topics(self, group: str) -> list[str]:
        """Return the topics in which the consumer group has committed offsets in this broker group. Raises
        GroupNotExistError if the group does not exist."""
        state = self._log.ready()
        state.require_group(group)
        return state.offsets.topics(group)

    def group_progress(self, group: str, topic: str) -> list[GroupQueueProgress]:
        """Return the group's committed offset, its lag and the queue's bounds for each queue of a topic. Raises
        TopicNotExistError if the topic does not exist."""
        state = self._log.ready()
        committed = state.offsets.committed(group, topic)
        in_flight = self._log.read(lambda state: state.pop.in_flight(group, topic, LEASE_CLOCK.now_ms()))
        progress = []
        queues = [(topic, queue_id) for queue_id in range(state.require_topic(topic).read_queue_nums)]
        for (_, queue_id), bounds in zip(queues, self._store.bounds_of_queues(queues), strict=True):
            offset = committed.get(queue_id)
            following = max(offset or 0, bounds.min_offset)
            message = self._monitor.message_at(topic, queue_id, following) if following < bounds.max_offset else None
            lag_ms = 0 if message is None else max(time.time_ns() // 1_000_000 - message.store_timestamp_ms, 0)
            queue = self._queue(topic, queue_id)
            places = (offset, bounds.min_offset, bounds.max_offset)
            progress.append(GroupQueueProgress(group, queue, *places, lag_ms, in_flight.get(queue_id, 0)))
        return progress

    def readings(self, with_pairs: bool = True) -> BrokerReadings:
        """Return the metrics of all topics and groups, with only a few calls to the store.

        `with_pairs`: also return the progress of each group in each topic.
        """
        state, monitor = self._log.ready(), self._monitor
        return take_readings(state, self._store, monitor.consumed(), monitor.topic_stats, with_pairs=with_pairs)

    def topic_offsets(self, topic: str) -> dict[str, dict[int, int]]:
        """Return the offsets that groups have committed in a topic, by group and queue id."""
        state = self._log.ready()
        groups = [group for name, group in list(state.offsets.tables) if name == topic]
        return {group: state.offsets.committed(group, topic) for group in sorted(groups)}

    def group_stats(self, group: str) -> dict[str, GroupStats]:
        """Return how many messages a group consumed and sent back, by topic. Raises GroupNotExistError if the group
        does not exist."""
        self._log.ready().require_group(group)
        return self._monitor.group_stats(group)
