"""What the threads of one Pull actor share: the queues in its hands, their lock, and how they wake each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from actors.core.consume.consume_stats import ConsumeStats
from actors.core.consume.process_queues import ProcessQueues
from raymq.consumer.push.settings import PushSettings
from raymq.message import MessageQueue


class InstanceState:
    """`core` and `stats` are used with `lock` held. `work` wakes the thread that feeds the listener."""

    def __init__(self, name: str, settings: PushSettings) -> None:
        self.name = name
        self.settings = settings
        self.lock = threading.Lock()
        self.core = ProcessQueues(settings)
        self.stats = ConsumeStats()
        self.work = threading.Event()
        self.stopping = threading.Event()
        self.on_room: Callable[[], None] = lambda: None
        """Something may be fetched that could not be before."""
        self.on_finished: Callable[[], None] = lambda: None
        """Something may be committed that could not be before."""
        self.on_released: Callable[[], None] = lambda: None
        """A queue was let go: somebody waits for it."""

    def holding(self) -> frozenset[MessageQueue]:
        with self.lock:
            return self.core.holding

    def grant(self, queues: Iterable[MessageQueue], generation: int) -> None:
        """Begin with queues."""
        with self.lock:
            for queue in queues:
                self.core.grant(queue, generation)
        self.on_finished()

    def revoke(self, queues: Iterable[MessageQueue]) -> None:
        """Let go of queues, as soon as what is under way is finished and committed."""
        with self.lock:
            for queue in queues:
                self.core.revoke(queue, time.monotonic())
        self.on_finished()

    def release(self) -> bool:
        """Let go of the queues that may be; whether there were any."""
        with self.lock:
            released = self.core.released(time.monotonic())
            for queue in released:
                self.core.drop(queue)
        if released:
            self.on_released()
        return bool(released)

    def drop_all(self) -> None:
        """Deliver and commit nothing more of anything."""
        with self.lock:
            for queue in self.core.holding:
                self.core.drop(queue)
