"""The only table of raymq's metrics: names, labels, units and meanings.

Ray exposes a gauge `x` as `ray_x` and a counter `x` as `ray_x_total`. A histogram of raymq is three gauges that only
increase: `x_bucket` with the label `le`, `x_sum` and `x_count`. raymq does not use Ray's own histogram, because its sum
is wrong, and because each value that is added costs the node's agent time. A Reporter refuses names and labels that are
not in this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final


class InstrumentKind(Enum):
    """The kinds of metrics: a running total (counter), a current value (gauge), a distribution (histogram)."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric: a row of the table of instruments.

    `labels`: all labels of the metric's series, including `cluster` and `broker`. `description`: the first sentence is
    the title of the metric's chart. `rocketmq`: RocketMQ 5's name of the metric; "=" if only the prefix differs; empty
    if RocketMQ has no such metric. `reported_by`: the actor or client that reports the metric. `bounds`: the upper ends
    of a histogram's buckets, in `unit`; one more bucket counts larger values.
    """

    name: str
    kind: InstrumentKind
    labels: tuple[str, ...]
    unit: str
    description: str
    rocketmq: str
    reported_by: str
    bounds: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """The title of the metric's chart: the first sentence of the description, without its full stop."""
        return self.description.partition(". ")[0].removesuffix(".")


COMMON_LABELS: Final = ("cluster", "broker")
"""Labels that every metric has. `broker` is empty if a value belongs to no broker group."""
OTHER: Final = "(other)"
"""The label value under which a Reporter sums all topics, or all groups, beyond its limits."""
REPORT_INTERVAL_S: Final = 10.0
"""Seconds between two reports of metrics. Ray drops a gauge that was not set for 20 s."""

_C, _G, _H = InstrumentKind.COUNTER, InstrumentKind.GAUGE, InstrumentKind.HISTOGRAM
_LAG: Final = "consumer_group topic is_retry is_system"
_MEDIUM: Final = "storage_type storage_medium"
_TYPED: Final = "topic message_type is_system"
_CLIENT_KINDS: Final = "consumer_group consume_mode language version is_system"
_CREATE_MS: Final = (10, 100, 1000, 3000, 5000)
_CLIENT_MS: Final = (1, 5, 10, 20, 50, 200, 500)

INSTRUMENTS: Final[dict[str, Instrument]] = {}
"""All metrics that this module defines, by name."""


def _add(
    reported_by: str,
    first_label: str,
    kind: InstrumentKind,
    name: str,
    further_labels: str,
    unit: str,
    description: str,
    rocketmq: str = "",
    *bounds: int,
) -> None:
    """Add a metric to the table. `name` omits the prefix `raymq_`. `further_labels` are separated by spaces, and follow
    COMMON_LABELS."""
    labels = (*COMMON_LABELS, *first_label.split(), *further_labels.split())
    name = f"raymq_{name}"
    INSTRUMENTS[name] = Instrument(name, kind, labels, unit, description, rocketmq, reported_by, bounds)


_broker = partial(_add, "Broker", "")
_controller = partial(_add, "Controller", "")
_storage = partial(_add, "Storage", "storage")
_both = partial(_add, "Storage, Broker", "storage")
_pull = partial(_add, "Pull", "")
_gateway = partial(_add, "Gateway", "")
_fetcher = partial(_add, "Pull, pull consumer", "")

# fmt: off
# The rows of the table are excluded from formatting: the formatter would put each column of a row on a separate line.
_add("every actor", "", _G, "up", "role name", "1", "Running actors. Each actor of raymq reports 1.", "proxy_up")
_broker(_G, "broker_permission", "", "bits", "Permissions of the broker group. 4 to read, 2 to write, 6 for both.", "=")
_broker(_G, "topic_number", "", "topics", "Topics of the broker group. Internal topics do not count.", "=")
_broker(_G, "consumer_group_number", "", "groups", "Consumer groups of the broker group.", "=")
_broker(_H, "topic_create_execution_time_milliseconds", "invocation_status", "ms",
    "Time to create a topic.", "topic_create_execution_time", *_CREATE_MS)
