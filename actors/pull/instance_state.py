"""InstanceState is the state that the threads of a Pull actor share about one instance: its ProcessQueues, their lock,
and callbacks.

A change belongs here if several parts of the actor (members, OffsetCommitter, ListenerFeed, Fetcher) need it;
decisions about queues belong into actors.core.consume.
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
    """One push-consumer instance. Use `core` and `stats` with `lock` held only, and call nothing that waits then."""

    def __init__(self, name: str, settings: PushSettings) -> None:
        self.name = name
        """The instance's name, which is the member's name in its group."""
        self.settings = settings
        self.lock = threading.Lock()
        """Guards `core` and `stats`."""
        self.core = ProcessQueues(settings)
        self.stats = ConsumeStats()
        self.stopping = threading.Event()
        """Set once the instance is to end."""
        self.on_fetchable: Callable[[], None] = lambda: None
        """Called when something may be fetched that could not be before."""
        self.on_committable: Callable[[], None] = lambda: None
        """Called when something may be committed that could not be before."""

    def holding(self) -> frozenset[MessageQueue]:
        """The queues that the group must not grant to others."""
        with self.lock:
            return self.core.holding

    def stop(self) -> None:
        """Take no further queue, and deliver nothing more of those held; they are released once their
        messages are finished and committed."""
        self.stopping.set()
        with self.lock:
            self.core.stop(time.monotonic())
        self.on_committable()
