"""The panels of the Grafana dashboard, as a table of rows of charts.

Each chart names its instruments (metrics). Its title, unit and help text come from the table of instruments
(raymq.telemetry.metrics.instruments). To add a chart, add a line to the table in this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from raymq.telemetry.metrics.instruments import INSTRUMENTS, Instrument, InstrumentKind
from raymq.tools.observability.series import highest, increase, lowest, per_second, percentile, total

_GAUGE_UNITS: Final = {
    "messages": "short",
    "bytes": "bytes",
    "ms": "ms",
    "s": "s",
    "0–1": "percentunit",
    "%": "percent",
}
_RATE_UNITS: Final = {"messages": "suffix: msg/s", "bytes": "Bps"}

RAYMQ_PROCESSES: Final = (
    "ray::(NameServer|Controller|Broker|Storage|Replicator|Rebalance|Pull|Listener|PredicateRunner|Gateway)"
)
"""Regular expression for the process titles that Ray gives raymq's actors. In a process title, the name of the running
method may follow."""


@dataclass(frozen=True, slots=True)
class InstrumentLines:
    """The lines of one instrument in a chart. `lines`: the PromQL expression of each line, by legend; `{{label}}` in a
    legend stands for the value of a label."""

    instrument: Instrument
    unit: str
    lines: dict[str, str]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: its title, the Grafana unit of its values, the PromQL expression of each line by legend, and its help
    text."""

    title: str
    unit: str
    lines: dict[str, str]
    help: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row of charts. Grafana queries the charts of a collapsed row only when a user opens the row."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


def _of(
    name: str,
    *by: str,
    how: Callable[..., str] = highest,
    legend: str = "",
    percents: tuple[int, ...] = (50, 99),
    **equal: str,
) -> InstrumentLines:
    """Return the chart lines of an instrument: one line for each combination of values of the labels `by`.

    A counter's line is its rate per second (or its `increase`). A histogram has one line for each percentile in
    `percents`. A gauge's line is its maximum, or the result of another function of raymq.tools.observability.series
    (`how`). `legend`: text before the labels. `equal`: the value that a label must have.
    """
    instrument = INSTRUMENTS[name]
    unit = _GAUGE_UNITS.get(instrument.unit, "none")
    text = " ".join([legend, *(f"{{{{{label}}}}}" for label in by)]).strip()
    if instrument.kind is InstrumentKind.HISTOGRAM:
        lines = {f"p{percent} {text}".strip(): percentile(percent, name, *by, **equal) for percent in percents}
    elif instrument.kind is InstrumentKind.COUNTER and how is not increase:
        unit = _RATE_UNITS.get(instrument.unit, "cps")
        lines = {text: per_second(name, *by, **equal)}
    else:
        lines = {text: how(name, *by, **equal)}
    return InstrumentLines(instrument, unit, lines)


def _clients(name: str, *by: str) -> InstrumentLines:
    """Return the chart lines for the number of connected clients. It is the largest number that a broker reports. Each
    client sends heartbeats to every broker, so a sum would count each client several times."""

    def largest(name: str, *by: str) -> str:
        return f"max by ({', '.join(by)}) ({total(name, 'broker', *by)})"

    return _of(name, *by, how=largest)


def _of_processes(name: str, unit: str, description: str) -> InstrumentLines:
    """Return the chart lines of a gauge that Ray reports for each process. Each line is the sum for one kind of raymq
    actor."""
    filters = f'SessionName=~"$SessionName",ray_io_cluster=~"$Cluster",Component=~"{RAYMQ_PROCESSES}.*"'
    lines = f'sum by (actor) (label_replace({name}{{{filters}}}, "actor", "$1", "Component", "ray::(\\\\w+).*"))'
    instrument = Instrument(name, InstrumentKind.GAUGE, ("Component",), unit, description, "", "Ray")
    return InstrumentLines(instrument, _GAUGE_UNITS[unit], {"{{actor}}": lines})


def _panel(*parts: InstrumentLines, title: str = "") -> Panel:
    """Build a chart of several instruments. The chart has the unit of the first instrument, and also its title if
    `title` is empty."""
    first = parts[0]
    return Panel(
        title or first.instrument.title,
        first.unit,
        {legend: expression for part in parts for legend, expression in part.lines.items()},
        " ".join(dict.fromkeys(part.instrument.description for part in parts)),
    )


_GROUP_AND_TOPIC: Final = ("consumer_group", "topic")

