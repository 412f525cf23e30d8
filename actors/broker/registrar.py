"""The registration of a broker at its NameServers: sends heartbeats, changes of topics, and complete registrations.

No state of this module survives the broker process: a new broker registers again.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

from raymq.common.errors import RaymqError
from raymq.common.names import NameServerName
from raymq.common.protocol.route import BrokerRegistration, TopicChanges, TopicConfig
from raymq.remoting.actor_ref import ActorRef

REGISTER_TIMEOUT_S: Final = 3.0

_AWAY: Final = object()
"""Placeholder for the answer of a NameServer that did not respond"""

logger = logging.getLogger(__name__)


class Registrar:
    """Keeps one broker registered at all NameServers. Thread-safe.

    `describe` returns the current registration. The complete registration is sent at least every `interval_s`; between
    these times only changed topics are sent. All NameServers are called in parallel. A NameServer that hangs delays the
    broker at most for the timeout of one call, and does not delay the other NameServers.
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
        """The registration that was last sent to the NameServers, without its topics."""
        self._told_topics: dict[str, TopicConfig] = {}
        self.interval_s = interval_s
        """Seconds between two complete registrations of the broker at the NameServers. The broker may change this value
        at any time."""
        self._register_at_s = 0.0
        self._counter = itertools.count(1)
        self._all_know = False
        """True if every NameServer has received the registration that was last sent."""
        self._missed: set[ActorRef] = set()
        """The NameServers that did not answer the last registration. They get a complete registration again, even if
        they have the current data version: the data version does not change if another replica becomes the master, or
        if a store moves."""
        self._asked = self._answered = 0
        """Calls of `register`, which sends the broker's changes to the NameServers, are numbered. The two numbers are
        of the newest call, and of the newest call whose changes were sent."""

    def register(self) -> bool:
        """Send the broker's changes to every NameServer now, so that clients can use a new topic at once.

        Calls that arrive while a registration is being sent share the next registration. Returns True if every
        NameServer has the changes. An unreachable NameServer gets the changes after the next heartbeat that it answers.
        """
        self._asked = number = next(self._counter)
        with self._lock:  # without the lock, an older registration could be sent after a newer registration
            if self._answered < number:
                asked = self._asked
                self._all_know = self._tell(self._describe())
                self._answered = asked
            return self._all_know

    def _tell(self, now: BrokerRegistration) -> bool:
        """Send every NameServer the changes since the last registration, or the complete registration if one is due.

        Returns True if each NameServer accepted the call. The caller holds the lock.
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
            # Most topic configurations are the same objects as before. Comparing object identity first avoids comparing
            # the fields of thousands of topics.
            new = [config for topic, config in topics.items() if known.get(topic) is not config]
            changed = tuple(config for config in new if known.get(config.topic) != config)
            removed = tuple(known.keys() - topics.keys())
            changes = TopicChanges(self._broker_name, now.life, told.data_version, now.data_version, changed, removed)
            return self._tell_forgetful(self._call_all("change_topics", changes), now)
        return self._all_know

    def _tell_forgetful(self, known: list[Any], now: BrokerRegistration) -> bool:
        """Send the complete registration to the NameServers that lack the broker's previous data version. Returns True
        if all NameServers then have the current version."""
        answers = [
            self._call(server, "register_broker", now) if knows is False else knows
            for server, knows in zip(self._servers, known, strict=True)
        ]
        return self._note_missed(answers)

    def _note_missed(self, answers: list[Any]) -> bool:
        """Record which NameServers did not answer the last registration. Returns True if all NameServers answered. The
        caller holds the lock."""
        self._missed = {server for server, answer in zip(self._servers, answers, strict=True) if answer is _AWAY}
        return not self._missed

    def beat(self) -> None:
        """Send a heartbeat to all NameServers, and register at those NameServers that do not have the broker's current
        version. At intervals, register at all NameServers."""
        description = self._describe()
        # Register the broker again if its replicas have changed or moved to other nodes, because this does not change
        # the data version.
        moved = self._told is None or _places(description) != _places(self._told)
        if moved or time.monotonic() >= self._register_at_s:
            self.register()
            return
        known = self._call_all("broker_heartbeat", self._broker_name, description.data_version)
        with self._lock:
            # A NameServer that missed the last registration counts as outdated, so the broker registers at it again. If
            # the NameServer still does not answer, it stays in `_missed`.
            known = [
                False if server in self._missed and knows is not _AWAY else knows
                for server, knows in zip(self._servers, known, strict=True)
            ]
            if False in known:
                self._all_know = self._tell_forgetful(known, self._describe())

    def leave(self) -> None:
        """Unregister the broker at every NameServer. After this call, the broker can no longer be registered through
        this object."""
        self._call_all("unregister_broker", self._broker_name)
        self._callers.shutdown()

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all NameServers in parallel, and return the answers in the order of the NameServers."""
        if len(self._servers) == 1:
            return [self._call(self._servers[0], method, *args)]
        return list(self._callers.map(lambda server: self._call(server, method, *args), self._servers))

    def _call(self, server: ActorRef, method: str, *args: Any) -> Any:
        """Call a method of a NameServer and return the answer. Returns _AWAY if the NameServer does not answer. The
        next heartbeat that it answers shows which changes it lacks."""
        try:
            return server.call(method, *args, timeout_s=REGISTER_TIMEOUT_S)
        except RaymqError as error:
            logger.info("broker %s: NameServer %s did not accept %s: %s", self._broker_name, server.name, method, error)
            return _AWAY


def _places(registration: BrokerRegistration) -> tuple[Mapping[int, str], Mapping[int, str]]:
    """Return the storage actors of a broker group, and their nodes."""
    return registration.storages, registration.nodes
