"""Hosted makes the Pull actor of a Listener's node host the Listener's instance, for as long as the Listener's process
runs.

A thread of the Listener's process calls the Pull actor (`pull-NODE`) about every HOST_INTERVAL_S, with everything that
is needed to create the instance. So a restarted Pull actor has all its instances back within seconds, and detects a new
process of the Listener at once. If the Pull actor does not run, a broker starts it. If Ray has restarted a Listener on
another node, the Listener calls the Pull actor of that node.

The same thread reports the metrics of the Listener's process.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from raymq.client.consumer.push.settings import PushSettings
from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.common.names import PullName
from raymq.remoting.actor_ref import ActorRef
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES, ClientMetrics

HOST_INTERVAL_S: Final = 2.0
HOST_CALL_TIMEOUT_S: Final = 5.0
START_PULL_TIMEOUT_S: Final = 30.0
RETRY_S: Final = 0.3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Instance:
    """One push-consumer instance: its name, its unique key, and the brokers that can start a Pull actor. `call_key`:
    the key with which the Pull actor signs its calls to the Listener; empty without a user."""

    name: str
    key: str
    brokers: tuple[str, ...]
    call_key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Hosting:
    """A Listener's request to a Pull actor to host its instance.

    `listener` is the Listener's actor handle; `life` identifies the Listener's process. `broken` is the traceback if
    the process cannot load the listener. `kept` is the state that the process keeps for the instance.
    """

    instance: Instance
    settings: PushSettings
    listener: Any
    life: str
    broken: str
    kept: object


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """The Pull actor's answer to a hosting request. `hosted`: False after the instance was stopped. `keep`: a state of
    the Pull actor that the Listener's process must store for it; None if the stored state is current. `metrics`: the
    cluster's metrics settings; None until the Pull actor has received them from a broker."""

    hosted: bool
    keep: object = None
    metrics: ClientMetrics | None = None


class Hosted:
    """The thread of a Listener's process that makes a Pull actor host the push-consumer instance. `make_call` creates
    the hosting request. `keep` is called with a state that the Pull actor returns; the Listener's process must store
    this state for the actor."""

    def __init__(
        self,
        instance: Instance,
        node_id: str,
        make_call: Callable[[str], Hosting],
        keep: Callable[[object], None],
    ) -> None:
        self._instance = instance
        self._node_id = node_id
        self._make_call, self._keep = make_call, keep
        self.life = secrets.token_hex(8)
        """Unique name of this Listener process."""
        self._pull = ActorRef(str(PullName(node_id)))
        self._hosted = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the hosting thread; later calls do nothing."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hosting", daemon=True)
                self._thread.start()

    @property
    def pull_name(self) -> str:
        """The name of this node's Pull actor."""
        return self._pull.name

    def where(self, wait_s: float) -> str:
        """Return the name of the Pull actor that hosts the instance; empty if no Pull actor hosts it within
        `wait_s`."""
        return self._pull.name if self._hosted.wait(wait_s) else ""

    def _run(self) -> None:
        while True:
            try:
                answer: HostAnswer = self._pull.call("host", self._make_call(self.life), timeout_s=HOST_CALL_TIMEOUT_S)
            except RaymqError as error:
                self._hosted.clear()
                logger.info(
                    "instance %s is not hosted by Pull actor %s: %s", self._instance.name, self._pull.name, error
                )
                self._start_pull()
                time.sleep(RETRY_S)
                continue
            if not answer.hosted:
                return
            if answer.keep is not None:
                self._keep(answer.keep)
            if answer.metrics is not None:
                CLIENT_FIGURES.told(answer.metrics)
            self._hosted.set()
            CLIENT_FIGURES.report_if_due()
            time.sleep(HOST_INTERVAL_S)

    def _start_pull(self) -> None:
        """Make a broker start the node's Pull actor if the actor does not run."""
        try:
            self._pull.handle()
            return
        except ServiceNotAvailableError:
            pass
        for broker in self._instance.brokers:
            try:
                ActorRef(broker).call("start_pull", self._node_id, timeout_s=START_PULL_TIMEOUT_S)
            except RaymqError as error:
                logger.info("%s cannot start Pull actor %s: %s", broker, self._pull.name, error)
            else:
                return
