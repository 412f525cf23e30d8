"""The consumer of a chaos test: it reads a topic all the time, and records every message with its queue and
offset."""

from __future__ import annotations

import threading
import time
from collections import Counter

import raymq
from raymq.common.errors import RaymqError
from raymq.common.message import MessageQueue
from tests.support.history.observations import Observation, Observations, Seen

POLL_S = 0.5
MAX_MESSAGES = 500
STOP_TIMEOUT_S = 60.0


class Watcher:
    """A pull consumer that polls in a thread of its own. With `patient`, the thread continues after an error that
    permits a retry. Each message is also a READ in `observations`, if given."""

    def __init__(
        self,
        mq: raymq.Client,
        topic: str,
        group: str,
        *,
        patient: bool = False,
        observations: Observations | None = None,
    ) -> None:
        self._mq, self._topic, self._group, self._patient = mq, topic, group, patient
        self._observations = observations
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self.seen: Counter[tuple[MessageQueue, int, bytes]] = Counter()
        """How often each message was delivered, by the message's queue, queue offset and body."""

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._thread.join(STOP_TIMEOUT_S)
        assert not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Return whether an error has stopped the consumer's thread. `check` raises AssertionError in that
        case."""
        return bool(self._failures)

    def check(self) -> None:
        """Raise AssertionError if an error has stopped the consumer's thread."""
        assert self._failures == []

    def _run(self) -> None:
        first = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
        try:
            with self._mq.pull_consumer(self._group, consume_from=first) as consumer:
                consumer.subscribe(self._topic)
                while not self._stopping.is_set():
                    self._read(consumer)
        except BaseException as error:  # keep the error of this reading thread; `check` raises it in the test's thread
            self._failures.append(error)

    def _read(self, consumer: raymq.PullConsumer) -> None:
        begin_s = time.monotonic()
        try:
            messages = consumer.poll(max_messages=MAX_MESSAGES, timeout_s=POLL_S)
        except RaymqError as error:
            if not (self._patient and error.retryable):
                raise
            return
        self.seen.update((message.queue, message.queue_offset, message.body) for message in messages)
        if self._observations is not None:
            end_s = time.monotonic()
            self._observations.extend(
                Observation(Seen.READ, begin_s, end_s, one.queue, one.queue_offset, one.body, self._group)
                for one in messages
            )
