"""Pull: one instance of a push consumer. It fetches for the queues it holds, feeds its Listener, commits.

What survives its death: nothing but the committed offsets, at the brokers (BROADCASTING: in a file on this node). Ray
starts it again; it joins its group anew and goes on from there, so what was in flight is delivered again. Its Listener
remembers for it what the user has suspended or paused. It ends by itself when its Listener is gone for good, which
happens when the user's program ends.

    Fetcher threads → ProcessQueues (actors.core) → Feed → Listener
    GroupMember: heartbeats, grants, revocations      OffsetCommitter: start offsets, commits

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
from actors.pull.listener_feed import ListenerFeed
from actors.pull.offset_store import LocalFileOffsetStore, OffsetCommitter, RemoteBrokerOffsetStore
from actors.pull.shared import InstanceState
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
        self._shared = shared = InstanceState(name, settings)
        node_id = ray.get_runtime_context().get_node_id()
        routes = RouteCache(nameservers)
        self._storages = StorageClients(node_id)
        self._stopped = threading.Event()
        offsets = GroupOffsets(settings.group)
        self._brokers: dict[str, ActorRef] = {}
        if settings.clustering:
            self._keepers = OffsetCommitter(shared, lambda broker: RemoteBrokerOffsetStore(shared, offsets, broker))
            rebalance = RebalanceClient(settings.group, routes)
            self._member: GroupMember | BroadcastMember = GroupMember(shared, rebalance, node_id, self._keepers.ask)
        else:
            local = LocalFileOffsetStore(shared, offsets)
            self._keepers = OffsetCommitter(shared, lambda broker: local)
            self._member = BroadcastMember(shared, routes)
        self._feed = ListenerFeed(
            shared, listener, send_back=self._send_back, before=self._member.fence_when_late, on_gone=self._end
        )
        self._fetcher = Fetcher(
            wanted=self._wanted,
            held=shared.holding,
            deliver=self._deliver,
            request=self._request,
            storages=lambda queue: routes.get(queue.topic).pull_storages(queue.broker_name),
            storage=self._storages.get,
            outdated=lambda queue: routes.forget(queue.topic),
            lost=self._lose,
        )
        shared.on_room, shared.on_finished = self._fetcher.wake, self._keepers.wake
        shared.on_released = self._member.wake
        self._heartbeats = Heartbeats(routes, ray.util.get_node_ip_address())
        self._heartbeats.set_consumer(self, consumer_data(settings))
        self._feed.start()
        threading.Thread(target=self._live, name="member", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """What this instance holds and how it is doing."""
        shared, feed = self._shared, self._feed
        now_s = time.monotonic()
        with shared.lock:
            queues = sorted(shared.core.held(), key=lambda held: held.queue)
            troubles = [held.trouble for held in queues if held.trouble]
            return {
                "instance": shared.name,
                "holding": [str(held.queue) for held in queues],
                "buffered": sum(held.count for held in queues),
                "consumed": feed.consumed,
                "failures": feed.failures,
                "last_error": troubles[0] if troubles else feed.broken,
                "suspended": shared.core.suspended,
                "listener_deaths": feed.deaths,
                "listener_away": feed.away_because,
                "listener_silent_s": feed.silent_s(),
                "stuck_threads": feed.stuck,
                "queues": [self._queue_status(held) for held in queues],
                "stats": shared.stats.figures(now_s),
            }

    def _queue_status(self, held: ProcessQueue) -> dict[str, Any]:
        return {
            "queue": held.queue,
            "state": self._shared.core.pull_state(held).value,
            "fetch_offset": held.fetch_offset or 0,
            "commit_offset": held.commit_offset,
            "committed_offset": held.committed_offset,
            "buffered": held.count,
            "buffered_bytes": held.size_bytes,
            "in_flight": sum(len(task.unfinished) for task in held.flying),
            "trouble": held.trouble,
        }

    def suspend(self) -> None:
        """Fetch and deliver nothing until `resume`. The queues are kept; what is at the listener is finished."""
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
        """Finish what is in flight, commit, leave the group. False when that was not done in time."""
        self._shared.stopping.set()
        self._member.wake()
        return self._stopped.wait(timeout_s)

    def _change_pauses(
        self,
        *,
        suspended: bool | None = None,
        pause: frozenset[MessageQueue] = frozenset(),
        resume: frozenset[MessageQueue] = frozenset(),
    ) -> None:
        with self._shared.lock:
            core = self._shared.core
            core.suspended = core.suspended if suspended is None else suspended
            core.pause(pause)
            core.resume(resume)
            state = (core.suspended, core.paused)
        self._shared.work.set()
        self._fetcher.wake()
        self._feed.keep(state)

    # Fetching

    def _wanted(self) -> dict[MessageQueue, int]:
        with self._shared.lock:
            return self._shared.core.wanted(time.monotonic())

    def _request(self, queue: MessageQueue, offset: int) -> FetchRequest:
        codes = self._settings.subscription(queue.topic).tag_codes
        return FetchRequest(queue.topic, queue.queue_id, offset, self._settings.pull_batch_size, codes)

    def _deliver(self, queue: MessageQueue, offset: int, result: FetchResult) -> None:
        run, now_s = MemoryRecords.read(result.records), time.monotonic()
        with self._shared.lock:
            if result.status is PullStatus.OFFSET_ILLEGAL:
                logger.warning("%s: offset %d is gone, going on at %d", queue, offset, result.next_offset)
                self._shared.core.jump(queue, offset, result.next_offset)
            else:
                self._shared.core.fetched(queue, offset, run, result.next_offset, now_s)
                self._shared.stats.pulled(queue.topic, len(run), now_s)
        if len(run):
            self._shared.work.set()
        elif result.next_offset != offset:
            self._keepers.wake()

    def _lose(self, queue: MessageQueue, offset: int, error: DataLossError) -> None:
        with self._shared.lock:
            for held in self._shared.core.held():
                if held.queue == queue:
                    held.trouble = f"the message at offset {offset} cannot be read: {error}"

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
        self._keepers.close()
        self._heartbeats.close()
        self._storages.close()
        self._stopped.set()

    def _end(self) -> None:
        logger.info("%s ends: its listener is gone", self._shared.name)
        self._shared.stopping.set()
        threading.Thread(target=self._end_process, name="end", daemon=True).start()

    def _end_process(self) -> None:
        self._shared.drop_all()
        self._member.wake()
        self._stopped.wait(PULL_STOP_TIMEOUT_S)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def consumer_data(settings: PushSettings) -> ConsumerData:
    """What administrators are told of an instance."""
    subscriptions = {subscription.topic: subscription.expression for subscription in settings.subscriptions}
    return ConsumerData(settings.group, "PUSH", subscriptions, settings.message_model, settings.start.where)


PULL_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 4}
PullActor = ray.remote(**PULL_OPTIONS)(actor_class(Pull))
