"""The registration of a broker at its NameServers: a heartbeat to each, and a registration to those that lack it.

Nothing of it survives the broker's death: a new broker registers anew.
"""

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
    """Keeps one broker registered. Thread-safe.

    `describe` returns the registration as it should be now; `interval_s`: it is sent at least so often. All NameServers
    are called at the same time: one that stands still holds up neither the others, nor the broker for longer than one
    call may take.
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
        self._nodes: dict[int, str] = {}
        self._interval_s = interval_s
        self._register_at_s = 0.0

    def register(self) -> None:
        """Register at every NameServer now, so that a created topic can be used at once."""
        with self._lock:  # or an older description could overtake a newer one
            registration = self._describe()
            self._nodes = dict(registration.nodes)
            self._register_at_s = time.monotonic() + self._interval_s
            self._call_all("register_broker", registration)

    def beat(self) -> None:
        """Send a heartbeat; register at NameServers that do not know the broker in its present version, and at
        intervals."""
        description = self._describe()
        moved = description.nodes != self._nodes  # a store is on another node, which does not change the version
        if moved or time.monotonic() >= self._register_at_s:
            self.register()
            return
        known = self._call_all("broker_heartbeat", self._broker_name, description.data_version)
        for server, knows in zip(self._servers, known, strict=True):
            if not knows:
                with self._lock:
                    self._call(server, "register_broker", self._describe())

    def leave(self) -> None:
        """Unregister at every NameServer. Nothing can be registered after that."""
        self._call_all("unregister_broker", self._broker_name)
        self._callers.shutdown()

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """The answers of all NameServers to one call, in their order."""
        return list(self._callers.map(lambda server: self._call(server, method, *args), self._servers))

    def _call(self, server: ActorRef, method: str, *args: Any) -> Any:
        """A NameServer's answer; True if it is away: when it is back, the next heartbeat shows what it lacks."""
        try:
            return server.call(method, *args, timeout_s=REGISTER_TIMEOUT_S)
        except RaymqError as error:
            logger.info("%s: %s did not take %s: %s", self._broker_name, server.name, method, error)
            return True
