"""The state that the threads of a Pull actor share about one instance: its ProcessQueues, their lock, and callbacks.

State belongs here if several parts of the actor (members, OffsetCommitter, ListenerFeed, Fetcher) need it; decisions
about queues belong in actors.core.consume.
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
    """One push-consumer instance. Use `core` and `stats` only under `lock`, and make no blocking call under it."""

    def __init__(self, name: str, settings: PushSettings) -> None:
        self.name = name
        """The instance's name, which is also its member name in the group."""
        self.settings = settings
        self.lock = threading.Lock()
        """Guards `core` and `stats`."""
        self.core = ProcessQueues(settings)
        self.stats = ConsumeStats()
        self.stopping = threading.Event()
        """Set when the instance should end."""
        self.on_fetchable: Callable[[], None] = lambda: None
        """Called when something becomes fetchable."""
        self.on_committable: Callable[[], None] = lambda: None
        """Called when something becomes committable."""

    def holding(self) -> frozenset[MessageQueue]:
        """Return the queues that the group must not grant to others."""
        with self.lock:
            return self.core.holding

    def stop(self) -> None:
        """Take no more queues, and stop delivering the held ones. They are released once their messages are
        committed.
        """
        self.stopping.set()
        with self.lock:
            self.core.stop(time.monotonic())
        self.on_committable()