_broker(_H, "consumer_group_create_execution_time_milliseconds", "invocation_status", "ms",
    "Time to create a consumer group.", "consumer_group_create_execution_time", *_CREATE_MS)
_controller(_G, "broker_has_master", "", "0/1",
    "Broker groups with a master. 1 while the broker group has a master, else 0.")
_controller(_G, "broker_epoch", "", "epoch", "Epoch of the broker group's master.")
_controller(_G, "replicas", "", "replicas", "Replicas that can be in sync. Learners do not count.")
_controller(_G, "in_sync_replicas", "", "replicas", "Replicas in sync. The master counts.")
_controller(_G, "replica_lag_bytes", "storage role", "bytes",
    "Lag of replicas in bytes. Bytes of the master's log that the replica lacks.")
_controller(_G, "replica_lag_milliseconds", "storage role", "ms",
    "Lag of replicas in time. Time since the replica had the whole log of its master.")
_controller(_G, "clock_skew_seconds", "storage", "s",
    "Clocks of replicas' nodes. Seconds by which a clock is ahead of the Controller's clock.")
_controller(_C, "election", "election_result", "elections",
    "Elections of a master. Elections without a winner count.", "=")
_controller(_G, "active_broker_num", "", "brokers", "Replicated broker groups with a master.", "=")
_storage(_C, "messages_in", _TYPED, "messages", "Stored messages. Recognised repeats do not count.", "=")
_storage(_C, "throughput_in", _TYPED, "bytes", "Stored bytes of records.", "=")
_storage(_H, "message_size", "message_type", "bytes",
    "Size of stored records. Mean of each batch.", "=", 1 << 10, 4 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
_broker(_C, "messages_out", "topic consumer_group is_retry is_system", "messages",
    "Messages committed by consumer groups.", "=")
_fetcher(_C, "throughput_out", "topic consumer_group", "bytes", "Fetched bytes of records.", "=")
_broker(_C, "send_to_dlq_messages", "consumer_group topic", "messages",
    "New dead letters. Messages that failed in all attempts.", "=")
_broker(_C, "send_back_messages", "consumer_group topic", "messages",
    "Messages sent back. The broker delivers them again.")
_broker(_G, "backlog_waiting_producers", "topic", "producers",
    "Producers that wait for room. The bounded topic is at the limit of its backlog.")
_broker(_C, "refused_messages", "topic", "messages",
    "Messages refused by full topics. Each attempt of a waiting producer counts.")
_broker(_C, "skipped_messages", "consumer_group topic", "messages",
    "Messages skipped by groups. A full topic with the policy drop moved the groups' offsets.")
_broker(_C, "direct_requests", "result", "requests",
    "Requests that were not stored, by their end. See request-reply.md.")
_broker(_G, "direct_requests_open", "", "requests",
    "Open requests that are not stored. They wait for a listener, or a listener has them.")
_broker(_G, "direct_request_threads", "", "threads",
    "Listener threads for requests not stored. Each of them works on one request at a time.")
_broker(_G, "dead_letters", "consumer_group", "messages", "Dead letters that were not replayed.")
_broker(_G, "producer_connections", "language version", "clients",
    "Connected producers. Each producer sends heartbeats to every broker: take the maximum over brokers.", "=")
_broker(_G, "consumer_connections", _CLIENT_KINDS, "clients",
    "Connected consumers. Each consumer sends heartbeats to every broker: take the maximum over brokers.", "=")
_broker(_G, "consumer_lag_messages", _LAG, "messages",
    "Lag in messages. Not committed by the group. A broker reports 0 for at most 200 groups and topics.", "=")
_broker(_G, "consumer_lag_latency_milliseconds", _LAG, "ms",
    "Lag in time. Age of the oldest message that the group has not committed.", "consumer_lag_latency")
_add("Pull, Broker", "", _G, "consumer_inflight_messages", _LAG, "messages",
    "Messages in flight. Fetched and not committed.", "=")
_pull(_G, "consumer_ready_messages", _LAG, "messages", "Messages ready to be fetched.", "=")
_pull(_G, "consumer_queueing_latency_milliseconds", _LAG, "ms",
    "Age of the oldest message not fetched yet.", "consumer_queueing_latency")
_storage(_H, "rpc_latency_milliseconds", "request_code response_code is_long_polling", "ms",
    "Time of a request in the store. Appends, fetches and long polls.", "rpc_latency",
    1, 3, 5, 7, 10, 100, 1000, 2000, 3000)
_storage(_H, "put_latency_milliseconds", "", "ms",
    "Time of an append in the store. Includes the flush.", "", 1, 5, 10, 50, 100, 200, 500, 1000, 5000, 10_000)
_storage(_C, "put_failed", "", "appends", "Failed and refused appends.")
_storage(_C, "duplicates_dropped", "", "messages", "Dropped repeats of stored messages.")
_both(_G, "processor_watermark", "processor", "calls",
    "Waiting calls. `processor`: append for appends in flight, fetch for long polls, else the kind of call.", "=")
_both(_G, "request_wait_milliseconds", "processor", "ms",
    "Longest wait for a thread. Maximum over the calls of the last minute.")
_both(_C, "requests_refused", "processor reason", "calls",
    "Calls refused as busy. `reason`: full if too many calls waited, late if the call waited too long.")
_storage(_G, "storage_size_bytes", _MEDIUM, "bytes", "Length of the commit log.", "storage_size")
_storage(_G, "storage_flush_behind_bytes", _MEDIUM, "bytes", "Bytes written and not flushed.", "=")
_storage(_G, "storage_dispatch_behind_bytes", _MEDIUM, "bytes", "Bytes visible and not indexed.", "=")
_storage(_G, "storage_message_reserve_time_milliseconds", _MEDIUM, "ms",
    "Age of the first message in the store.", "storage_message_reserve_time")
_storage(_G, "storage_disk_ratio", "path", "0–1", "Used part of the store's disk.")
_storage(_G, "storage_writable", "", "0/1", "Writable stores. 1 while the store accepts appends.")
_storage(_G, "storage_disk_failed", "", "0/1",
    "Failed disks. 1 from a failure of the store's disk until the store is opened again.")
_storage(_G, "log_holes", "", "ranges", "Damaged ranges of the log. Intact records follow each range.")
_storage(_G, "log_hole_bytes", "", "bytes", "Bytes in the damaged ranges of the log.")
_storage(_C, "log_mended_bytes", "", "bytes", "Repaired bytes of the log. Replaced by another replica's intact bytes.")
_storage(_C, "log_holes_mended", "", "ranges", "Repaired ranges of the log. Replaced in full.")
_storage(_C, "log_holes_found", "", "ranges", "Damaged ranges of the log that were found while the store runs.")
_storage(_C, "damage_reports", "", "records", "Reports of damaged records. The store checks each report.")
_storage(_G, "damaged_files", "", "files", "Damaged files besides the log. Found when the store was opened.")
_storage(_C, "scrub_bytes", "", "bytes", "Bytes read by the verification.")
_storage(_C, "scrub_found", "", "places", "Damaged places found by the verification.")
_storage(_C, "scrub_repaired", "", "places", "Damaged places that were repaired.")
_storage(_G, "scrub_unrepaired", "", "places", "Damage beside the log that is not repaired.")
_storage(_G, "scrub_age_seconds", "", "s", "Age of the last complete verification.")
_storage(_G, "scrub_overdue", "", "0/1", "Overdue verifications. 1 if the last one is older than 1.5 periods.")
_storage(_G, "recovery_cut_bytes", "", "bytes", "Bytes that recovery cut off the log's end.")
_storage(_G, "timing_messages", "topic", "messages", "Delayed messages that wait. `topic`: the delay level.", "=")
_storage(_G, "timer_dequeue_lag", "", "messages", "Delayed messages that are due.", "=")
_storage(_G, "timer_dequeue_latency_milliseconds", "", "ms",
    "Lateness of delayed messages at their delivery.", "timer_dequeue_latency")
_storage(_C, "timer_enqueue", "topic", "messages", "Stored delayed messages.", "=")
_storage(_C, "timer_dequeue", "topic", "messages", "Delivered delayed messages.", "=")
_storage(_G, "timer_message_snapshot", "timer_bound_s", "messages",
    "Delayed messages by hour. `timer_bound_s`: seconds until the end of the hour in which they are due.", "=")
_storage(_H, "delay_message_latency_seconds", "", "s",
    "Requested delays.", "delay_message_latency", 60, 600, 3600, 43_200, 86_400, 259_200)
_storage(_G, "half_messages", "", "messages", "Open half messages. Neither committed nor rolled back.", "=")
_storage(_C, "commit_messages", "topic", "messages", "Committed transactions.", "=")
_storage(_C, "rollback_messages", "", "messages", "Rolled-back transactions.", "=")
_storage(_H, "finish_message_latency_milliseconds", "topic", "ms",
    "Time until the commit or rollback.", "finish_message_latency", 5, 10, 30, 100, 500, 1000, 5000, 60_000)
_add("Producer", "", _H, "send_cost_time_milliseconds", "topic invocation_status", "ms",
    "Time from a send to its acknowledgement.", "send_cost_time", *_CLIENT_MS)
_fetcher(_H, "delivery_latency_milliseconds", "topic consumer_group", "ms",
    "Time from the store to the consumer.", "delivery_latency", *_CLIENT_MS)
_pull(_H, "await_time_milliseconds", "topic consumer_group", "ms",
    "Time from the fetch to the listener's call.", "await_time", 1, 5, 20, 100, 1000, 5000, 10_000)
_add("Listener", "", _H, "process_time_milliseconds", "topic consumer_group invocation_status", "ms",
    "Time of a call of the listener.", "process_time", 1, 5, 10, 100, 10_000, 60_000)
_fetcher(_C, "unreadable_messages", "topic consumer_group", "messages",
    "Unreadable messages that consumers skipped. Damaged, or the body does not decompress.")
_pull(_G, "consumer_cached_messages", "topic consumer_group", "messages", "Messages cached for listeners.", "=")
_pull(_G, "consumer_cached_bytes", "topic consumer_group", "bytes", "Bytes cached for listeners.", "=")
_broker(_G, "pop_leased_messages", "consumer_group topic", "messages",
    "Messages leased by simple consumers. Received and not acknowledged.")
_gateway(_C, "gateway_calls", "rpc code", "calls",
    "Calls of clients outside Ray. `code`: RocketMQ's status, or CANCELLED if the client did not wait.")
_gateway(_H, "gateway_call_time_milliseconds", "rpc", "ms",
    "Time of a call of a client outside Ray. A receive waits for messages.", "", 1, 5, 20, 100, 1000, 5000, 20_000)
_gateway(_G, "gateway_clients", "language", "clients", "Clients of the gateway. Active within the last minute.")
_gateway(_G, "gateway_streams", "", "streams", "Open streams of the gateway's clients. Most clients have one.")
_gateway(_C, "gateway_received_messages", "", "messages", "Messages that clients outside Ray received.")
_gateway(_C, "gateway_acknowledged_messages", "", "messages", "Messages that clients outside Ray acknowledged.")
_gateway(_C, "gateway_renewed_leases", "", "leases", "Leases extended by the gateway. For messages of push consumers.")
_gateway(_H, "gateway_loop_lag_milliseconds", "", "ms",
    "Lag of the gateway's event loop. Measured twice a second.", "", 1, 5, 20, 100, 500, 2000)
_gateway(_C, "gateway_webhook_calls", "outcome", "calls",
    "Calls of web hooks. `outcome`: accepted, status (not 2xx), timeout, connection, or refused by the settings.")
_gateway(_C, "gateway_webhook_dead_letters", "", "messages", "Web hooks given up. Dead letters of raymq-webhooks.")
_gateway(_G, "gateway_webhooks_running", "", "calls", "Web hooks that the gateway calls now.")
# fmt: on
