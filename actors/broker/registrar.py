"""The registration of a broker at its NameServers: heartbeats, changes of topics, and all of it to those that lack it.

Nothing of it survives the broker's death: a new broker registers anew.
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
"""Stands for the answer of a NameServer that gave none."""

logger = logging.getLogger(__name__)


class Registrar:
    """Keeps one broker registered. Thread-safe.

    `describe` returns the registration as it should be now; all of it is sent at least every `interval_s`, and between
    that the topics that have changed. All NameServers are called at the same time: one that stands still holds up
    neither the others, nor the broker for longer than one call may take.
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
        """True if every NameServer has what it was told last."""
        self._missed: set[ActorRef] = set()
        """The NameServers that gave no answer to what they were told last. Their version may be the present one all the
        same: a registration also changes when another replica leads, or a store moves."""
        self._asked = self._answered = 0
        """The numbers of the newest call of `register`, and of the newest whose changes the NameServers were told."""

    def register(self) -> bool:
        """Tell every NameServer now what has changed, so that a created topic can be used at once. Calls that come
        while one is under way share the next one. True if every NameServer knows it; one that is away learns it from
        heartbeats."""
        self._asked = number = next(self._counter)
        with self._lock:  # or an older description could overtake a newer one
            if self._answered < number:
                asked = self._asked
                self._all_know = self._tell(self._describe())
                self._answered = asked
            return self._all_know

    def _tell(self, now: BrokerRegistration) -> bool:
        """Tell every NameServer the difference to what it was told, or all of it if that is due. True if each took it.
        Called with the lock."""
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
            # Most are the very objects they were, which need no look at their fields: there may be thousands.
            new = [config for topic, config in topics.items() if known.get(topic) is not config]
            changed = tuple(config for config in new if known.get(config.topic) != config)
            removed = tuple(known.keys() - topics.keys())
            changes = TopicChanges(self._broker_name, now.life, told.data_version, now.data_version, changed, removed)
            return self._tell_forgetful(self._call_all("change_topics", changes), now)
        return self._all_know

    def _tell_forgetful(self, known: list[Any], now: BrokerRegistration) -> bool:
        """Register at the NameServers that did not know the broker in the version of a call. True if all know it
        then."""
        answers = [
            self._call(server, "register_broker", now) if knows is False else knows
            for server, knows in zip(self._servers, known, strict=True)
        ]
        return self._note_missed(answers)

    def _note_missed(self, answers: list[Any]) -> bool:
        """Note who gave no answer to what the NameServers were told. True if all did. Called with the lock."""
        self._missed = {server for server, answer in zip(self._servers, answers, strict=True) if answer is _AWAY}
        return not self._missed

    def beat(self) -> None:
        """Send a heartbeat; register at NameServers that do not know the broker in its present version, and at
        intervals."""
        description = self._describe()
        moved = self._told is None or description.nodes != self._told.nodes  # which does not change the version
        if moved or time.monotonic() >= self._register_at_s:
            self.register()
            return
        known = self._call_all("broker_heartbeat", self._broker_name, description.data_version)
        with self._lock:
            # One that is away again stays among those that missed something.
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
        """The answers of all NameServers to one call, in their order."""
        if len(self._servers) == 1:
            return [self._call(self._servers[0], method, *args)]
        return list(self._callers.map(lambda server: self._call(server, method, *args), self._servers))

    def _call(self, server: ActorRef, method: str, *args: Any) -> Any:
        """A NameServer's answer; _AWAY if it is away: when it is back, the next heartbeat shows what it lacks."""
        try:
            return server.call(method, *args, timeout_s=REGISTER_TIMEOUT_S)
        except RaymqError as error:
            logger.info("%s: %s did not take %s: %s", self._broker_name, server.name, method, error)
            return _AWAY
