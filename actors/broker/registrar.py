"""The registration of a broker at its NameServers: sends heartbeats, changes of topics, and complete registrations.

Nothing here survives the broker's death: a new broker registers again.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

from raymq.common.errors import RaymqError
from raymq.common.names import NameServerName
from raymq.common.protocol.route import BrokerRegistration, TopicChanges, TopicConfig
from raymq.remoting.actor_ref import ActorRef

REGISTER_TIMEOUT_S: Final = 3.0

_AWAY: Final = object()
"""Represents the missing answer of a NameServer that did not respond."""

logger = logging.getLogger(__name__)


class Registrar:
    """Keeps one broker registered. Thread-safe.

    `describe` returns the current registration. All of it is sent at least every `interval_s`; in between only changed
    topics are sent. All NameServers are called at the same time: a hanging NameServer delays neither the others, nor
    the broker for longer than one call may take.
    """

    def __init__(
        self,
        broker_name: str,
        nameservers: Sequence[NameServerName],
        describe: Callable[[], BrokerRegistration],
        interval_s: float,
    ) -> None:
        self._broker_name = broker_name
        self._servers = [ActorRef(str(name)) for name in nameservers]
        self._callers = ThreadPoolExecutor(len(self._servers), thread_name_prefix="registrar")
        self._describe = describe
        self._lock = threading.Lock()
        self._told: BrokerRegistration | None = None
        """The last registration that was sent, without its topics."""
        self._told_topics: dict[str, TopicConfig] = {}
        self.interval_s = interval_s
        """Seconds between complete registrations; may be changed."""
        self._register_at_s = 0.0
        self._counter = itertools.count(1)
        self._all_know = False
        """True if every NameServer has the last registration that was sent."""
        self._missed: set[ActorRef] = set()
        """The NameServers that did not answer the last registration. They may have its version even so: a registration
        also changes when another replica leads, or a store moves.
        """
        self._asked = self._answered = 0
        """The numbers of the newest call of `register`, and of the newest call whose changes were sent to the
        NameServers.
        """

    def register(self) -> bool:
        """Send the changes to every NameServer now, so that a new topic can be used at once.

        Calls that arrive while another one runs share the next one. Returns True if every NameServer has the changes;
        an absent NameServer gets them after its next heartbeat.
        """
        self._asked = number = next(self._counter)
        with self._lock:  # otherwise an older description could overtake a newer one
            if self._answered < number:
                asked = self._asked
                self._all_know = self._tell(self._describe())
                self._answered = asked
            return self._all_know

    def _tell(self, now: BrokerRegistration) -> bool:
        """Send every NameServer what changed since the last registration, or all of it if that is due.

        Returns True if each NameServer accepted it. Called with the lock.
        """
        told, known = self._told, self._told_topics
        topics = {config.topic: config for config in now.topics}
        self._told, self._told_topics = replace(now, topics=()), topics
        if (
            told is None
            or time.monotonic() >= self._register_at_s
            or replace(told, data_version=now.data_version) != self._told
        ):
            self._register_at_s = time.monotonic() + self.interval_s
            return self._note_missed(self._call_all("register_broker", now))
        if told.data_version != now.data_version:
            # Most are the same objects as before, so their fields need no comparison: there may be thousands.
            new = [config for topic, config in topics.items() if known.get(topic) is not config]
            changed = tuple(config for config in new if known.get(config.topic) != config)
            removed = tuple(known.keys() - topics.keys())
            changes = TopicChanges(self._broker_name, now.life, told.data_version, now.data_version, changed, removed)
            return self._tell_forgetful(self._call_all("change_topics", changes), now)
        return self._all_know

    def _tell_forgetful(self, known: list[Any], now: BrokerRegistration) -> bool:
        """Register at the NameServers that lack the broker's version before a call. Returns True if all have it
        afterwards.
        """
        answers = [
            self._call(server, "register_broker", now) if knows is False else knows
            for server, knows in zip(self._servers, known, strict=True)
        ]
        return self._note_missed(answers)

    def _note_missed(self, answers: list[Any]) -> bool:
        """Record which NameServers did not answer the last registration. Returns True if all did. Called with the
        lock.
        """
        self._missed = {server for server, answer in zip(self._servers, answers, strict=True) if answer is _AWAY}
        return not self._missed

    def beat(self) -> None:
        """Send a heartbeat, and register at NameServers that lack the broker's current version; register at intervals,
        too.
        """
        description = self._describe()
        moved = self._told is None or description.nodes != self._told.nodes  # which does not change the version
        if moved or time.monotonic() >= self._register_at_s:
            self.register()
            return
        known = self._call_all("broker_heartbeat", self._broker_name, description.data_version)
        with self._lock:
            # A NameServer that does not answer again stays among the missed ones.
            known = [
                False if server in self._missed and knows is not _AWAY else knows
                for server, knows in zip(self._servers, known, strict=True)
            ]
            if False in known:
                self._all_know = self._tell_forgetful(known, self._describe())

    def leave(self) -> None:
        """Unregister at every NameServer. Nothing can be registered after that."""
        self._call_all("unregister_broker", self._broker_name)
        self._callers.shutdown()

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Return the answers of all NameServers to one call, in their order."""
        if len(self._servers) == 1:
            return [self._call(self._servers[0], method, *args)]
        return list(self._callers.map(lambda server: self._call(server, method, *args), self._servers))

    def _call(self, server: ActorRef, method: str, *args: Any) -> Any:
        """Return a NameServer's answer; _AWAY if it does not answer. After its return the next heartbeat shows what it
        lacks.
        """
        try:
            return server.call(method, *args, timeout_s=REGISTER_TIMEOUT_S)
        except RaymqError as error:
            logger.info("%s: %s did not take %s: %s", self._broker_name, server.name, method, error)
            return _AWAY
