"""The one table of raymq's metrics: names, labels, units and meanings.

Ray exposes a gauge `x` as `ray_x` and a counter `x` as `ray_x_total`. A histogram here is three gauges that only grow,
`x_bucket` with the label `le`, `x_sum` and `x_count`, because Ray's own histogram costs the node's agent time for each
observation, and has a wrong sum. A row is added here first: a Reporter refuses names and labels that are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final


class InstrumentKind(Enum):
    """The kinds of instruments: a running total, a present value, a distribution."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """One row of the table.

    `labels`: all of them, `cluster` and `broker` included. `bounds`: the upper ends of a histogram's buckets, in
    `unit`; one more takes what is larger. `rocketmq`: RocketMQ 5's name, "=" where only the prefix differs, and empty
    where it has none. `reported_by`: the actor, or the client, that reports it.
    """

    name: str
    kind: InstrumentKind
    labels: tuple[str, ...]
    unit: str
    description: str
    rocketmq: str
    reported_by: str
    bounds: tuple[int, ...] = ()


COMMON_LABELS: Final = ("cluster", "broker")
"""Labels of every instrument; `broker` is empty where a figure is of no broker group."""
OTHER: Final = "(other)"
"""The topic, or the group, under which those beyond the limits are summed."""
REPORT_INTERVAL_S: Final = 10.0
"""The period between reports. Ray drops a gauge that was not set for 20 s."""

_C, _G, _H = InstrumentKind.COUNTER, InstrumentKind.GAUGE, InstrumentKind.HISTOGRAM
_LAG: Final = "consumer_group topic is_retry is_system"
_STORED: Final = "storage storage_type storage_medium"
_CREATE_MS: Final = (10, 100, 1000, 3000, 5000)
_CLIENT_MS: Final = (1, 5, 10, 20, 50, 200, 500)
_PUT_MS: Final = (1, 5, 10, 50, 100, 200, 500, 1000, 5000, 10_000)

# Kind, name, further labels, unit, RocketMQ's name, who reports it, description, bounds.
_Row = (
    tuple[InstrumentKind, str, str, str, str, str, str]
    | tuple[InstrumentKind, str, str, str, str, str, str, tuple[int, ...]]
)

_SERVERS: Final[tuple[_Row, ...]] = (
    (_G, "up", "role name", "1", "proxy_up", "every actor", "1 while an actor of raymq runs."),
    (_G, "broker_permission", "", "bits", "=", "Broker", "4: it can be read; 2: it can be written."),
    (_G, "topic_number", "", "topics", "=", "Broker", "Topics of the broker group, internal ones left out."),
    (_G, "consumer_group_number", "", "groups", "=", "Broker", "Consumer groups of the broker group."),
    (
        *(_H, "topic_create_execution_time_milliseconds", "invocation_status", "ms", "topic_create_execution_time"),
        *("Broker", "How long it took to create topics.", _CREATE_MS),
    ),
    (
        *(_H, "consumer_group_create_execution_time_milliseconds", "invocation_status", "ms"),
        *("consumer_group_create_execution_time", "Broker", "How long it took to create groups.", _CREATE_MS),
    ),
    (_G, "broker_has_master", "", "0/1", "", "Controller", "1 while the broker group has a master."),
    (_G, "broker_epoch", "", "epoch", "", "Controller", "The epoch of the broker group's master."),
    (_G, "replicas", "", "replicas", "", "Controller", "Replicas that should be in sync: all but learners."),
    (_G, "in_sync_replicas", "", "replicas", "", "Controller", "Replicas in sync, the master included."),
    (_G, "replica_lag_bytes", "storage role", "bytes", "", "Controller", "What a replica lacks of its master's log."),
    (_G, "replica_lag_milliseconds", "storage role", "ms", "", "Controller", "How long a replica has been behind."),
    (_C, "election", "election_result", "elections", "=", "Controller", "New epochs, and elections without a winner."),
    (_G, "active_broker_num", "", "brokers", "=", "Controller", "Broker groups of several replicas with a master."),
)

_MESSAGES: Final[tuple[_Row, ...]] = (
    (
        *(_C, "messages_in", "storage topic message_type is_system", "messages", "=", "Storage"),
        "Messages stored; repeats that were recognised are not counted.",
    ),
    (
        *(_C, "throughput_in", "storage topic message_type is_system", "bytes", "=", "Storage"),
        "Bytes of the records stored.",
    ),
    (
        *(_H, "message_size", "storage message_type", "bytes", "=", "Storage"),
        *("Mean sizes of the records of a batch.", (1 << 10, 4 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)),
    ),
    (
        *(_C, "messages_out", "topic consumer_group is_retry is_system", "messages", "=", "Broker"),
        "Messages that groups have committed.",
    ),
    (_C, "throughput_out", "topic consumer_group", "bytes", "=", "Pull, pull consumer", "Bytes of records fetched."),
    (
        _C,
        "send_to_dlq_messages",
        "consumer_group topic",
        "messages",
        "=",
        "Broker",
        "Messages that became dead letters.",
    ),
    (_C, "send_back_messages", "consumer_group topic", "messages", "", "Broker", "Messages that groups gave back."),
    (_G, "dead_letters", "consumer_group", "messages", "", "Broker", "Dead letters that were not replayed yet."),
    (
        *(_G, "producer_connections", "language version", "clients", "=", "Broker"),
        "Producers that send heartbeats; each tells every broker, so take the largest.",
    ),
    (
        *(
            _G,
            "consumer_connections",
            "consumer_group consume_mode language version is_system",
            "clients",
            "=",
            "Broker",
        ),
        "Consumers that send heartbeats; each tells every broker, so take the largest.",
    ),
    (
        *(_G, "consumer_lag_messages", _LAG, "messages", "=", "Broker"),
        "Messages that a group has not committed. A broker reports 0 for at most 200 groups and topics.",
    ),
    (
        *(_G, "consumer_lag_latency_milliseconds", _LAG, "ms", "consumer_lag_latency", "Broker"),
        "Age of the oldest message that a group has not committed.",
    ),
    (_G, "consumer_inflight_messages", _LAG, "messages", "=", "Pull, Broker", "Messages handed out and not committed."),
    (_G, "consumer_ready_messages", _LAG, "messages", "=", "Pull", "Messages that can be fetched and were not yet."),
    (
        *(_G, "consumer_queueing_latency_milliseconds", _LAG, "ms", "consumer_queueing_latency", "Pull"),
        "Age of the oldest message that was not fetched.",
    ),
)

_STORES: Final[tuple[_Row, ...]] = (
    (
        *(_H, "rpc_latency_milliseconds", "storage request_code response_code is_long_polling", "ms", "rpc_latency"),
        "Storage",
        "How long requests took in the store: appends and fetches. Reads of its mapped files by consumers on its node "
        "are no requests.",
        (1, 3, 5, 7, 10, 100, 1000, 2000, 3000),
    ),
    (_H, "put_latency_milliseconds", "storage", "ms", "", "Storage", "How long appends took, flush included.", _PUT_MS),
    (_C, "put_failed", "storage", "appends", "", "Storage", "Appends that failed."),
    (_C, "duplicates_dropped", "storage", "messages", "", "Storage", "Repeated messages that were recognised."),
    (
        _G,
        "processor_watermark",
        "storage processor",
        "calls",
        "=",
        "Storage, Broker",
        "Calls that wait, by what they wait for.",
    ),
    (
        _G,
        "request_wait_milliseconds",
        "storage processor",
        "ms",
        "",
        "Storage, Broker",
        "The longest wait of a call for a thread in the last minute.",
    ),
    (
        _C,
        "requests_refused",
        "storage processor reason",
        "calls",
        "",
        "Storage, Broker",
        "Calls refused as busy: too many waited (full), or it had waited too long (late).",
    ),
    (_G, "storage_size_bytes", _STORED, "bytes", "storage_size", "Storage", "Length of the commit log."),
    (_G, "storage_flush_behind_bytes", _STORED, "bytes", "=", "Storage", "Written and not flushed yet."),
    (_G, "storage_dispatch_behind_bytes", _STORED, "bytes", "=", "Storage", "Visible and not in the index yet."),
    (
        *(_G, "storage_message_reserve_time_milliseconds", _STORED, "ms", "storage_message_reserve_time", "Storage"),
        "Age of the first message held.",
    ),
    (_G, "storage_disk_ratio", "storage path", "0–1", "", "Storage", "How full the store's disk is."),
    (_G, "storage_writable", "storage", "0/1", "", "Storage", "1 while the store takes appends."),
    (
        _G,
        "storage_disk_failed",
        "storage",
        "0/1",
        "",
        "Storage",
        "1 from a failure of the disk until the store is opened again.",
    ),
    (_G, "log_holes", "storage", "ranges", "", "Storage", "Damaged ranges of the log with intact records behind them."),
    (_G, "log_hole_bytes", "storage", "bytes", "", "Storage", "The bytes in the damaged ranges of the log."),
    (
        _C,
        "log_mended_bytes",
        "storage",
        "bytes",
        "",
        "Storage",
        "Damaged bytes replaced by another replica's good ones.",
    ),
    (_C, "log_holes_mended", "storage", "ranges", "", "Storage", "Damaged ranges that were replaced in full."),
    (_G, "damaged_files", "storage", "files", "", "Storage", "Files beside the log found damaged at the last opening."),
    (_G, "recovery_cut_bytes", "storage", "bytes", "", "Storage", "What the last recovery cut off the log's end."),
    (_G, "timing_messages", "storage topic", "messages", "=", "Storage", "Delayed messages that wait, by level."),
    (
        _G,
        "timer_dequeue_lag",
        "storage",
        "messages",
        "=",
        "Storage",
        "Delayed messages in the delivery under way.",
    ),
    (
        *(_G, "timer_dequeue_latency_milliseconds", "storage", "ms", "timer_dequeue_latency", "Storage"),
        "How late delayed messages are delivered now.",
    ),
    (_C, "timer_enqueue", "storage topic", "messages", "=", "Storage", "Delayed messages stored."),
    (_C, "timer_dequeue", "storage topic", "messages", "=", "Storage", "Delayed messages delivered."),
    (
        *(_G, "timer_message_snapshot", "storage timer_bound_s", "messages", "=", "Storage"),
        "Delayed messages that wait, by the hour in which they are due.",
    ),
    (
        *(_H, "delay_message_latency_seconds", "storage", "s", "delay_message_latency", "Storage"),
        *("Delays that were asked for.", (60, 600, 3600, 43_200, 86_400, 259_200)),
    ),
    (_G, "half_messages", "storage", "messages", "=", "Storage", "Transactions that were not ended yet."),
    (_C, "commit_messages", "storage topic", "messages", "=", "Storage", "Transactions committed."),
    (_C, "rollback_messages", "storage", "messages", "=", "Storage", "Transactions rolled back."),
    (
        *(_H, "finish_message_latency_milliseconds", "storage topic", "ms", "finish_message_latency", "Storage"),
        *("Time from a half message to its end.", (5, 10, 30, 100, 500, 1000, 5000, 60_000)),
    ),
)

_CLIENTS: Final[tuple[_Row, ...]] = (
    (
        *(_H, "send_cost_time_milliseconds", "topic invocation_status", "ms", "send_cost_time", "Producer"),
        *("Time from send to acknowledgement.", _CLIENT_MS),
    ),
    (
        *(_H, "delivery_latency_milliseconds", "topic consumer_group", "ms", "delivery_latency"),
        *("Pull, pull consumer", "Time from the store to the consumer.", _CLIENT_MS),
    ),
    (
        *(_H, "await_time_milliseconds", "topic consumer_group", "ms", "await_time", "Pull"),
        *("Time that messages wait for a thread of their consumer.", (1, 5, 20, 100, 1000, 5000, 10_000)),
    ),
    (
        *(_H, "process_time_milliseconds", "topic consumer_group invocation_status", "ms", "process_time", "Listener"),
        *("Time in the user's listener.", (1, 5, 10, 100, 10_000, 60_000)),
    ),
    (
        *(_C, "unreadable_messages", "topic consumer_group", "messages", "", "Pull, pull consumer"),
        "Damaged messages, and messages whose body does not decompress, that consumers went past.",
    ),
    (_G, "consumer_cached_messages", "topic consumer_group", "messages", "=", "Pull", "Messages held for Listeners."),
    (_G, "consumer_cached_bytes", "topic consumer_group", "bytes", "=", "Pull", "Bytes held for Listeners."),
    (
        *(_G, "pop_leased_messages", "consumer_group topic", "messages", "", "Broker"),
        "Messages that simple consumers hold and have not acknowledged.",
    ),
)


def _instruments(rows: Iterable[_Row]) -> dict[str, Instrument]:
    table = {}
    for kind, short, further, unit, rocketmq, reported_by, description, *bounds in rows:
        name = f"raymq_{short}"
        labels = (*COMMON_LABELS, *further.split())
        table[name] = Instrument(
            name, kind, labels, unit, description, rocketmq, reported_by, bounds[0] if bounds else ()
        )
    return table


INSTRUMENTS: Final[dict[str, Instrument]] = _instruments(_SERVERS + _MESSAGES + _STORES + _CLIENTS)
"""Every instrument, by its name."""
