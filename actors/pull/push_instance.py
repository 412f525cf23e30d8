"""One push-consumer instance at a Pull actor: its queues, its group membership, its offsets, and its feed (the delivery
of tasks to its Listener).

    SharedFetcher → ProcessQueues (actors.core.consume) → ListenerFeed → Listener
    GroupMember: heartbeats, grants, revocations           OffsetCommitter: start offsets, commits

An instance has no thread of its own: the threads of PullServices work for all instances. An error in one instance does
not affect the other instances. The states of an instance:

    hosted → stopping: everything is revoked, finished, committed → left the group → ended
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from actors.core.consume.process_queue import ProcessQueue
from actors.core.consume.records_in_place import RecordsInPlace, TaskRecords
from actors.pull.broadcast_member import BroadcastMember
from actors.pull.instance_state import InstanceState
from actors.pull.listener_feed import ListenerFeed
from actors.pull.local_offsets import LocalFileOffsetStore
from actors.pull.running import (
    DIRECT_TIMEOUT_S,
    STACKS_TIMEOUT_S,
    call_listener,
    count_delivered,
    queue_states,
    running_info,
)
from actors.pull.services import InstanceQueue, PullServices
from raymq.client.consumer.assignment.group_member import GroupMember
from raymq.client.consumer.assignment.offset_committer import OffsetCommitter, OffsetStore, RemoteBrokerOffsetStore
from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.client.consumer.push.hosting import HostAnswer, Hosting
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.ready_messages import with_ready
from raymq.client.consumer.repair_wait import REPORT_TIMEOUT_S, RepairWait
from raymq.client.predicates.source import GroupPredicate
from raymq.common.errors import DataLossError, InvalidArgumentError, PredicateFailedError, RaymqError
from raymq.common.identity import Identity
from raymq.common.members.questions import DirectConsumption, RunningInfo
from raymq.common.message import MessageQueue, PullStatus
from raymq.common.parallel import submit
from raymq.common.protocol.clients import ConsumerData
from raymq.common.protocol.store import FetchRequest, FetchResult, QueuePosition, RepairState
from raymq.records.format.decode import decode_record
from raymq.records.format.layout import RecordError
from raymq.records.format.memory_records import LocatedRecords, MemoryRecords
from raymq.remoting.access.users import INTERNAL_USER
from raymq.remoting.actor_ref import HandleRef
from raymq.remoting.storage_client import FoundInPlace, StorageClient
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES, ConsumerFigures

FINISH_TIMEOUT_S: Final = 30.0
"""Maximum time, in seconds, that a stopping push-consumer instance waits for its listener and its commits."""
SEND_BACK_TIMEOUT_S: Final = 5.0
REPAIRED_RECORD_MAX_BYTES: Final = 8 << 20
"""Maximum number of bytes of a fetch that reads one repaired record."""
COMMIT_INTERVAL_S: Final = 0.1
"""Interval, in seconds, at which a push-consumer instance commits finished messages. One commit covers many
messages."""

logger = logging.getLogger(__name__)


class PushInstance:
    """One push-consumer instance. The Pull actor creates it when the instance's Listener calls the Pull actor. `key`
    distinguishes the instance from other instances of the same name."""

    def __init__(self, name: str, key: str, settings: PushSettings, services: PullServices) -> None:
        self.name, self.key = name, key
        self.ended = threading.Event()
        """Event that is set when the push-consumer instance has left its group and has stopped all work."""
        self.broadcast: BroadcastMember | None = None
        """The push-consumer instance's queue assignment in BROADCASTING; None in CLUSTERING."""
        self._settings, self._services = settings, services
        self._state = state = InstanceState(name, settings)
        self._finish_until_s = float("inf")
        self._ending = False
        self._keys: dict[MessageQueue, InstanceQueue] = {}
        self._listener: HandleRef | None = None
        """The handle of the Listener actor; None before the Listener's first call."""
        offsets = GroupOffsets(settings.group)
        store: OffsetStore = LocalFileOffsetStore(name, settings, offsets, services.creations)
        if settings.clustering:
            store = RemoteBrokerOffsetStore(offsets, settings.start)
        self._committer = OffsetCommitter(
            state.core,
            state.lock,
            name=name,
            store=store,
            threads=services.commits,
            interval_s=COMMIT_INTERVAL_S,
            on_started=lambda: services.fetcher.changed(self),
            on_committed=self._committed,
        )
        self._member: GroupMember | BroadcastMember
        if settings.clustering:
            self._member = GroupMember(
                state.core,
                state.lock,
                services.rebalance,
                group=settings.group,
                name=name,
                node_id=services.node_id,
                allocation=settings.allocation,
                on_assigned=self._committer.wake,
                on_reset=self._committer.ask_about_resets,
                expressions=lambda: settings.expressions,
            )
        else:
            self._member = self.broadcast = BroadcastMember(state, services.routes)
        self._feed = ListenerFeed(
            state,
            send_back=self._send_back,
            senders=services.calls,
            before_delivery=self._member.fence,
            on_gone=self._listener_gone,
            wake=services.feeds.wake,
            epoch=services.next_epoch(),
        )
        self._repairs = RepairWait(self._report_damage, lambda queue: self._feed.wake())
        state.core.service.is_mending = lambda queue, offset: self._repairs.meet(queue, (offset,)) is not None
        state.on_fetchable = lambda: services.fetcher.changed(self)
        state.on_committable = self._commit

    def start(self) -> None:
        """Join the group, and start fetching and delivering."""
        services = self._services
        services.fetcher.add(self)
        services.feeds.add(self._feed)
        services.heartbeats.set_consumer(self, consumer_data(self._settings, self.name))
        CLIENT_FIGURES.add(self, self._figures)
        self._member.join()

    def hosted(self, call: Hosting) -> HostAnswer:
        """Record a call of the Listener, the actor that runs the user's listener, and return the answer to the
        call."""
        key = call.instance.call_key
        # Never sign calls to the Listener with the internal key. A user's process states the name of its Listener
        # actor. With the name of another actor, it could cause a call to that actor with raymq's own signature.
        listener = HandleRef(self.name, call.listener, Identity(INTERNAL_USER, key) if key else None)
        keep = self._feed.heard(listener, call.life, call.broken, call.kept)  # type: ignore[arg-type]  # what `keep` was given
        self._listener = listener
        return HostAnswer(True, keep, CLIENT_FIGURES.options)

    # Methods for queries of administrators

    def running_info(self, client_id: str, host: str, *, stacks: bool) -> RunningInfo:
        """Return a description of the running push-consumer instance for an administrator
        (raymq.common.members.questions.Answers).

        `stacks`: include the stacks of the threads in the listener's process.
        """
        info = running_info(self.status(), self._settings, client_id, host)
        if not stacks:
            return info
        try:
            pid, threads = call_listener(self._listener, "stacks", timeout_s=STACKS_TIMEOUT_S)
        # If only the listener's process does not answer, return the description without its stacks, and with the
        # error's text.
        except RaymqError as error:
            return replace(info, trouble=info.trouble or str(error))
        return replace(info, listener_pid=pid, stacks=threads)

    def consume_directly(self, client_id: str, record: bytes, broker_name: str) -> DirectConsumption:
        """Call the listener with one message that an administrator has chosen. The message is neither committed nor
        sent back.

        Raises RequestTimeoutError if the listener does not return within DIRECT_TIMEOUT_S. The listener continues to
        process the message.
        """
        try:
            message = decode_record(record, broker_name=broker_name)
        except RecordError as error:
            raise InvalidArgumentError(f"the message cannot be read: {error}") from None
        outcome = call_listener(self._listener, "consume_directly", message, timeout_s=DIRECT_TIMEOUT_S)
        return DirectConsumption(client_id, self.name, *outcome)

    # Methods that the user calls

    def status(self) -> dict[str, Any]:
        """Return the fields of the push-consumer instance's InstanceStatus, by name
        (raymq.client.consumer.push.subscription)."""
        state, feed = self._state, self._feed
        now_s = time.monotonic()
        with state.lock:
            queues = sorted(state.core.process_queues(), key=lambda process_queue: process_queue.queue)
            troubles = [process_queue.trouble for process_queue in queues if process_queue.trouble]
            troubles = [*sorted({str(error) for error in state.core.forbidden.values()}), *troubles]
            if self._member.refusal is not None:
                troubles.insert(0, str(self._member.refusal))
            return {
                "instance": self.name,
                "holding": [str(process_queue.queue) for process_queue in queues],
                "buffered": sum(process_queue.count for process_queue in queues),
                "consumed": feed.consumed,
                "failures": feed.failures,
                "last_error": troubles[0] if troubles else feed.broken,
                "skipped": sum(process_queue.skipped for process_queue in queues),
                "last_skipped": next((one.last_skipped for one in queues if one.last_skipped), ""),
                "suspended": state.core.suspended,
                "listener_deaths": feed.deaths,
                "listener_away": feed.away_because,
                "listener_silent_s": feed.silent_s(),
                "stuck_threads": feed.stuck,
                "queues": [self._queue_status(process_queue) for process_queue in queues],
                "stats": state.stats.figures(now_s),
            }

    def _queue_status(self, process_queue: ProcessQueue) -> dict[str, Any]:
        forbidden = self._state.core.forbidden.get(process_queue.queue)
        return {
            "queue": process_queue.queue,
            "state": self._state.core.pull_state(process_queue).value,
            "fetch_offset": process_queue.fetch_offset,
            "commit_offset": process_queue.commit_offset,
            "committed_offset": process_queue.committed or 0,
            "buffered": process_queue.count,
            "buffered_bytes": process_queue.size_bytes,
            "in_flight": process_queue.in_flight_count,
            "trouble": process_queue.trouble if forbidden is None else str(forbidden),
        }

    def change_pauses(
        self,
        *,
        suspended: bool | None = None,
        pause: Iterable[MessageQueue] = (),
        resume: Iterable[MessageQueue] = (),
    ) -> None:
        """Suspend or resume the push-consumer instance, and pause or resume queues. The Listener stores the new pause
        state."""
        with self._state.lock:
            core = self._state.core
            if suspended is not None:
                core.suspend(suspended)
            core.pause(pause)
            core.resume(resume)
            kept = (core.suspended, core.paused)
        self._feed.wake()
        self._state.on_fetchable()
        self._feed.keep(kept)  # call `keep` outside the lock, because it makes a remote call

    # Methods that the SharedFetcher calls

    def wanted(self, now_s: float) -> dict[InstanceQueue, int]:
        """Return the queues of this instance whose messages the fetcher may fetch now, each with its next offset; see
        services.Reader."""
        with self._state.lock:
            wanted = self._state.core.wanted(now_s)
        return {self._key(queue): offset for queue, offset in wanted.items()}

    def assigned(self) -> frozenset[InstanceQueue]:
        """Return all queues that the push-consumer instance holds; see services.Reader."""
        return frozenset(self._key(queue) for queue in self._state.holding())

    def _key(self, queue: MessageQueue) -> InstanceQueue:
        key = self._keys.get(queue)
        if key is None:
            key = self._keys[queue] = InstanceQueue(queue.topic, queue.broker_name, queue.queue_id, self.name)
        return key

    def request(self, queue: MessageQueue, offset: int) -> FetchRequest:
        """Build the request that reads a queue from `offset`; see services.Reader."""
        wanted, most = self._settings.subscription(queue.topic), self._settings.pull_batch_size
        return FetchRequest(queue.topic, queue.queue_id, offset, most, wanted.tag_codes, wanted.sql)

    def predicate(self, queue: MessageQueue) -> GroupPredicate | None:
        """Return the predicate (a user's function) that filters the messages of a queue; None if the queue's
        subscription has no predicate."""
        predicate = self._settings.subscription(queue.topic).predicate
        return None if predicate is None else GroupPredicate(self._settings.group, predicate)

    def deliver(self, queue: MessageQueue, offset: int, result: FetchResult) -> None:
        """Process the result of a fetch; see services.Reader."""
        records, now_s = _records_of(result, offset), time.monotonic()
        with self._state.lock:
            self._state.core.saw_end(queue, result.max_offset)
            if result.status is PullStatus.OFFSET_ILLEGAL:
                logger.warning(
                    "queue %s: offset %d no longer exists, continuing at offset %d", queue, offset, result.next_offset
                )
                self._state.core.jump(queue, offset, result.next_offset)
            else:
                self._state.core.fetched(queue, offset, records, result.next_offset, now_s)
                self._state.stats.pulled(queue.topic, len(records), now_s)
        if len(records):
            self._feed.deliver()
            count_delivered(self._state, queue, records)
        elif result.next_offset != offset:
            self._committer.wake()

    def lose(self, queue: MessageQueue, offset: int, error: DataLossError | PredicateFailedError) -> None:
        """Record that the message at the next offset of a queue cannot be read, with the error as the reason
        (services.Reader.lose)."""
        with self._state.lock:
            self._state.core.unreadable(queue, offset, error)

    def _report_damage(self, queue: MessageQueue, positions: Sequence[QueuePosition]) -> list[RepairState]:
        """Report damaged records of a queue to the storage actor from which the queue is read. Repaired records replace
        the copies of the damaged records. Blocks for remote calls."""
        services = self._services
        name = services.fetcher.source_of(self._key(queue))
        if name is None:
            name = services.routes.get(queue.topic).pull_storages(queue.broker_name)[0]
        storage = services.storages.get(name)
        states = storage.report_damage(positions, REPORT_TIMEOUT_S)
        for position, state in zip(positions, states, strict=True):
            if state is RepairState.INTACT:
                self._replace_record(storage, queue, position)
        return states

    def _replace_record(self, storage: StorageClient, queue: MessageQueue, position: QueuePosition) -> None:
        [result] = storage.fetch([FetchRequest(*position, 1)], REPAIRED_RECORD_MAX_BYTES, 0.0, REPORT_TIMEOUT_S)
        if result.status is PullStatus.FOUND and result.count == 1:
            located = LocatedRecords.of_fetch(result.records, 1, position.queue_offset, result.next_offset)
            with self._state.lock:
                self._state.core.repaired(queue, position.queue_offset, MemoryRecords.of(located))

    def _send_back(
        self, broker_name: str, records: bytes, delay_level: int, max_reconsume_times: int, reason: str, failure: str
    ) -> None:
        self._services.broker(broker_name).call(
            "send_back",
            self._settings.group,
            records,
            delay_level=delay_level,
            max_reconsume_times=max_reconsume_times,
            reason=reason,
            failure=failure,
            timeout_s=SEND_BACK_TIMEOUT_S,
        )

    def _commit(self) -> None:
        """Commit the offsets of finished messages, and release revoked queues that need no commit."""
        self._member.release()
        self._committer.wake()

    def _committed(self) -> None:
        self._member.release()
        # wake the ListenerFeed, which sends tasks to the listener: some messages can be delivered only after this
        # commit
        self._feed.wake()

    def _figures(self) -> list[ConsumerFigures]:
        return with_ready(queue_states(self._state), self._services.routes, self._services.storages)

    # Methods for stopping and for periodic work

    def stop(self) -> None:
        """Begin to stop the push-consumer instance: finish the messages in flight, commit, leave the group, then set
        `ended`."""
        if not self._state.stopping.is_set():
            self._finish_until_s = time.monotonic() + FINISH_TIMEOUT_S
            self._state.stop()
            self._services.wake_members()

    @property
    def stopping(self) -> bool:
        return self._state.stopping.is_set()

    def turn(self) -> None:
        """Release revoked queues. If the push-consumer instance is stopping, end it after all queues are released. Does
        not block.

        Called about twice a second; more often while the instance stops.
        """
        self._member.fence()
        self._feed.look()
        self._member.release()
        late = time.monotonic() > self._finish_until_s
        if self.stopping and not self._ending and (late or not self._state.holding()):
            self._ending = True
            submit(self._services.calls, self._end)

    def _listener_gone(self) -> None:
        logger.info("instance %s ends, because its listener has ended", self.name)
        self.drop()

    def drop(self) -> None:
        """End the push-consumer instance at once, without commits: other members may already have its queues."""
        self._finish_until_s = 0.0
        self._state.stop()
        with self._state.lock:
            self._state.core.lose_all()
        self._services.wake_members()

    def _end(self) -> None:
        services = self._services
        CLIENT_FIGURES.remove(self)
        try:
            self._member.leave()
        finally:
            self._feed.close()
            services.feeds.remove(self._feed)
            services.fetcher.remove(self)
            self._repairs.close()
            self._committer.close()
            services.heartbeats.remove(self)
            self.ended.set()
            services.wake_members()


def _records_of(result: FetchResult, offset: int) -> TaskRecords:
    """Return the records of a fetch that began at `offset`. If the fetch returned only the records' positions, the
    returned object reads them from the store's mapped files."""
    if isinstance(result, FoundInPlace):
        return RecordsInPlace.of(result.files, result.mapped)
    return MemoryRecords.of(LocatedRecords.of_fetch(result.records, result.count, offset, result.next_offset))


def consumer_data(settings: PushSettings, name: str) -> ConsumerData:
    """Return the description of the push-consumer instance `name` as a consumer (ConsumerData), which administrators
    see."""
    return ConsumerData(
        settings.group, "PUSH", settings.expressions, settings.message_model, settings.start.where, name
    )
