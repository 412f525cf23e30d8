"""SenderContext: the objects that all senders of a producer share. This module also marks the threads of
senders."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
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
    threadless: list[Callable[[], bool]] = field(default_factory=list)
    """The method `send_here` of each sender that has no thread, because it was made while the interpreter shut
    down."""
    sending_here: threading.RLock = field(default_factory=threading.RLock)
    """Held by the thread that sends for the senders without a thread."""


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


def send_threadless(context: SenderContext) -> None:
    """Send all waiting messages of the senders without a thread, in the calling thread. Returns after no such message
    waits.

    A message's callback may enqueue further messages, which are also sent. If the calling thread already sends for
    these senders, the outer call sends the messages.
    """
    with context.sending_here:
        before, _in_sender.active = _in_sender.active, True
        try:
            has_sent = True
            while has_sent:
                has_sent = False
                for send_here in list(context.threadless):
                    has_sent |= send_here()
        finally:
            _in_sender.active = before


Target = tuple[StorageClient, StorageDescription]
"""The target of a sender's requests: the client of the master's storage actor, and the actor's
StorageDescription."""
