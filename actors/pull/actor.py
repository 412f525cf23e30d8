"""Pull is the actor of one push-consumer instance: it fetches from its queues, feeds its Listener and commits offsets.

Only the committed offsets survive its death, at the brokers (BROADCASTING: in a file on this node). Ray starts it
again; it joins its group anew and goes on from there, so the messages that were in flight are delivered again. Its
Listener remembers for it which queues the user has paused, and whether the instance is suspended. It ends by itself
when its Listener is gone for good, which happens when the user's program ends.

    Fetcher threads → ProcessQueues (actors.core.consume) → ListenerFeed → Listener
    GroupMember: heartbeats, grants, revocations           OffsetCommitter: start offsets, commits

May wait for: Storage, Broker, Rebalance, NameServer, Listener. None of them waits for a Pull.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import ray

from actors.actor_class import actor_class
from actors.core.consume.process_queue import ProcessQueue
from actors.options import PERSISTENT
from actors.pull.group_member import BroadcastMember, GroupMember
from actors.pull.instance_state import InstanceState
from actors.pull.listener_feed import ListenerFeed
from actors.pull.offset_store import LocalFileOffsetStore, OffsetCommitter, RemoteBrokerOffsetStore
from raymq.consumer.fetcher import Fetcher
from raymq.consumer.group_offsets import GroupOffsets
from raymq.consumer.push.settings import PushSettings
from raymq.consumer.rebalance_client import RebalanceClient
from raymq.errors import DataLossError
from raymq.message import MessageQueue, PullStatus
from raymq.names import NameServerName
from raymq.protocol.clients import ConsumerData
from raymq.protocol.store import FetchRequest, FetchResult
from raymq.record.memory_records import MemoryRecords
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.heartbeats import Heartbeats
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

PULL_STOP_TIMEOUT_S: Final = 30.0
SEND_BACK_TIMEOUT_S: Final = 5.0

logger = logging.getLogger(__name__)


class Pull:
    """The shell around one ProcessQueues. `listener` is the handle of the instance's Listener actor."""

    def __init__(self, name: str, settings: PushSettings, nameservers: Sequence[NameServerName], listener: Any) -> None:
        self._settings = settings
        self._instance = instance = InstanceState(name, settings)
        node_id = ray.get_runtime_context().get_node_id()
        routes = RouteCache(nameservers)
        self._storages = StorageClients(node_id)
        self._stopped = threading.Event()
        offsets = GroupOffsets(settings.group)
        self._brokers: dict[str, ActorRef] = {}
        if settings.clustering:
            self._committer = OffsetCommitter(
                instance, lambda broker: RemoteBrokerOffsetStore(instance, offsets, broker)
            )
            rebalance = RebalanceClient(settings.group, routes)
            self._member: GroupMember | BroadcastMember = GroupMember(
                instance, rebalance, node_id, self._committer.ask_about_resets
            )
        else:
            local = LocalFileOffsetStore(instance, offsets)
            self._committer = OffsetCommitter(instance, lambda broker: local)
            self._member = BroadcastMember(instance, routes)
        self._feed = ListenerFeed(
            instance,
            listener,
            send_back=self._send_back,
            before_delivery=self._member.fence_when_late,
            on_gone=self._end,
        )
        self._fetcher = Fetcher.by_routes(
            routes,
            self._storages,
            wanted=self._wanted,
            assigned=instance.holding,
            request=self._request,
            deliver=self._deliver,
            lost=self._lose,
        )
        instance.on_fetchable, instance.on_committable = self._fetcher.wake_readers, self._committer.wake_committers
        instance.on_released = self._member.wake_member
        self._heartbeats = Heartbeats(routes, ray.util.get_node_ip_address())
        self._heartbeats.set_consumer(self, consumer_data(settings))
        self._feed.start()
        threading.Thread(target=self._live, name="member", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """The fields of the instance's InstanceStatus, by name (raymq.consumer.push.subscription)."""
        instance, feed = self._instance, self._feed
        now_s = time.monotonic()
        with instance.lock:
            queues = sorted(instance.core.process_queues(), key=lambda process_queue: process_queue.queue)
            troubles = [process_queue.trouble for process_queue in queues if process_queue.trouble]
            return {
                "instance": instance.name,
                "holding": [str(process_queue.queue) for process_queue in queues],
                "buffered": sum(process_queue.count for process_queue in queues),
                "consumed": feed.consumed,
                "failures": feed.failures,
                "last_error": troubles[0] if troubles else feed.broken,
                "suspended": instance.core.suspended,
                "listener_deaths": feed.deaths,
                "listener_away": feed.away_because,
                "listener_silent_s": feed.silent_s(),
                "stuck_threads": feed.stuck,
                "queues": [self._queue_status(process_queue) for process_queue in queues],
                "stats": instance.stats.figures(now_s),
            }

    def _queue_status(self, process_queue: ProcessQueue) -> dict[str, Any]:
        return {
            "queue": process_queue.queue,
            "state": self._instance.core.pull_state(process_queue).value,
            "fetch_offset": process_queue.fetch_offset or 0,
            "commit_offset": process_queue.commit_offset,
            "committed_offset": process_queue.committed_offset,
            "buffered": process_queue.count,
            "buffered_bytes": process_queue.size_bytes,
            "in_flight": process_queue.in_flight_count,
            "trouble": process_queue.trouble,
        }

    def suspend(self) -> None:
        """Fetch and deliver nothing until `resume`. The queues are kept; the listener finishes its messages."""
        self._change_pauses(suspended=True)

    def resume(self) -> None:
        """Go on after `suspend`."""
        self._change_pauses(suspended=False)

    def pause_queues(self, queues: Iterable[MessageQueue]) -> None:
        """Fetch and deliver nothing of these queues, whether they are held now or later."""
        self._change_pauses(pause=frozenset(queues))

    def resume_queues(self, queues: Iterable[MessageQueue]) -> None:
        """Go on with paused queues."""
        self._change_pauses(resume=frozenset(queues))

    def stop(self, timeout_s: float) -> bool:
        """Finish the messages in flight, commit, leave the group. False when that was not done within `timeout_s`."""
        self._instance.stopping.set()
        self._member.wake_member()
        return self._stopped.wait(timeout_s)

    def _change_pauses(
        self,
        *,
        suspended: bool | None = None,
        pause: frozenset[MessageQueue] = frozenset(),
        resume: frozenset[MessageQueue] = frozenset(),
    ) -> None:
        with self._instance.lock:
            core = self._instance.core
            if suspended is not None:
                core.suspend(suspended)
            core.pause(pause)
            core.resume(resume)
            state = (core.suspended, core.paused)
        self._instance.work.set()
        self._fetcher.wake_readers()
        self._feed.keep(state)  # after the lock is released: it is a call

    # Fetching

    def _wanted(self) -> dict[MessageQueue, int]:
        with self._instance.lock:
            return self._instance.core.wanted(time.monotonic())

    def _request(self, queue: MessageQueue, offset: int) -> FetchRequest:
        codes = self._settings.subscription(queue.topic).tag_codes
        return FetchRequest(queue.topic, queue.queue_id, offset, self._settings.pull_batch_size, codes)

    def _deliver(self, queue: MessageQueue, offset: int, result: FetchResult) -> None:
        records, now_s = MemoryRecords.read(result.records), time.monotonic()
        with self._instance.lock:
            if result.status is PullStatus.OFFSET_ILLEGAL:
                logger.warning("%s: offset %d is gone, going on at %d", queue, offset, result.next_offset)
                self._instance.core.jump(queue, offset, result.next_offset)
            else:
                self._instance.core.fetched(queue, offset, records, result.next_offset, now_s)
                self._instance.stats.pulled(queue.topic, len(records), now_s)
        if len(records):
            self._instance.work.set()
        elif result.next_offset != offset:
            self._committer.wake_committers()

    def _lose(self, queue: MessageQueue, offset: int, error: DataLossError) -> None:
        with self._instance.lock:
            self._instance.core.unreadable(queue, offset, error)

    def _send_back(self, broker_name: str, records: bytes, delay_level: int, max_reconsume_times: int) -> None:
        broker = self._brokers.setdefault(broker_name, ActorRef(broker_name))
        broker.call(
            "send_back",
            self._settings.group,
            records,
            delay_level=delay_level,
            max_reconsume_times=max_reconsume_times,
            timeout_s=SEND_BACK_TIMEOUT_S,
        )

    # Life

    def _live(self) -> None:
        self._member.run()
        self._feed.close()
        self._fetcher.stop()
        self._committer.close()
        self._heartbeats.close()
        self._storages.close()
        self._stopped.set()

    def _end(self) -> None:
        logger.info("%s ends: its listener is gone", self._instance.name)
        self._instance.stopping.set()
        threading.Thread(target=self._end_process, name="end", daemon=True).start()

    def _end_process(self) -> None:
        self._instance.drop_all()
        self._member.wake_member()
        self._stopped.wait(PULL_STOP_TIMEOUT_S)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def consumer_data(settings: PushSettings) -> ConsumerData:
    """The description of an instance for administrators."""
    subscriptions = {subscription.topic: subscription.expression for subscription in settings.subscriptions}
    return ConsumerData(settings.group, "PUSH", subscriptions, settings.message_model, settings.start.where)


PULL_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 4}
PullActor = ray.remote(**PULL_OPTIONS)(actor_class(Pull))
