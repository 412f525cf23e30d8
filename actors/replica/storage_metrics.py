"""The metrics of a storage actor: the counters and the state of its store, as metric series
(raymq.telemetry.metrics.instruments).

The store counts in plain Python numbers. Every ten seconds the actor's metrics thread reports the counts under the
metrics' names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from actors.request_pool import report_requests
from raymq.common.delay import is_waiting_topic
from raymq.common.errors import RaymqError
from raymq.common.names import HALF_TOPIC, is_system_topic
from raymq.common.protocol.attributes import TopicMessageType
from raymq.common.protocol.stats import RequestFigures
from raymq.common.protocol.store import ScheduleStatus, ScrubStatus, StoreStatus
from raymq.telemetry.metrics.reporter import Reporter
from storage.message_store import MessageStore
from storage.stats import PutKind

STORED: Final = {"storage_type": "local", "storage_medium": "disk"}
_LABELS: Final = {TopicMessageType.FIFO: "fifo", TopicMessageType.PRIORITY: "priority"}
"""The label of a topic's ordinary messages, for the types of topics whose messages have a chosen queue."""


class StorageMetrics:
    """Collects and reports the metrics of one storage actor.

    `store` returns the open store, or raises a raymq error. `appends` returns the number of running appends. `requests`
    returns metrics of the requests that wait for a thread of the actor's lanes (direct socket connections).
    """

    def __init__(
        self,
        store: Callable[[], MessageStore],
        appends: Callable[[], int],
        requests: Callable[[], Sequence[RequestFigures]],
    ) -> None:
        self._store, self._appends, self._requests = store, appends, requests

    def report(self, reporter: Reporter) -> None:
        """Report all metrics of the storage actor. A store that cannot be opened is reported as not writable, without
        other metrics."""
        try:
            store = self._store()
        except RaymqError:
            reporter.gauge("raymq_storage_writable", 0)
            return
        status = store.status()
        _report_state(reporter, status, _reserved_ms(store))
        _report_puts(reporter, store)
        if status.schedule is not None:
            _report_schedule(reporter, status.schedule)
        _report_transactions(reporter, store)
        reporter.gauge("raymq_processor_watermark", self._appends(), processor="append")
        reporter.gauge("raymq_processor_watermark", status.waiting_fetches, processor="fetch")
        report_requests(reporter, self._requests())


def _report_puts(reporter: Reporter, store: MessageStore) -> None:
    types = store.topics.message_types()
    for (topic, kind), puts in store.stats.received().items():
        is_system = is_system_topic(topic)
        labels = {"topic": topic, "message_type": _message_type(topic, kind, types), "is_system": is_system}
        reporter.count("raymq_messages_in", puts.messages, **labels)
        reporter.count("raymq_throughput_in", puts.bytes, **labels)
        if kind is PutKind.DELAY:
            reporter.count("raymq_timer_dequeue", puts.messages, topic=topic)
        if is_waiting_topic(topic):
            reporter.count("raymq_timer_enqueue", puts.messages, topic=topic)
        if kind is PutKind.TRANSACTION and not is_system:
            reporter.count("raymq_commit_messages", puts.messages, topic=topic)
    for kind, sizes in store.stats.sizes().items():
        reporter.buckets("raymq_message_size", sizes, message_type=kind.value)
    reporter.buckets("raymq_put_latency_milliseconds", store.stats.put_latency.figures())
    reporter.buckets("raymq_delay_message_latency_seconds", store.stats.delays.figures())
    reporter.count("raymq_put_failed", store.stats.puts_failed)
    request = {"response_code": "SUCCESS", "is_long_polling": False}
    for code, latency in {"send": store.stats.send_latency, "pull": store.stats.get_latency}.items():
        reporter.buckets("raymq_rpc_latency_milliseconds", latency.figures(), request_code=code, **request)


