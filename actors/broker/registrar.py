"""Keeping a broker known to its NameServers: a heartbeat to each, and its registration to those that lack it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from raymq.errors import RaymqError
from raymq.names import NameServerName
from raymq.protocol.route import BrokerRegistration
from raymq.remoting.actor_ref import ActorRef

REGISTER_TIMEOUT_S: Final = 3.0

logger = logging.getLogger(__name__)


class Registrar:
    """`describe` gives what is to be registered now, `interval_s` after how long it is in any case. Thread-safe.

    The NameServers are told at the same time: one that stands still holds up neither the others nor the broker for
    longer than one call may take."""

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
        self._nodes: dict[int, str] = {}
        self._interval_s = interval_s
        self._register_at_s = 0.0

    def register(self) -> None:
        """Tell every NameServer now, so that a created topic can be used at once."""
        with self._lock:  # or an older description could overtake a newer one
            registration = self._describe()
            self._nodes = dict(registration.nodes)
            self._register_at_s = time.monotonic() + self._interval_s
            self._tell_all("register_broker", registration)

    def beat(self) -> None:
        """Say that the broker lives; register where a NameServer does not know it as it is, and once in a while."""
        description = self._describe()
        moved = description.nodes != self._nodes  # a store is on another node, which the version does not tell
        if moved or time.monotonic() >= self._register_at_s:
            self.register()
            return
        known = self._tell_all("broker_heartbeat", self._broker_name, description.data_version)
        for server, knows in zip(self._servers, known, strict=True):
            if not knows:
                with self._lock:
                    self._tell(server, "register_broker", self._describe())

    def leave(self) -> None:
        """Have every NameServer forget the broker. Nothing more can be told."""
        self._tell_all("unregister_broker", self._broker_name)
        self._callers.shutdown()

    def _tell_all(self, method: str, *args: Any) -> list[Any]:
        """A call to every NameServer; their answers."""
        return list(self._callers.map(lambda server: self._tell(server, method, *args), self._servers))

    def _tell(self, server: ActorRef, method: str, *args: Any) -> Any:
        """A call to a NameServer that may be away: it asks again by itself when it is back."""
        try:
            return server.call(method, *args, timeout_s=REGISTER_TIMEOUT_S)
        except RaymqError as error:
            logger.info("%s: %s did not take %s: %s", self._broker_name, server.name, method, error)
            return True
