"""The append API of one store: checks batches, writes them and counts the stored messages.

This module decides how an append is counted and what it returns to its caller. durability.py decides what an append
waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from raymq.common.delay import is_waiting_topic
from raymq.common.errors import RaymqError
from raymq.common.names import STATE_TOPIC
from raymq.common.protocol.store import AppendResult
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.layout import IPV6_HOST_BYTES
from storage.append.appender import Appender
from storage.append.durability import (
    ReplicaAcks,
    SettledAppend,
    StartedAppend,
    WriteBatches,
    Written,
    waits_for,
)
from storage.append.fit_batch import FittedWrite
from storage.append.inner_batches import message_count
from storage.append.write_gate import WriteGate
from storage.parts import StoreParts
from storage.running_flags import AGAINST_APPENDS, AGAINST_STATE, RunningFlags
from storage.stats import StoreStats


class AppendService:
    """Appends batches to one store. Thread-safe: each write takes the append lock (WriteGate.write)."""

    def __init__(
        self,
        parts: StoreParts,
        gate: WriteGate,
        appender: Appender,
        *,
        flags: RunningFlags,
        stats: StoreStats,
        host: bytes,
        clock_ms: Callable[[], int],
    ) -> None:
        """`host`: the store's own encoded address. `clock_ms` returns the wall clock in ms since 1970."""
        self._gate, self._appender, self._flags, self._stats = gate, appender, flags, stats
        self._clock_ms = clock_ms
        self.write: WriteBatches = self._write_checked
        """Function that writes batches. FittedWrite wraps this function if records need a property CRC or an IPv6 store
        host. HookedWrite wraps it if put hooks are configured for the store."""
        property_crc, ipv6_store_host = parts.settings.enabled_append_prop_crc, len(host) == IPV6_HOST_BYTES
        if property_crc or ipv6_store_host:
            self.write = FittedWrite(
                self._write_checked,
                property_crc=property_crc,
                ipv6_store_host=ipv6_store_host,
                on_refused=stats.count_failed_put,
            )

    def append(
        self, batches: Sequence[EncodedBatch], *, timeout_s: float | None = None, acks: ReplicaAcks | None = None
    ) -> list[AppendResult]:
        """Store batches of any queues, in order, and return one result for each batch. A batch that an earlier send
        stored is not stored again.

        With SYNC_FLUSH the call returns once all batches are on disk, unless no batch waits (wait_store_msg_ok). After
        `timeout_s` (default: sync_flush_timeout_ms) the status is FLUSH_DISK_TIMEOUT: the batch is stored, but it is
        not known to be on disk. With ASYNC_FLUSH the call returns at once: stored messages survive the end of this
        process, but not a power cut. `acks`: the copies on other replicas that the append waits for afterwards
        (storage.append.durability).

        Before anything is written, raises MessageIllegalError if a batch fails a check, and ClientStateError if the
        producer is fenced. Raises SystemBusyError if other appends took longer than `timeout_s`, and
        ServiceNotAvailableError if the store is closed. Raises StoreNotWritableError if the disk is full or failed
        earlier, and InSyncReplicasError if too few replicas are in sync (`acks`).

        Raises StoreFailedError if the disk failed during the append: it is unknown which batches are stored, and the
        store takes no more appends.
        """
        started = self.start_append(batches, timeout_s=timeout_s, acks=acks)
        return self._gate.progress.wait_settled(started)

    def start_append(
        self, batches: Sequence[EncodedBatch], *, timeout_s: float | None = None, acks: ReplicaAcks | None = None
    ) -> StartedAppend:
        """Start an append as `append` does, but do not wait for the disk or for copies on replicas.

        On return the batches are written. Later `StartedAppend.settle` returns the results, or raises the errors of the
        flush and of the copies. This call may wait for the append lock, for at most wait_time_in_send_queue_ms.
        """
        start_s, gate = time.monotonic(), self._gate
        if timeout_s is None:
            timeout_s = gate.timeout_s
        waits = (gate.is_sync or acks is not None) and waits_for(batches, acks)
        written = self.write(batches, timeout_s)
        # Compute the message and byte counts now: the next append of the same direct socket connection (lane)
        # overwrites the records.
        puts = [(batch.topic, message_count(batch), len(batch.records)) for batch in batches]
        for batch in batches:
            if is_waiting_topic(batch.topic):
                # In a batch of delayed messages, the tag codes are the delivery times in ms. Add each message's
                # remaining delay, in seconds, to the statistics.
                self._stats.delays.add_many(np.maximum(batch.tag_codes - self._clock_ms(), 0) / 1000)
        if waits and gate.is_sync:
            count = partial(self._count_puts, puts, start_s)
            return StartedAppend(written, batches, gate, acks, deadline_s=start_s + timeout_s, on_disk=count)
        now_s = time.monotonic()
        self._count_puts(puts, start_s, now_s)
        if waits and acks is not None:
            return StartedAppend(written, batches, None, acks, deadline_s=now_s + acks.timeout_s)
        return SettledAppend(written[0], now_s)

    def _write_checked(self, batches: Sequence[EncodedBatch], timeout_s: float) -> Written:
        """Check batches and write them. If the check or the write fails, count a failed put and raise the
        error."""
        against = AGAINST_APPENDS
        if self._flags.any_set and all(batch.topic == STATE_TOPIC for batch in batches):
            against = AGAINST_STATE
        try:
            return self._gate.write(self._appender.prepare(batches), timeout_s, against)
        except RaymqError:
            self._stats.count_failed_put()
            raise

    def _count_puts(self, puts: Sequence[tuple[str, int, int]], start_s: float, end_s: float | None) -> None:
        """Update the statistics for an append that began at `start_s` and ended at `end_s`. The append counts even if
        it did not become durable before its timeout.

        The counted time includes the flush, but not the wait for replicas. `end_s` is None if the disk failed. `puts`:
        topic, message count and byte count of each batch.
        """
        if end_s is None:
            self._stats.count_failed_put()
            return
        took_s: float | None = end_s - start_s
        for topic, messages, size in puts:
            self._stats.count_put(topic, messages, size, took_s)
            took_s = None  # Count the append's duration once per append, not once per batch.
