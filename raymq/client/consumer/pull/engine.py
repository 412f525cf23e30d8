"""PullEngine is the pull consumer that PullConsumer (blocking) and AsyncPullConsumer (asyncio) share.

    GroupMember, OffsetCommitter    the group and the brokers: queues are granted and revoked, offsets are committed
    QueueReader                     records from mapped files on this node, or by fetches
    Polls                           a poll: peek → decode → take

SubscriptionState makes all decisions and has all state about queues, under one lock that is never held during a remote
call. Brokers keep the committed offsets. All other state is lost when the process ends. Messages that polls returned
but that were not committed are then delivered again.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from raymq.client.consumer.assignment.group_member import GroupMember
from raymq.client.consumer.assignment.offset_committer import CommitThreads, OffsetCommitter, RemoteBrokerOffsetStore
from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.client.consumer.pull.polls import LostMessages, Polls
from raymq.client.consumer.pull.queue_reader import QueueReader
from raymq.client.consumer.pull.running import count_fetched, queue_state, running_info
from raymq.client.consumer.pull.settings import PullSettings
from raymq.client.consumer.pull.subscription_state import SubscriptionState
from raymq.client.consumer.queue_lookup import QueueLookup, QueueWatch
from raymq.client.consumer.ready_messages import with_ready
from raymq.client.consumer.rebalance_client import RebalanceClient
from raymq.client.consumer.send_back import send_back_message
from raymq.client.consumer.subscription import Expression, Expressions, Subscription
from raymq.client.predicates.source import GroupPredicate
from raymq.common.errors import (
    ClientStateError,
    DataLossError,
    InvalidArgumentError,
    OffsetOutOfRangeError,
    PredicateFailedError,
)
from raymq.common.members.questions import DirectConsumption, RunningInfo, thread_stacks
from raymq.common.message import MessageExt, MessageQueue
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.protocol.clients import ConsumerData
from raymq.common.protocol.group import QueueOffset
from raymq.remoting.route_cache import ROUTE_TIMEOUT_S, RouteCache
from raymq.remoting.storage_clients import StorageClients
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES, ConsumerFigures
from raymq.telemetry.trace.deliveries import DeliveryTrace
from raymq.telemetry.trace.spans import Spans

GROUP_CALL_TIMEOUT_S: Final = 20.0
"""Timeout in s of a call to a server about offsets, if the program's own thread makes the call."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PullEngine:
    """One pull consumer. Thread-safe. After `close`, every method but `close` raises ClientStateError.

    `names` adds the namespace to the names of topics and groups in arguments, and removes it from returned names.
    Internally, all names are stored names, such as `settings.group`. `node_id` is the Ray node on which this process
    runs; it is used to allocate queues by machine. `announce` is called with the consumer's description for
    administrators when its subscriptions change. `on_close` is called at the end of `close`.
    """

    def __init__(
        self,
        settings: PullSettings,
        *,
        routes: RouteCache,
        storages: StorageClients,
        rebalance: RebalanceClient,
        commits: CommitThreads,
        node_id: str,
        names: Namespace = NO_NAMESPACE,
        announce: Callable[[PullEngine, ConsumerData], None],
        on_close: Callable[[PullEngine], None],
        trace: DeliveryTrace | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.settings = settings
        self.on_wakeup: Callable[[], None] = lambda: None
        """Function that is called, from any thread, when a waiting poll should check for records again."""
        self._announce = announce
        self._spans = spans
        self._on_close = on_close
        self._routes, self._storages = routes, storages
        self.names = names
        self._lookup = QueueLookup(routes, storages, names)
        self._watch = QueueWatch(self._lookup.queues, settings.queue_check_interval_s, f"queues-{settings.group}")
        self._lock = threading.Lock()
        """Lock that guards `_core` and `_lost`. No thread holds it during a remote call."""
        self._core = SubscriptionState(settings, time.monotonic())
        self._change_lock = threading.Lock()
        """Lock that `subscribe` and `assign` hold during their remote calls, so that they run one after
        another."""
        self._mode = ""
        """Either "subscribe" or "assign", whichever method was called first: a consumer can use only one of them. Empty
        before the first call."""
        self._closing = threading.Event()
        self._lost = LostMessages()
        self._reader = QueueReader(
            self._core,
            self._lock,
            routes,
            storages,
            wake=self._wake,
            lost=self._lose,
            read_on=self._lost.forget,
            count=partial(count_fetched, settings.group),
            predicate=self._predicate,
        )
        self._offsets = GroupOffsets(settings.group)
        self._name = name = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self._committer = OffsetCommitter(
            self._core,
            self._lock,
            name=name,
            store=RemoteBrokerOffsetStore(self._offsets, settings.start),
            threads=commits,
            interval_s=settings.auto_commit_interval_s if settings.auto_commit else None,
            on_started=self._reader.read_more,
            on_committed=self._release,
        )
        self._member = GroupMember(
            self._core,
            self._lock,
            rebalance,
            group=settings.group,
            name=name,
            node_id=node_id,
            allocation=settings.allocation,
            on_assigned=self._committer.wake,
            on_reset=self._committer.ask_about_resets,
            expressions=lambda: self._core.expressions,
        )
        self.polls = Polls(
            self._core,
            self._lock,
            settings,
            names,
            reader=self._reader,
            member=self._member,
            committer=self._committer,
            lost=self._lost,
            closing=self._closing,
            check_open=self.check_open,
            assigns=lambda: self._mode == "assign",
            wake=self._wake,
            trace=trace,
            spans=spans,
        )
        CLIENT_FIGURES.add(self, self._figures)

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    @property
    def lookup(self) -> QueueLookup:
        """Return the object that looks up the bounds and offsets of any queue."""
        self.check_open()
        return self._lookup

    @property
    def watch(self) -> QueueWatch:
        """The object that checks topics for changed queues and calls the program's listeners."""
        self.check_open()
        return self._watch

    # Methods that choose the topics or queues to consume

    def subscribe(self, topic: str, expression: Expression | None) -> None:
        """Subscribe to the topic, and share its queues with the group. Blocks for remote calls; raises the errors of
        PullConsumer.subscribe."""
        topic = self.names.wrap(topic)
        subscription = Subscription.parse(topic, expression)
        with self._change_lock:
            self._check_mode("subscribe")
            self._member.check({topic: subscription.description})
            route = self._routes.wait(topic, ROUTE_TIMEOUT_S)
            self._committer.prepare(route.brokers, GROUP_CALL_TIMEOUT_S)
            with self._lock:
                self._core.subscribe(subscription, has_levels=route.attributes.has_levels)
            if not self._mode:
                try:
                    self._member.join()
                except BaseException:  # the next call of `subscribe` tries again to join
                    with self._lock:
                        self._core.unsubscribe(topic, time.monotonic())
                    raise
                self._mode = "subscribe"
            self._member.beat_soon()
            self._announce_subscriptions()

    def unsubscribe(self, topic: str) -> None:
        """Stop returning messages of a topic. The topic's queues are released when the program polls again."""
        self.check_open()
        stored = self.names.wrap(topic)
        with self._lock:
            if self._mode != "subscribe" or stored not in self._core.expressions:
                raise ClientStateError(f"this consumer does not subscribe to topic {topic!r}")
            self._core.unsubscribe(stored, time.monotonic())
        self._announce_subscriptions()

    def assign(self, queues: Iterable[MessageQueue], expression: Expressions | None) -> None:
        """Consume exactly these queues, without a group. Blocks for remote calls; raises the errors of
        PullConsumer.assign."""
        wanted = sorted({self.lookup.check(queue) for queue in queues})
        texts: Mapping[str, Any] = dict.fromkeys({q.topic for q in wanted}, expression)
        if isinstance(expression, Mapping):
            texts = {self.names.wrap(topic): text for topic, text in expression.items()}
        subscriptions = {queue.topic: Subscription.parse(queue.topic, texts.get(queue.topic)) for queue in wanted}
        with self._change_lock:
            self._check_mode("assign")
            self._committer.prepare({queue.broker_name for queue in wanted}, GROUP_CALL_TIMEOUT_S)
            starts = self._start_offsets(wanted)
            leveled = {
                topic for topic in subscriptions if self._routes.wait(topic, ROUTE_TIMEOUT_S).attributes.has_levels
            }
            if self.settings.auto_commit:
                self._commit(finished=True)
            self._mode = "assign"
            with self._lock:
                self._core.assign(subscriptions, starts, time.monotonic(), leveled)
            self._committer.wake()
            self._announce_subscriptions()
        self._reader.read_more()

    def assignment(self) -> list[MessageQueue]:
        return self.names.shown_queues(self._with_core(lambda core: core.assigned_queues))

    def _announce_subscriptions(self) -> None:
        with self._lock:
            subscriptions = self._core.expressions
        where = self.settings.start.where
        data = ConsumerData(self.settings.group, "PULL", subscriptions, consume_from=where, member=self._name)
        self._announce(self, data)

    # Methods that answer administrators' queries

    def running_info(self, client_id: str, host: str, *, stacks: bool) -> RunningInfo:
        """Return the consumer's state for administrators (raymq.common.members.questions.Answers)."""
        with self._lock:
            info = running_info(self._core, self.settings.group, client_id, host, self._name)
            troubles = [self._member.refusal, *self._core.forbidden.values()]
        trouble = next((str(error) for error in troubles if error is not None), "")
        return replace(info, trouble=trouble, stacks=thread_stacks() if stacks else ())

    def consume_directly(self, client_id: str, record: bytes, broker_name: str) -> DirectConsumption:
        """Raise InvalidArgumentError, because a pull consumer has no listener."""
        raise InvalidArgumentError(
            f"member {self._name} of group {self.settings.group!r} is a pull consumer, which has no listener; "
            "`raymq replay` delivers the message to the group again"
        )

    def _check_mode(self, mode: str) -> None:
        self.check_open()
        if self._mode not in ("", mode):
            raise ClientStateError(
                f"this consumer uses {self._mode}, so it cannot use {mode}; create another consumer for {mode}"
            )

    # Methods that read and change positions in queues

    def position(self, queue: MessageQueue) -> int:
        return self._with_core(lambda core: core.get(self.names.queue(queue)).position)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        self._with_core(lambda core: core.pause([self.names.queue(queue) for queue in queues]))

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        self._with_core(lambda core: core.resume([self.names.queue(queue) for queue in queues]))
        self._reader.read_more()

    def paused(self) -> list[MessageQueue]:
        return self.names.shown_queues(self._with_core(lambda core: core.paused))

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue reading a queue at `offset`. Blocks for a remote call. Raises OffsetOutOfRangeError if the queue
        does not hold `offset`."""
        # called only for its check: it raises ClientStateError, before any remote call, if the consumer does not hold
        # the queue
        self.position(queue)
        bounds = self._lookup.bounds(queue)
        if not bounds.min_offset <= offset <= bounds.max_offset:
            raise OffsetOutOfRangeError(str(queue), offset, bounds.min_offset, bounds.max_offset)
        self._seek(queue, offset)

    def seek_to_begin(self, queue: MessageQueue) -> None:
        self.position(queue)
        self._seek(queue, self._lookup.bounds(queue).min_offset)

    def seek_to_end(self, queue: MessageQueue) -> None:
        self.position(queue)
        self._seek(queue, self._lookup.bounds(queue).max_offset)

    def lag(self) -> dict[MessageQueue, int]:
        """Return the number of messages after this consumer's position, for each assigned queue. Blocks for one remote
        call per queue."""
        ends = self.lookup.end_offsets(self.assignment())
        with self._lock:
            assigned, stored = set(self._core.assigned_queues), self.names.queue
            return {
                queue: max(0, end - self._core.get(stored(queue)).position)
                for queue, end in ends.items()
                if stored(queue) in assigned
            }

    def _seek(self, queue: MessageQueue, offset: int) -> None:
        self._with_core(lambda core: core.seek(self.names.queue(queue), offset))
        self._reader.read_more()

    # Methods that commit offsets

    def commit(self, offsets: Mapping[MessageQueue, int] | None) -> dict[MessageQueue, int]:
        """Commit all messages that polls returned, or the given offsets. Blocks for remote calls; durable on
        return."""
        self.check_open()
        if offsets is not None:
            if self.settings.acknowledge_each:
                raise ClientStateError(
                    "this consumer acknowledges each message: call acknowledge(...), not commit(offsets)"
                )
            stored = {self.names.queue(queue): at for queue, at in offsets.items()}
            self._with_core(lambda core: core.finish(stored))
        began_ns = time.time_ns()
        committed = self._commit(finished=offsets is None)
        if self._spans is not None:
            self._spans.settled(self.settings.group, sorted({queue.topic for queue in committed}), began_ns)
        return {self.names.shown_queue(queue): offset for queue, offset in committed.items()}

    def acknowledge(self, messages: Iterable[MessageExt]) -> None:
        """Mark messages as finished. A later automatic commit commits their offsets. Does not block."""
        if not self.settings.acknowledge_each:
            raise ClientStateError(
                "this consumer does not acknowledge each message: create it with acknowledge_each=True to "
                "call acknowledge(...)"
            )
        offsets: dict[MessageQueue, list[int]] = {}
        for message in messages:
            offsets.setdefault(self.names.queue(message.queue), []).append(message.queue_offset)
        with self._lock:
            self.check_open()
            self._core.acknowledge(offsets)
            leaves, commits = self._core.leaving, self._core.has_uncommitted
        if commits:
            self._committer.wake()
        if leaves:
            self._member.release()

    def send_back(self, message: MessageExt, delay_level: int, max_reconsume_times: int) -> None:
        """Redeliver a message to the group, or move it to the dead letters. Blocks for remote calls."""
        self.check_open()
        queue = self.names.queue(message.queue)
        retries = {"delay_level": delay_level, "max_reconsume_times": max_reconsume_times}
        send_back_message(self.settings.group, message, queue, self._routes, self._storages, **retries)

    def committed(self, queue: MessageQueue) -> int | None:
        """Return the group's committed offset of a queue; None if the group has committed no offset. Blocks for a
        remote call."""
        return self._offsets.committed_offset(self.lookup.check(queue), GROUP_CALL_TIMEOUT_S)

    def _commit(self, *, finished: bool) -> dict[MessageQueue, int]:
        """Commit the finished messages, release revoked queues, and return the committed offsets. `finished`: True if
        the program has finished with all messages that polls returned."""
        self._member.fence()
        self.polls.settle_abandoned()
        if finished:
            with self._lock:
                self._core.finish_all()
        committed = self._committer.commit(GROUP_CALL_TIMEOUT_S)
        self._member.release()
        return committed

    def _release(self) -> None:
        self._member.release()

    def _start_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, QueueOffset]:
        """Return the start offsets of queues that are assigned without a group."""
        generations = dict.fromkeys(queues, 0)
        starts = self._offsets.start_offsets(generations, self.settings.start, GROUP_CALL_TIMEOUT_S)
        # For the remaining queues, the call for all queues has returned neither an offset nor a reason. A call for a
        # single queue returns its offset, or raises the reason.
        for queue in generations.keys() - starts.keys():
            starts[queue] = self._offsets.start_offset(queue, self.settings.start, 0, GROUP_CALL_TIMEOUT_S)
        return starts

    # Methods that read records

    def _wake(self) -> None:
        self.on_wakeup()

    def _predicate(self, queue: MessageQueue) -> GroupPredicate | None:
        with self._lock:
            predicate = self._core.predicate(queue.topic)
        return None if predicate is None else GroupPredicate(self.settings.group, predicate)

    def _lose(self, queue: MessageQueue, offset: int, error: DataLossError | PredicateFailedError) -> None:
        if isinstance(error, DataLossError):
            error = DataLossError(
                f"the message at offset {offset} of queue {queue} cannot be read: {error}; restore the file, or "
                "seek past the lost messages (`raymq topic describe` shows the queue's offsets)"
            )
        with self._lock:
            if not self._core.reads(queue, offset):
                return  # ignore the loss: the queue's position has changed since the fetch was sent
            self._lost.add(queue, offset, error)
        self._wake()

    def _figures(self) -> list[ConsumerFigures]:
        with self._lock:
            queues = [self._core.get(queue) for queue in self._core.assigned_queues]
            states = [queue_state(self.settings.group, queue) for queue in queues]
        return with_ready(states, self._routes, self._storages)

    # Methods that close the consumer

    def close(self, *, finished: bool = True) -> None:
        """Close the consumer: commit if auto-commit is on, leave the group and stop the threads. `finished`: True if
        the program has finished with the messages of the last poll. Idempotent. An error of the commit is raised after
        everything is closed."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self._wake()
        self.polls.close()
        polling = self.polls.end_abandoned()
        CLIENT_FIGURES.remove(self)
        try:
            if self.settings.auto_commit:
                self._commit(finished=finished)
        finally:
            self._reader.stop()
            if not polling:  # a running poll still uses the mapped files, and closes them when it ends
                self._reader.close_files()
            self._watch.stop()
            self._member.leave()
            self._committer.close()
            self._on_close(self)

    def check_open(self) -> None:
        """Raise ClientStateError if the consumer was closed."""
        if self._closing.is_set():
            raise ClientStateError("this consumer is closed; create a new consumer with client.pull_consumer(...)")

    def _with_core(self, question: Callable[[SubscriptionState], T]) -> T:
        self.check_open()
        with self._lock:
            return question(self._core)