ROWS: Final = (
    Row(
        "Overview",
        (
            _panel(
                _of("raymq_messages_in", legend="in", is_system="false"),
                _of("raymq_messages_out", legend="out", is_system="false"),
                title="Messages in and out",
            ),
            _panel(
                _of("raymq_throughput_in", legend="in", is_system="false"),
                _of("raymq_throughput_out", legend="out"),
                title="Bytes in and out",
            ),
            _panel(
                _of("raymq_consumer_lag_messages", "consumer_group", how=total, is_system="false"),
                title="Lag of all consumer groups",
            ),
            _panel(_of("raymq_dead_letters", "consumer_group")),
            _panel(
                _of("raymq_topic_number", "broker", legend="topics of"),
                _of("raymq_consumer_group_number", "broker", legend="groups of"),
                title="Topics and consumer groups",
            ),
            _panel(_of("raymq_up", "role", how=total)),
        ),
    ),
    Row(
        "Produce",
        (
            _panel(_of("raymq_messages_in", "topic"), title="Stored messages by topic"),
            _panel(_of("raymq_throughput_in", "topic"), title="Stored bytes by topic"),
            _panel(_of("raymq_messages_in", "message_type"), title="Stored messages by type"),
            _panel(_of("raymq_message_size")),
            _panel(_of("raymq_send_cost_time_milliseconds")),
            _panel(_of("raymq_put_latency_milliseconds", "broker")),
            _panel(
                _of("raymq_put_failed", "broker", legend="failed at"),
                _of("raymq_duplicates_dropped", "broker", legend="repeats at"),
                title="Failed appends and dropped repeats",
            ),
            _panel(_of("raymq_rpc_latency_milliseconds", "request_code", percents=(99,))),
            _panel(_of("raymq_processor_watermark", "processor", "broker", how=total)),
            _panel(_of("raymq_request_wait_milliseconds", "processor", "broker")),
            _panel(_of("raymq_requests_refused", "processor", "reason", "broker")),
        ),
    ),
    Row(
        "Consume and lag",
        (
            _panel(_of("raymq_messages_out", *_GROUP_AND_TOPIC)),
            _panel(_of("raymq_consumer_lag_messages", *_GROUP_AND_TOPIC, how=total)),
            _panel(_of("raymq_consumer_lag_latency_milliseconds", *_GROUP_AND_TOPIC)),
            _panel(_of("raymq_throughput_out", "consumer_group")),
            _panel(
                _of("raymq_consumer_inflight_messages", "consumer_group", how=total, legend="in flight"),
                _of("raymq_consumer_ready_messages", "consumer_group", how=total, legend="ready"),
                title="Messages in flight and ready",
            ),
            _panel(_of("raymq_consumer_queueing_latency_milliseconds", *_GROUP_AND_TOPIC)),
            _panel(_of("raymq_process_time_milliseconds", "consumer_group")),
            _panel(_of("raymq_await_time_milliseconds", "consumer_group")),
            _panel(_of("raymq_delivery_latency_milliseconds", "consumer_group")),
            _panel(_of("raymq_consumer_cached_messages", "consumer_group", how=total)),
            _panel(_of("raymq_consumer_cached_bytes", "consumer_group", how=total)),
        ),
    ),
    Row(
        "Dead letters",
        (
            _panel(_of("raymq_send_to_dlq_messages", *_GROUP_AND_TOPIC)),
            _panel(_of("raymq_send_back_messages", *_GROUP_AND_TOPIC)),
            _panel(_of("raymq_dead_letters", "consumer_group")),
            _panel(_of("raymq_unreadable_messages", *_GROUP_AND_TOPIC)),
        ),
    ),
    Row(
        "Bounded topics",
        (
            _panel(_of("raymq_backlog_waiting_producers", "topic", how=total)),
            _panel(_of("raymq_refused_messages", "topic")),
            _panel(_of("raymq_skipped_messages", *_GROUP_AND_TOPIC)),
        ),
        collapsed=True,
    ),
    Row(
        "Requests that are not stored",
        (
            _panel(_of("raymq_direct_requests", "result")),
            _panel(_of("raymq_direct_requests_open", "broker", how=total)),
            _panel(_of("raymq_direct_request_threads", "broker", how=total)),
        ),
        collapsed=True,
    ),
    Row(
        "Delayed messages",
        (
            _panel(_of("raymq_timing_messages", "topic", how=total)),
            _panel(_of("raymq_timer_dequeue_latency_milliseconds", "broker")),
            _panel(_of("raymq_timer_dequeue_lag", "broker")),
            _panel(
                _of("raymq_timer_enqueue", "topic", legend="stored"),
                _of("raymq_timer_dequeue", "topic", legend="delivered"),
                title="Stored and delivered delayed messages",
            ),
            _panel(_of("raymq_timer_message_snapshot", "timer_bound_s", how=total, legend="seconds:")),
            _panel(_of("raymq_delay_message_latency_seconds")),
        ),
        collapsed=True,
    ),
    Row(
        "Transactions and receives",
        (
            _panel(_of("raymq_half_messages", "broker", how=total)),
            _panel(
                _of("raymq_commit_messages", "topic", legend="committed"),
                _of("raymq_rollback_messages", "broker", legend="rolled back at"),
                title="Committed and rolled-back transactions",
            ),
            _panel(_of("raymq_finish_message_latency_milliseconds")),
            _panel(_of("raymq_pop_leased_messages", *_GROUP_AND_TOPIC, how=total)),
        ),
        collapsed=True,
    ),
    Row(
        "Storage",
        (
            _panel(_of("raymq_storage_size_bytes", "storage")),
            _panel(_of("raymq_storage_disk_ratio", "storage", "path")),
            _panel(_of("raymq_storage_flush_behind_bytes", "storage")),
            _panel(_of("raymq_storage_dispatch_behind_bytes", "storage")),
            _panel(_of("raymq_storage_message_reserve_time_milliseconds", "storage")),
            _panel(
                _of("raymq_storage_writable", "storage", how=lowest),
                _of("raymq_broker_permission", "broker", legend="permissions of"),
                _of("raymq_storage_disk_failed", "storage", legend="failed disk of"),
            ),
            _panel(_of("raymq_recovery_cut_bytes", "storage")),
            _panel(
                _of("raymq_log_holes", "storage", legend="ranges in the log of"),
                _of("raymq_log_hole_bytes", "storage", legend="bytes in the log of"),
                _of("raymq_damaged_files", "storage", legend="files of"),
                title="Damage",
            ),
            _panel(
                _of("raymq_log_holes_found", "storage", how=increase, legend="damaged ranges in the log of"),
                _of("raymq_damage_reports", "storage", how=increase, legend="reports to"),
                title="Damage found while running",
            ),
            _panel(
                _of("raymq_log_holes_mended", "storage", how=increase, legend="ranges in the log of"),
                _of("raymq_log_mended_bytes", "storage", how=increase, legend="bytes in the log of"),
                title="Repairs of the log",
            ),
            _panel(_of("raymq_scrub_bytes", "storage")),
            _panel(
                _of("raymq_scrub_found", "storage", how=increase, legend="found in"),
                _of("raymq_scrub_repaired", "storage", how=increase, legend="repaired in"),
                _of("raymq_scrub_unrepaired", "storage", legend="not repaired in"),
                title="Results of the verification",
            ),
            _panel(
                _of("raymq_scrub_age_seconds", "storage"),
                _of("raymq_scrub_overdue", "storage", legend="overdue in"),
                title="Age of the last verification",
            ),
        ),
    ),
    Row(
        "Replication",
        (
            _panel(_of("raymq_broker_has_master", "broker")),
            _panel(
                _of("raymq_in_sync_replicas", "broker", legend="in sync at"),
                _of("raymq_replicas", "broker", legend="all of"),
            ),
            _panel(_of("raymq_replica_lag_bytes", "storage")),
            _panel(_of("raymq_replica_lag_milliseconds", "storage")),
            _panel(_of("raymq_clock_skew_seconds", "storage")),
            _panel(_of("raymq_election", "broker", "election_result")),
            _panel(
                _of("raymq_broker_epoch", "broker", legend="epoch of"),
                _of("raymq_active_broker_num", legend="broker groups"),
                title="Epochs, and broker groups with a master",
            ),
        ),
        collapsed=True,
    ),
    Row(
        "Clients",
        (
            _panel(_clients("raymq_producer_connections", "language", "version")),
            _panel(_clients("raymq_consumer_connections", "consumer_group")),
            _panel(
                _of("raymq_topic_create_execution_time_milliseconds", legend="topic", percents=(99,)),
                _of("raymq_consumer_group_create_execution_time_milliseconds", legend="group", percents=(99,)),
                title="Time to create a topic or group",
            ),
        ),
        collapsed=True,
    ),
    Row(
        "Gateway",
        (
            _panel(_of("raymq_gateway_calls", "rpc", "code")),
            _panel(_of("raymq_gateway_call_time_milliseconds", "rpc", percents=(99,))),
            _panel(
                _of("raymq_gateway_received_messages", legend="received"),
                _of("raymq_gateway_acknowledged_messages", legend="acknowledged"),
                title="Messages of clients outside Ray",
            ),
            _panel(
                _of("raymq_gateway_clients", "language", how=total),
                _of("raymq_gateway_streams", how=total, legend="open streams"),
                title="Clients of the gateway",
            ),
            _panel(_of("raymq_gateway_renewed_leases")),
            _panel(_of("raymq_gateway_loop_lag_milliseconds")),
            _panel(
                _of("raymq_gateway_webhook_calls", "outcome"),
                _of("raymq_gateway_webhook_dead_letters", legend="given up"),
                title="Web hooks of tasks",
            ),
            _panel(_of("raymq_gateway_webhooks_running", how=total)),
        ),
        collapsed=True,
    ),
    Row(
        "Ray processes of raymq",
        (
            _panel(_of_processes("ray_component_cpu_percentage", "%", "CPU of the processes. 100 is one core.")),
            _panel(
                _of_processes(
                    "ray_component_rss_bytes",
                    "bytes",
                    "Resident memory of the processes. The mapped files of stores count.",
                )
            ),
        ),
        collapsed=True,
    ),
)
"""The rows of the dashboard, from top to bottom."""
