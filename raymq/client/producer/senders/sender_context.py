"""SenderContext: the objects that all senders of a producer share. This module also marks the threads of senders, and
has the senders without a thread (ThreadlessSenders)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from raymq.client.producer.buffer_pool import BufferPool
from raymq.client.producer.observers import SendObserver
from raymq.client.producer.open_batches import OpenBatches
from raymq.client.producer.senders.encoder import BatchEncoder
from raymq.client.producer.senders.latency_fault import BrokerFaults
from raymq.client.producer.senders.send_batch import SendBatch
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.storage_client import StorageClient, StorageDescription


class Pauses(Protocol):
    """Computes the pauses between a sender's attempts (raymq.common.retry.Backoff)."""

    def next(self) -> float: ...

    def reset(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SenderContext:
    """The objects and settings that all senders of a producer share.

    `lock` guards the senders' states, the buffer pool and the open batches. `move(batch, broker_name)` gives a batch to
    the sender of a broker other than `broker_name`. It returns False if no other broker can accept the batch. `clock`
    returns monotonic time in seconds.
    """

    lock: threading.Lock
    clock: Callable[[], float]
    pauses: Callable[[], Pauses]
    routes: RouteSource
    storage: Callable[[str], StorageClient]
    encoder: BatchEncoder
    buffer: BufferPool
    open_batches: OpenBatches
    faults: BrokerFaults
    move: Callable[[SendBatch, str], bool]
    attempt_timeout_s: float
    retry_when_not_store_ok: bool
    max_message_size_bytes: int
    observers: tuple[SendObserver, ...]
    threadless: ThreadlessSenders
    """The senders that have no thread, because they were made while the interpreter shut down."""


class _InSender(threading.local):
    """Thread-local flag: `active` is True in the thread of a sender, and False in each other thread."""

    active = False


_in_sender = _InSender()


def mark_sender_thread() -> None:
    """Mark the current thread as a sender's thread, so that `in_sender` returns True in it."""
    _in_sender.active = True


def in_sender() -> bool:
    """Return True if the current thread is a sender's thread. A sender's thread runs the callbacks of futures and
    hooks, and must never wait for itself."""
    return _in_sender.active


class ThreadlessSender(Protocol):
    """The methods of a sender without a thread that ThreadlessSenders calls."""

    def has_work(self) -> bool:
        """Return True if the sender has an attempt to make."""

    def send_here(self, limit_s: float) -> None:
        """Make the sender's next attempt in the calling thread, if it has one to make. Waits no longer than until the
        monotonic time `limit_s`."""


class ThreadlessSenders:
    """The senders of one producer without a thread, and the turn to send for them. Thread-safe.

    One thread at a time has the turn, and sends for all these senders. Other threads wait for the turn, but never
    longer than until their own deadline. While a message waits, some thread has the turn or is about to take it. So the
    owner of the turn gives it up only if no message waits, or if another thread waits for the turn.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.senders: list[ThreadlessSender] = []
        self._changed = threading.Condition()
        """Guards the attributes below. It is notified after each round of attempts."""
        self._owner: int | None = None
        """Id of the thread that has the turn; None if no thread has it."""
        self._waiting = 0
        """Number of threads that wait for the turn and may take it over."""

    def __bool__(self) -> bool:
        return bool(self.senders)

    def send(self, until_s: float, is_done: Callable[[], bool], *, leaves: bool = False) -> None:
        """Send the messages that wait for these senders, in the calling thread or in the thread that has the turn.

        Returns without the turn at the monotonic time `until_s`, or earlier if `is_done()` is true. A thread that got
        the turn returns after no message waits. After `until_s`, or if `is_done()`, it leaves the rest to another
        thread that waits. With `leaves`, it returns soon after `until_s` in any case. A message's callback may enqueue
        further messages, which are also sent.
        """
        before, me = _in_sender.active, threading.get_ident()
        try:
            if not self._take_turn(until_s, is_done, counts=not leaves):
                return
            _in_sender.active = True
            while not self._end_turn(until_s, is_done, leaves=leaves):
                for sender in list(self.senders):
                    sender.send_here(until_s if leaves else math.inf)
        finally:
            _in_sender.active = before
            # a signal handler has interrupted this thread, so another thread must take over the turn
            if self._owner == me:
                with self._changed:
                    self._owner = None
                    self._changed.notify_all()

    def _take_turn(self, until_s: float, is_done: Callable[[], bool], *, counts: bool) -> bool:
        """Wait for the turn, and take it. Returns False if another thread still has the turn at the end of the wait.
        `counts`: the owner of the turn may leave the rest of the messages to this thread."""
        with self._changed:
            self._waiting += counts
            try:
                while self._owner is not None and not is_done() and (left_s := until_s - self._clock()) > 0:
                    self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            finally:
                self._waiting -= counts
            if self._owner is not None:
                return False
            self._owner = threading.get_ident()
            return True

    def _end_turn(self, until_s: float, is_done: Callable[[], bool], *, leaves: bool) -> bool:
        """Give up the turn if its owner has done its part. Returns False if the owner must make another round of
        attempts."""
        with self._changed:
            # wake the threads whose messages have outcomes since the last round
            self._changed.notify_all()
            if any(sender.has_work() for sender in self.senders):
                is_late = self._clock() >= until_s
                if not (leaves and is_late) and not (self._waiting and (is_late or is_done())):
                    return False
            self._owner = None
            return True


Target = tuple[StorageClient, StorageDescription]
"""The target of a sender's requests: the client of the master's storage actor, and the actor's
StorageDescription."""
