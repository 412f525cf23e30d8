"""The state of one push-consumer instance that several threads of a Pull actor share: its ProcessQueues, their lock,
and callbacks.

Members, OffsetCommitter, ListenerFeed and Fetcher share this state. Put new decisions about queues not here, but into
actors.core.consume.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from actors.core.consume.consume_stats import ConsumeStats
from actors.core.consume.process_queues import ProcessQueues
from raymq.client.consumer.push.settings import PushSettings
from raymq.common.message import MessageQueue


class InstanceState:
    """The shared state of one push-consumer instance. Callers must hold `lock` while they use `core` and `stats`, and
    must make no blocking call under `lock`."""

    def __init__(self, name: str, settings: PushSettings) -> None:
        self.name = name
        """The push-consumer instance's name, which is also its member name in the group."""
        self.settings = settings
        self.lock = threading.Lock()
        """Lock that guards the attributes `core` and `stats`."""
        self.core = ProcessQueues(settings)
        self.stats = ConsumeStats()
        self.stopping = threading.Event()
        """Event that is set when the push-consumer instance must stop."""
        self.on_fetchable: Callable[[], None] = lambda: None
        """Callback that is called when messages of a queue of this push-consumer instance may be fetched again."""
        self.on_committable: Callable[[], None] = lambda: None
        """Callback that is called when the push-consumer instance may have offsets to commit."""

    def holding(self) -> frozenset[MessageQueue]:
        """Return the queues that this push-consumer instance holds, so that the group must not grant them to other
        members."""
        with self.lock:
            return self.core.holding

    def stop(self) -> None:
        """Accept no more queues, and stop delivering messages of the queues that the push-consumer instance holds.
        These queues are released after their messages are committed."""
        self.stopping.set()
        with self.lock:
            self.core.stop(time.monotonic())
        self.on_committable()
