"""QueueWatch calls a program's listener when a topic's queues change (RocketMQ's TopicMessageQueueChangeListener)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from raymq.common.errors import RaymqError
from raymq.common.message import MessageQueue

QueueChangeListener = Callable[[str, list[MessageQueue]], None]
"""Called with the topic and its queues, sorted."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    """A registered listener; `known` are the topic's queues at the last check."""

    topic: str
    callback: QueueChangeListener
    known: list[MessageQueue]


class QueueWatch:
    """Looks at topics every `interval_s` in a thread of its own, which also calls the listeners, one after another.

    `queues_of(topic)` gives a topic's queues now. While it raises a RaymqError (no NameServer answers, or there is no
    such topic), no listener of that topic is called.
    """

    def __init__(self, queues_of: Callable[[str], list[MessageQueue]], interval_s: float, name: str) -> None:
        self._queues_of = queues_of
        self._interval_s = interval_s
        self._name = name
        self._lock = threading.Lock()
        self._watched: list[_Watched] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def register(self, topic: str, callback: QueueChangeListener) -> None:
        """Call `callback` when the topic's queues differ from what they are now, and at each later change."""
        watched = _Watched(topic, callback, self._queues_of(topic))
        with self._lock:
            self._watched.append(watched)
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Call no listener any more. A call under way is not waited for: it may be the one that stops the watch."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            with self._lock:
                watched = list(self._watched)
            for entry in watched:
                self._check(entry)

    def _check(self, entry: _Watched) -> None:
        try:
            queues = self._queues_of(entry.topic)
        except RaymqError as error:
            logger.info("the queues of topic %s cannot be looked at: %s", entry.topic, error)
            return
        if queues == entry.known or self._stopped.is_set():
            return
        entry.known = queues
        try:
            entry.callback(entry.topic, list(queues))
        except Exception:  # the program's code; the other listeners are still to be called
            logger.exception("the queue-change listener of topic %s failed", entry.topic)
