"""Pull: the actor that serves all push-consumer instances of one Ray node. It fetches messages, delivers them to the
instances' Listeners, and commits offsets.

Only the committed offsets survive a crash of the actor, at the brokers (BROADCASTING: in a file on this node). Ray
restarts the actor. Its Listeners call within seconds, and their calls recreate the instances
(raymq.client.consumer.push.hosting). The instances join their groups and continue from the committed offsets, so
messages that were in flight are delivered again. A Listener stores for its instance which queues the user has paused,
and whether the instance is suspended.

An instance ends when it is stopped, or when its Listener has ended permanently because the user's program ended. The
actor ends after it has had no instance for IDLE_EXIT_S.

    member thread     turns of all instances: fences, releases, ends       routes thread   queues, in BROADCASTING
    and the threads of PullServices: fetching, feeding, committing, heartbeats

The actor may wait for Storage, Broker, Rebalance, NameServer and Listener actors. None of these waits for a Pull actor,
except the thread of a Listener that requests hosting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import ray

from actors.actor_class import actor_class
from actors.options import PERSISTENT
from actors.pull.broadcast_member import MEMBER_ROUTE_INTERVAL_S
from actors.pull.push_instance import PushInstance
from actors.pull.services import PullServices
from actors.register import next_life
from actors.threads import take_turns_quickly
from raymq.client.consumer.push.feed_client import PullDescription
from raymq.client.consumer.push.hosting import HostAnswer, Hosting
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.names import NameServerName, PullName
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES

TURN_INTERVAL_S: Final = 0.5
STOPPING_INTERVAL_S: Final = 0.02
IDLE_EXIT_S: Final = 60.0
CLOSE_WITHIN_S: Final = 25.0
STOPPED_KEPT: Final = 1000
"""Maximum number of stopped push-consumer instances that the Pull actor still recognizes by their keys, because the
Listener of a stopped instance may call once more."""

logger = logging.getLogger(__name__)


class Pull:
    """The actor that hosts the push-consumer instances of one node."""

    def __init__(self, nameservers: Sequence[NameServerName]) -> None:
        take_turns_quickly()
        self._node_id = ray.get_runtime_context().get_node_id()
        life = next_life(str(PullName(self._node_id)))
        self._services = PullServices(nameservers, self._node_id, ray.util.get_node_ip_address(), life)
        CLIENT_FIGURES.identify("pull", str(PullName(self._node_id)))
        self._lock = threading.Lock()
        """Lock that guards the table of push-consumer instances and the other attributes of this actor."""
        self._instances: dict[str, PushInstance] = {}
        self._stopped: deque[str] = deque(maxlen=STOPPED_KEPT)
        self._closing = self._idle = False
        self._last_instance_s = time.monotonic()
        self._work = threading.Event()
        self._new = threading.Event()
        """Event that is set when a new push-consumer instance exists. It wakes the thread that follows the routes of
        topics."""
        self._services.wake_members = self._work.set
        for name, target in (("members", self._turn_members), ("routes", self._follow_routes)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def host(self, call: Hosting) -> HostAnswer:
        """Host a push-consumer instance, or continue to host it. The instance's Listener calls this method
        periodically. Safe to repeat."""
        name, key = call.instance.name, call.instance.key
        with self._lock:
            if self._idle:
                raise ServiceNotAvailableError("this Pull actor is idle and is shutting down; retry later")
            if self._closing or key in self._stopped:
                return HostAnswer(False)
            instance = self._instances.get(name)
            # Drop the push-consumer instance that has this name but another key. Its Listener no longer exists, because
            # Ray allows only one actor with a name.
            if instance is not None and instance.key != key:
                instance.drop()
                raise ServiceNotAvailableError(f"an instance named {name} is still shutting down; retry later")
            new = instance is None or instance.ended.is_set()
            if instance is None or new:
                instance = self._instances[name] = PushInstance(name, key, call.settings, self._services)
        answer = instance.hosted(call)
        if new:
            instance.start()
            self._new.set()
        return answer

    def describe(self) -> PullDescription:
        """Return the address at which Listeners open lanes (direct socket connections) for `next_tasks` and
        `report`."""
        return PullDescription(self._services.feeds.address)

    def status(self) -> dict[str, Any]:
        """Return the status of all push-consumer instances, for `raymq status`."""
        with self._lock:
            instances = sorted(self._instances.items())
        return {"node": self._node_id, "instances": [instance.status() for _, instance in instances]}

    def instance_status(self, name: str) -> dict[str, Any]:
        """Return the status of one push-consumer instance; see PushInstance.status. Raises ServiceNotAvailableError if
        this actor does not host the instance now."""
        return self._instance(name).status()

    def suspend(self, name: str) -> None:
        """Stop fetching and delivering for a push-consumer instance until `resume`. The instance keeps its queues, and
        its listener finishes the messages that were already delivered."""
        self._instance(name).change_pauses(suspended=True)

    def resume(self, name: str) -> None:
        """Continue fetching and delivering for a push-consumer instance after `suspend`."""
        self._instance(name).change_pauses(suspended=False)

    def pause_queues(self, name: str, queues: Iterable[MessageQueue]) -> None:
        """Stop fetching and delivering messages of these queues. This also applies to a queue that the push-consumer
        instance is granted later."""
        self._instance(name).change_pauses(pause=frozenset(queues))

    def resume_queues(self, name: str, queues: Iterable[MessageQueue]) -> None:
        """Continue fetching and delivering messages of paused queues."""
        self._instance(name).change_pauses(resume=frozenset(queues))

    def stop(self, name: str, key: str, wait_s: float) -> bool:
        """Stop a push-consumer instance: finish the messages in flight, commit, and leave the group.

        Returns False if the stop takes longer than `wait_s`; the stop then continues, and the caller may repeat the
        call. Also returns True if this actor does not host the instance.
        """
        with self._lock:
            if key not in self._stopped:
                self._stopped.append(key)
            instance = self._instances.get(name)
        if instance is None or instance.key != key:
            return True
        instance.stop()
        return instance.ended.wait(wait_s)

    def close(self) -> None:
        """Stop all instances that this Pull actor hosts."""
        with self._lock:
            self._closing = True
            instances = list(self._instances.values())
        for instance in instances:
            instance.stop()
        deadline_s = time.monotonic() + CLOSE_WITHIN_S
        for instance in instances:
            instance.ended.wait(max(0.0, deadline_s - time.monotonic()))
        self._services.close()

    def _instance(self, name: str) -> PushInstance:
        with self._lock:
            instance = self._instances.get(name)
        if instance is None or instance.ended.is_set():
            raise ServiceNotAvailableError(f"instance {name} is not hosted by this Pull actor now; retry later")
        return instance

    # Methods that the Pull actor's threads call again and again

    def _turn_members(self) -> None:
        pause_s = TURN_INTERVAL_S
        while True:
            self._work.wait(pause_s)
            self._work.clear()
            with self._lock:
                instances = list(self._instances.values())
            for instance in instances:
                try:
                    instance.turn()
                except Exception:  # a programming error in one instance must not affect the other instances
                    logger.exception("serving instance %s failed, retrying", instance.name)
            pause_s = STOPPING_INTERVAL_S if any(instance.stopping for instance in instances) else TURN_INTERVAL_S
            self._forget_ended()

    def _forget_ended(self) -> None:
        with self._lock:
            for name in [name for name, instance in self._instances.items() if instance.ended.is_set()]:
                del self._instances[name]
            if self._instances:
                self._last_instance_s = time.monotonic()
            self._idle = time.monotonic() - self._last_instance_s > IDLE_EXIT_S
        if self._idle:
            logger.info(
                "the Pull actor of this node shuts down, because it has hosted no instance for %.0f s", IDLE_EXIT_S
            )
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _follow_routes(self) -> None:
        while True:
            with self._lock:
                members = [instance.broadcast for instance in self._instances.values() if not instance.stopping]
            for member in members:
                if member is not None:
                    try:
                        member.follow_routes()
                    except Exception:  # a programming error in one instance must not affect the other instances
                        logger.exception("an instance cannot read its routes, retrying")
            self._new.wait(MEMBER_ROUTE_INTERVAL_S)
            self._new.clear()


PULL_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 64}
"""Ray's options of a Pull actor. `max_concurrency`: the number of threads, because each `host` call of a Listener and
each status call of a client occupies a thread."""
PullActor = ray.remote(**PULL_OPTIONS)(actor_class(Pull))