def _message_type(topic: str, kind: PutKind, types: Mapping[str, TopicMessageType]) -> str:
    if is_waiting_topic(topic):
        return PutKind.DELAY.value
    if topic == HALF_TOPIC:
        return PutKind.TRANSACTION.value
    label: str = kind.value
    return _LABELS.get(types[topic], label) if kind is PutKind.NORMAL and topic in types else label


def _report_state(reporter: Reporter, status: StoreStatus, reserved_ms: int) -> None:
    size = status.max_physical_offset - status.min_physical_offset
    unflushed = max(status.max_physical_offset - status.flushed_physical_offset, 0)
    reporter.gauge("raymq_storage_size_bytes", size, **STORED)
    reporter.gauge("raymq_storage_flush_behind_bytes", unflushed, **STORED)
    reporter.gauge("raymq_storage_dispatch_behind_bytes", status.index_behind_bytes, **STORED)
    reporter.gauge("raymq_storage_message_reserve_time_milliseconds", reserved_ms, **STORED)
    reporter.gauge("raymq_storage_writable", status.writable)
    reporter.gauge("raymq_storage_disk_failed", bool(status.disk_failure))
    reporter.gauge("raymq_recovery_cut_bytes", status.cut_bytes)
    reporter.gauge("raymq_log_holes", len(status.holes))
    reporter.gauge("raymq_log_hole_bytes", sum(hole.size for hole in status.holes))
    reporter.count("raymq_log_mended_bytes", status.mended_bytes)
    reporter.count("raymq_log_holes_mended", status.mended_holes)
    reporter.count("raymq_log_holes_found", status.found_holes)
    reporter.count("raymq_damage_reports", status.damage_reports)
    reporter.gauge("raymq_damaged_files", len(status.damaged_files))
    reporter.count("raymq_duplicates_dropped", status.duplicates_dropped)
    _report_scrub(reporter, status.scrub)
    if status.retention is not None and status.retention.disk_ratio >= 0:
        reporter.gauge("raymq_storage_disk_ratio", status.retention.disk_ratio, path=status.root)


def _report_scrub(reporter: Reporter, scrub: ScrubStatus) -> None:
    reporter.count("raymq_scrub_bytes", scrub.read_bytes)
    reporter.count("raymq_scrub_found", scrub.found_ever)
    reporter.count("raymq_scrub_repaired", scrub.repaired_ever)
    reporter.gauge("raymq_scrub_unrepaired", len(scrub.unrepaired))
    reporter.gauge("raymq_scrub_age_seconds", scrub.age_ms / 1000)
    reporter.gauge("raymq_scrub_overdue", scrub.overdue)


def _report_schedule(reporter: Reporter, schedule: ScheduleStatus) -> None:
    for level, pending in schedule.pending.items():
        reporter.gauge("raymq_timing_messages", pending, topic=level)
    for hours, pending in schedule.pending_by_hour.items():
        reporter.gauge("raymq_timer_message_snapshot", pending, timer_bound_s=(hours + 1) * 3600)
    reporter.gauge("raymq_timer_dequeue_lag", schedule.due)
    reporter.gauge("raymq_timer_dequeue_latency_milliseconds", schedule.late_ms)


def _report_transactions(reporter: Reporter, store: MessageStore) -> None:
    figures = store.transactions.figures()
    reporter.gauge("raymq_half_messages", sum(one.waiting for one in figures.waiting))
    reporter.count("raymq_rollback_messages", figures.rolled_back)
    for topic, latencies in store.transactions.finish_latencies().items():
        reporter.buckets("raymq_finish_message_latency_milliseconds", latencies, topic=topic)


def _reserved_ms(store: MessageStore) -> int:
    """Return the age, in ms, of the oldest stored message. Returns 0 if the store is empty, or if it refuses
    reads now."""
    try:
        earliest_ms = store.queries.earliest_store_time_ms()
    except RaymqError:
        return 0
    return max(time.time_ns() // 1_000_000 - earliest_ms, 0) if earliest_ms > 0 else 0
