"""The loops of the phases of `raymq bench`, and the threads that run them.

A loop uses any producer or consumer, and counts in its own Tally, which only its thread writes. The main thread waits
for the loops in `Crew.wait`, so that ctrl-C interrupts the wait and never a call to a server.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any, Final, Protocol

from raymq.common.errors import RequestTimeoutError
from raymq.common.message import Message
from raymq.common.parallel import require_daemon
from raymq.tools.bench.plan import SendSchedule, due_ns_of, stamped_body

READ_WAIT_S: Final = 0.2
"""How long a read waits for its first message, in s. A stopped loop ends after this time at the latest."""
CREW_TICK_S: Final = 0.02
SHOWN_EVERY_S: Final = 0.25
"""Interval in s at which the progress of a phase is shown."""
LATE_SENDS_S: Final = 1.0
LAST_CALLS_S: Final = 40.0
"""Maximum wait in s for the threads of a phase to end their calls. It is longer than a send with its last attempt."""


class BenchSender(Protocol):
    """The methods of a Producer that the loops call."""

    def send(self, message: Message, /) -> Any: ...

    def send_batch(self, messages: Sequence[Message], /) -> Any: ...


class BenchPoller(Protocol):
    """The methods of a PullConsumer that the loops call."""

    def poll(self, max_messages: int, timeout_s: float) -> Sequence[Any]: ...

    def commit(self) -> Any: ...


class BenchReceiver(Protocol):
    """The methods of a SimpleConsumer that the loops call."""

    def receive(self, max_messages: int, *, wait_s: float) -> Sequence[Any]: ...

    def ack(self, messages: Sequence[Any]) -> Any: ...


class Tally:
    """The counts of one loop: its messages, the bytes of their bodies, latencies in s, and the time at which the last
    message was counted."""

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.latencies_s: array[float] = array("d")
        self.last_s = 0.0

    def count(self, messages: int, size: int, now_s: float) -> None:
        """Count messages whose bodies have `size` bytes together."""
        self.messages += messages
        self.bytes += size
        self.last_s = now_s


class PhaseLoop:
    """The loops of a phase, with the values that its threads share: the event that ends them, the clock, and the
    phase's start and end in s."""

    def __init__(self, seconds: float, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self.stop = Event()
        self.clock_s = clock_s
        self.start_s = clock_s()
        self.end_s = self.start_s + seconds

    def may_send(self, due_s: float) -> bool:
        """Wait until the time `due_s`. Returns False if the phase ends before, or was stopped. Late sends of a schedule
        have LATE_SENDS_S more, so that a stall at the end of a phase counts."""
        if due_s >= self.end_s or self.clock_s() >= self.end_s + LATE_SENDS_S:
            return False
        wait_s = due_s - self.clock_s()
        return not (self.stop.wait(wait_s) if wait_s > 0 else self.stop.is_set())

    def send_each(
        self,
        producer: BenchSender,
        tally: Tally,
        count: int,
        topic: str,
        body: bytes,
        *,
        index: int = 0,
        schedule: SendSchedule | None = None,
        token: int | None = None,
    ) -> None:
        """Send up to `count` messages one by one until the phase ends, and count the latency of each send.

        With a schedule, a latency begins at the scheduled time of thread `index`. With a token, each body has its
        scheduled time (`stamped_body`).
        """
        message = Message(topic, body)
        for number in range(count):
            begin_s = self.clock_s() if schedule is None else self.start_s + schedule.due_s(index, number)
            if not self.may_send(begin_s):
                return
            if token is not None:
                message = Message(topic, stamped_body(token, int(begin_s * 1e9), body))
            producer.send(message)
            now_s = self.clock_s()
            tally.latencies_s.append(now_s - begin_s)
            tally.count(1, len(body), now_s)

    def send_batches(self, producer: BenchSender, tally: Tally, count: int, message: Message, batch: int) -> None:
        """Send `count` messages in batches of `batch`, one batch after another, until the phase ends."""
        messages, left = [message] * batch, count
        while left > 0 and self.may_send(self.clock_s()):
            part = messages[: min(batch, left)]
            begin_s = self.clock_s()
            producer.send_batch(part)
            now_s = self.clock_s()
            tally.latencies_s.append(now_s - begin_s)
            tally.count(len(part), len(part) * len(message.body), now_s)
            left -= len(part)

    def poll_and_commit(self, consumer: BenchPoller, tally: Tally, most: int) -> None:
        """Poll up to `most` messages at a time, read their bodies and commit, until the phase is stopped."""
        while not self.stop.is_set():
            messages = consumer.poll(most, READ_WAIT_S)
            if messages:
                size = sum(len(message.body) for message in messages)
                consumer.commit()
                tally.count(len(messages), size, self.clock_s())

    def receive_and_acknowledge(self, consumer: BenchReceiver, tally: Tally, most: int) -> None:
        """Receive up to `most` messages at a time, and acknowledge them, until the phase is stopped."""
        while not self.stop.is_set():
            messages = consumer.receive(most, wait_s=READ_WAIT_S)
            if messages:
                size = sum(len(message.body) for message in messages)
                consumer.ack(messages)
                tally.count(len(messages), size, self.clock_s())

    def watch_delays(self, consumer: BenchPoller, tally: Tally, token: int, most: int) -> None:
        """Poll, and count the delay of each message of this run from its scheduled send, until the phase is stopped."""
        while not self.stop.is_set():
            messages = consumer.poll(most, READ_WAIT_S)
            now_s = self.clock_s()
            for message in messages:
                due_ns = due_ns_of(message.body, token)
                if due_ns is not None:
                    tally.latencies_s.append(now_s - due_ns / 1e9)
                    tally.count(1, len(message.body), now_s)


class Crew:
    """The threads of one phase, in a `with` block. If one thread fails, the others stop. At the end of the block all
    threads stop."""

    def __init__(self, loop: PhaseLoop) -> None:
        self._loop = loop
        self._threads: list[Thread] = []
        self._errors: list[Exception] = []

    def start(self, work: Callable[[], None]) -> Thread:
        """Run `work` in a thread."""
        thread = require_daemon(self._run, work, name="raymq-bench", what="raymq bench")
        self._threads.append(thread)
        return thread

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # `__exit__` raises the error in the main thread
            self._errors.append(error)
            self._loop.stop.set()

    def wait(self, until: Callable[[], bool], end_s: float, tick: Callable[[], None]) -> bool:
        """Wait until `until()` is true, until a thread fails, or until the time `end_s`. Calls `tick` now and then.
        Returns True if `until()` is true."""
        shown_s = self._loop.clock_s()
        while not (is_done := until()):
            now_s = self._loop.clock_s()
            if now_s >= end_s or self._loop.stop.wait(CREW_TICK_S):
                break
            if now_s - shown_s >= SHOWN_EVERY_S:
                shown_s = now_s
                tick()
        tick()
        return is_done

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop all threads and wait for their last calls. Without another exception, raises the first error of a
        thread, or RequestTimeoutError if a thread does not end in time."""
        self._loop.stop.set()
        end_s = time.monotonic() + LAST_CALLS_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        if kind is not None:
            return
        if self._errors:
            raise self._errors[0]
        if any(thread.is_alive() for thread in self._threads):
            raise RequestTimeoutError("the last call of a phase of raymq bench", LAST_CALLS_S)
