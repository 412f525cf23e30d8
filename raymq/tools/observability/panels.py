"""The table of panels of the Grafana board: rows of panels, each with its unit and its PromQL.

A panel more is a line here. The keys of `lines` are legends, in which `{{label}}` is a label's value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from raymq.tools.observability.series import highest, increase, lowest, per_second, percentile, total

MESSAGES: Final = "short"
MESSAGES_PER_S: Final = "suffix: msg/s"
SENDS_PER_S: Final = "cps"
BYTES: Final = "bytes"
BYTES_PER_S: Final = "Bps"
MILLISECONDS: Final = "ms"
SECONDS: Final = "s"
RATIO: Final = "percentunit"
NUMBER: Final = "none"

RAYMQ_PROCESSES: Final = (
    "ray::(NameServer|Controller|Broker|Storage|Replicator|Rebalance|Pull|Listener|PredicateRunner)"
)
"""The beginning of the process titles that Ray gives raymq's actors; the method that runs may follow."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: its title, the Grafana unit of its values, legend to expression, and one sentence of help."""

    title: str
    unit: str
    lines: dict[str, str]
    help: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row of charts. A collapsed one is queried only when it is opened."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


def _percentiles(name: str, *by: str) -> dict[str, str]:
    """The lines of p50 and p99 of a histogram."""
    rest = "".join(f" {{{{{label}}}}}" for label in by)
    return {f"p{percent}{rest}": percentile(percent, name, *by) for percent in (50, 99)}


def _of_process(name: str) -> str:
    """Ray's own gauge of its processes, for raymq's actors, summed by kind of actor."""
    filters = f'SessionName=~"$SessionName",ray_io_cluster=~"$Cluster",Component=~"{RAYMQ_PROCESSES}.*"'
    return f'sum by (actor) (label_replace({name}{{{filters}}}, "actor", "$1", "Component", "ray::(\\\\w+).*"))'


OVERVIEW: Final = Row(
    "Overview",
    (
        Panel(
            "Messages in and out",
            MESSAGES_PER_S,
            {
                "in": per_second("raymq_messages_in", is_system="false"),
                "out": per_second("raymq_messages_out", is_system="false"),
            },
            "Messages stored, and messages committed by consumer groups, raymq's own left out.",
        ),
        Panel(
            "Bytes in and out",
            BYTES_PER_S,
            {
                "in": per_second("raymq_throughput_in", is_system="false"),
                "out": per_second("raymq_throughput_out"),
            },
            "Bytes stored, and bytes read by consumers.",
        ),
        Panel(
            "Lag of all consumer groups",
            MESSAGES,
            {"{{consumer_group}}": total("raymq_consumer_lag_messages", "consumer_group", is_system="false")},
            "Messages that a consumer group has not committed yet, retries included.",
        ),
        Panel(
            "Dead letters that wait",
            MESSAGES,
            {"{{consumer_group}}": highest("raymq_dead_letters", "consumer_group")},
            "Messages that failed in all attempts and were not replayed: raymq dlq list GROUP.",
        ),
        Panel(
            "Topics and consumer groups",
            NUMBER,
            {
                "topics of {{broker}}": highest("raymq_topic_number", "broker"),
                "groups of {{broker}}": highest("raymq_consumer_group_number", "broker"),
            },
            "Topics and consumer groups that each broker knows.",
        ),
        Panel(
            "Processes that report",
            NUMBER,
            {"{{role}}": total("raymq_up", "role")},
            "Processes of raymq by role; one that is gone is missing here within 20 s.",
        ),
    ),
)

PRODUCE: Final = Row(
    "Produce",
    (
        Panel(
            "Messages in by topic",
            MESSAGES_PER_S,
            {"{{topic}}": per_second("raymq_messages_in", "topic")},
            "Messages stored.",
        ),
        Panel(
            "Bytes in by topic",
            BYTES_PER_S,
            {"{{topic}}": per_second("raymq_throughput_in", "topic")},
            "Bytes stored.",
        ),
        Panel(
            "Messages in by type",
            MESSAGES_PER_S,
            {"{{message_type}}": per_second("raymq_messages_in", "message_type")},
            "Messages stored: normal, in order (fifo), delayed, of a transaction.",
        ),
        Panel(
            "Size of messages",
            BYTES,
            _percentiles("raymq_message_size"),
            "Size of the records of stored messages.",
        ),
        Panel(
            "Time of a send",
            MILLISECONDS,
            _percentiles("raymq_send_cost_time_milliseconds"),
            "From the hand-over of a batch to its acknowledgement, as producers measure it.",
        ),
        Panel(
            "Time of an append",
            MILLISECONDS,
            _percentiles("raymq_put_latency_milliseconds", "broker"),
            "Time in the store, the flush included.",
        ),
        Panel(
            "Appends that failed, repeats dropped",
            SENDS_PER_S,
            {
                "failed at {{broker}}": per_second("raymq_put_failed", "broker"),
                "repeats at {{broker}}": per_second("raymq_duplicates_dropped", "broker"),
            },
            "Batches that were refused or failed, and messages that a producer sent again and that were there already.",
        ),
        Panel(
            "Time of calls",
            MILLISECONDS,
            {"p99 {{request_code}}": percentile(99, "raymq_rpc_latency_milliseconds", "request_code")},
            "Time of the calls of clients at the servers, long polls included.",
        ),
        Panel(
            "Calls that wait",
            NUMBER,
            {"{{processor}} at {{broker}}": total("raymq_processor_watermark", "processor", "broker")},
            "Calls that wait for the disk, for copies, for a message, or for a thread.",
        ),
        Panel(
            "Longest wait for a thread",
            MILLISECONDS,
            {"{{processor}} at {{broker}}": highest("raymq_request_wait_milliseconds", "processor", "broker")},
            "Of the last minute. Calls that wait for longer than the settings allow are refused as busy.",
        ),
        Panel(
            "Calls refused as busy",
            SENDS_PER_S,
            {
                "{{processor}}, {{reason}} at {{broker}}": per_second(
                    "raymq_requests_refused", "processor", "reason", "broker"
                )
            },
            "Too many waited (full), or a call had waited for too long (late).",
        ),
    ),
)

CONSUME: Final = Row(
    "Consume and lag",
    (
        Panel(
            "Messages out by group",
            MESSAGES_PER_S,
            {"{{consumer_group}} {{topic}}": per_second("raymq_messages_out", "consumer_group", "topic")},
            "Messages that consumer groups committed.",
        ),
        Panel(
            "Lag in messages",
            MESSAGES,
            {"{{consumer_group}} {{topic}}": total("raymq_consumer_lag_messages", "consumer_group", "topic")},
            "Messages that are not committed yet.",
        ),
        Panel(
            "Lag in time",
            MILLISECONDS,
            {
                "{{consumer_group}} {{topic}}": highest(
                    "raymq_consumer_lag_latency_milliseconds", "consumer_group", "topic"
                )
            },
            "Age of the oldest message that is not committed.",
        ),
        Panel(
            "Bytes out by group",
            BYTES_PER_S,
            {"{{consumer_group}}": per_second("raymq_throughput_out", "consumer_group")},
            "Bytes that consumers read.",
        ),
        Panel(
            "In flight and ready",
            MESSAGES,
            {
                "in flight {{consumer_group}}": total("raymq_consumer_inflight_messages", "consumer_group"),
                "ready {{consumer_group}}": total("raymq_consumer_ready_messages", "consumer_group"),
            },
            "Messages pulled and not committed; messages visible and not pulled.",
        ),
        Panel(
            "Age of the first message that is not pulled",
            MILLISECONDS,
            {
                "{{consumer_group}} {{topic}}": highest(
                    "raymq_consumer_queueing_latency_milliseconds", "consumer_group", "topic"
                )
            },
            "Time that messages wait in the queue before a consumer takes them.",
        ),
        Panel(
            "Time of a listener's call",
            MILLISECONDS,
            _percentiles("raymq_process_time_milliseconds", "consumer_group"),
            "Time of one call of the user's code.",
        ),
        Panel(
            "Wait before the listener",
            MILLISECONDS,
            _percentiles("raymq_await_time_milliseconds", "consumer_group"),
            "From the pull to the call of the listener.",
        ),
        Panel(
            "From stored to delivered",
            MILLISECONDS,
            _percentiles("raymq_delivery_latency_milliseconds", "consumer_group"),
            "From the store to the consumer.",
        ),
        Panel(
            "Messages cached",
            MESSAGES,
            {"{{consumer_group}}": total("raymq_consumer_cached_messages", "consumer_group")},
            "Messages in the memory of consumers.",
        ),
        Panel(
            "Bytes cached",
            BYTES,
            {"{{consumer_group}}": total("raymq_consumer_cached_bytes", "consumer_group")},
            "Bytes in the memory of consumers.",
        ),
    ),
)

DEAD_LETTERS: Final = Row(
    "Dead letters",
    (
        Panel(
            "Messages that died",
            MESSAGES_PER_S,
            {"{{consumer_group}} {{topic}}": per_second("raymq_send_to_dlq_messages", "consumer_group", "topic")},
            "Messages that failed in all attempts.",
        ),
        Panel(
            "Messages sent back",
            MESSAGES_PER_S,
            {"{{consumer_group}} {{topic}}": per_second("raymq_send_back_messages", "consumer_group", "topic")},
            "Attempts that failed and come again.",
        ),
        Panel(
            "Dead letters by group",
            MESSAGES,
            {"{{consumer_group}}": highest("raymq_dead_letters", "consumer_group")},
            "Dead letters that were not replayed.",
        ),
        Panel(
            "Messages that cannot be read",
            MESSAGES_PER_S,
            {"{{consumer_group}} {{topic}}": per_second("raymq_unreadable_messages", "consumer_group", "topic")},
            "Damaged messages, and bodies that do not decompress, that consumers went past.",
        ),
    ),
)

DELAYED: Final = Row(
    "Delayed messages",
    (
        Panel(
            "Messages that wait for their time",
            MESSAGES,
            {"{{topic}}": total("raymq_timing_messages", "topic")},
            "Delayed messages that are not due.",
        ),
        Panel(
            "Late",
            MILLISECONDS,
            {"{{broker}}": highest("raymq_timer_dequeue_latency_milliseconds", "broker")},
            "How late the next delivery is.",
        ),
        Panel(
            "Due and not delivered",
            MESSAGES,
            {"{{broker}}": highest("raymq_timer_dequeue_lag", "broker")},
            "Messages that are due.",
        ),
        Panel(
            "Taken and delivered",
            MESSAGES_PER_S,
            {
                "taken {{topic}}": per_second("raymq_timer_enqueue", "topic"),
                "delivered {{topic}}": per_second("raymq_timer_dequeue", "topic"),
            },
            "Delayed messages that came in, and those that were delivered.",
        ),
        Panel(
            "Due in the next 24 hours",
            MESSAGES,
            {"within {{timer_bound_s}} s": total("raymq_timer_message_snapshot", "timer_bound_s")},
            "Messages by the time until they are due.",
        ),
        Panel(
            "Delay asked for",
            SECONDS,
            _percentiles("raymq_delay_message_latency_seconds"),
            "The delays of the messages that came in.",
        ),
    ),
    collapsed=True,
)

TRANSACTIONS: Final = Row(
    "Transactions and receives",
    (
        Panel(
            "Half messages without an outcome",
            MESSAGES,
            {"{{broker}}": total("raymq_half_messages", "broker")},
            "Messages of transactions that are neither committed nor rolled back.",
        ),
        Panel(
            "Outcomes of transactions",
            MESSAGES_PER_S,
            {
                "committed {{topic}}": per_second("raymq_commit_messages", "topic"),
                "rolled back at {{broker}}": per_second("raymq_rollback_messages", "broker"),
            },
            "Half messages that were committed and rolled back.",
        ),
        Panel(
            "Time until the outcome",
            MILLISECONDS,
            _percentiles("raymq_finish_message_latency_milliseconds"),
            "From the half message to its outcome.",
        ),
        Panel(
            "Messages that simple consumers hold",
            MESSAGES,
            {"{{consumer_group}} {{topic}}": total("raymq_pop_leased_messages", "consumer_group", "topic")},
            "Received and not acknowledged yet.",
        ),
    ),
    collapsed=True,
)

STORAGE: Final = Row(
    "Storage",
    (
        Panel(
            "Size of the logs",
            BYTES,
            {"{{storage}}": highest("raymq_storage_size_bytes", "storage")},
            "Bytes from the start to the end of each store's commit log.",
        ),
        Panel(
            "Disks",
            RATIO,
            {"{{storage}} {{path}}": highest("raymq_storage_disk_ratio", "storage", "path")},
            "Used part of the disk of each store.",
        ),
        Panel(
            "Not on disk yet",
            BYTES,
            {"{{storage}}": highest("raymq_storage_flush_behind_bytes", "storage")},
            "Bytes written and not flushed.",
        ),
        Panel(
            "Not indexed yet",
            BYTES,
            {"{{storage}}": highest("raymq_storage_dispatch_behind_bytes", "storage")},
            "Bytes written that the index lacks.",
        ),
        Panel(
            "Messages kept for",
            MILLISECONDS,
            {"{{storage}}": highest("raymq_storage_message_reserve_time_milliseconds", "storage")},
            "Age of the first message.",
        ),
        Panel(
            "Writable",
            NUMBER,
            {
                "{{storage}}": lowest("raymq_storage_writable", "storage"),
                "permission of {{broker}}": highest("raymq_broker_permission", "broker"),
                "failed disk of {{storage}}": highest("raymq_storage_disk_failed", "storage"),
            },
            "1: the store takes messages, or its disk has failed. Permission: 2 write, 4 read, 6 both.",
        ),
        Panel(
            "Cut at recovery",
            BYTES,
            {"{{storage}}": highest("raymq_recovery_cut_bytes", "storage")},
            "Bytes at the log's end that were not whole when the store was opened.",
        ),
        Panel(
            "Damage",
            NUMBER,
            {
                "ranges in the log of {{storage}}": highest("raymq_log_holes", "storage"),
                "bytes in the log of {{storage}}": highest("raymq_log_hole_bytes", "storage"),
                "files of {{storage}}": highest("raymq_damaged_files", "storage"),
            },
            "Damage that was found when the store was opened: raymq doctor names it.",
        ),
        Panel(
            "Mended by another replica",
            NUMBER,
            {
                "ranges in the log of {{storage}}": increase("raymq_log_holes_mended", "storage"),
                "bytes in the log of {{storage}}": increase("raymq_log_mended_bytes", "storage"),
            },
            "Damage of the log that the good bytes of another replica have replaced.",
        ),
    ),
)

REPLICATION: Final = Row(
    "Replication",
    (
        Panel(
            "Broker groups with a master",
            NUMBER,
            {"{{broker}}": highest("raymq_broker_has_master", "broker")},
            "1: a replica leads; 0: nobody does.",
        ),
        Panel(
            "Replicas in sync",
            NUMBER,
            {
                "{{broker}}: in sync": highest("raymq_in_sync_replicas", "broker"),
                "{{broker}}: all": highest("raymq_replicas", "broker"),
            },
            "Replicas that have everything, and all that should be there.",
        ),
        Panel(
            "Lag of replicas in bytes",
            BYTES,
            {"{{storage}}": highest("raymq_replica_lag_bytes", "storage")},
            "Bytes that a replica lacks.",
        ),
        Panel(
            "Lag of replicas in time",
            MILLISECONDS,
            {"{{storage}}": highest("raymq_replica_lag_milliseconds", "storage")},
            "Time since a replica had everything.",
        ),
        Panel(
            "Elections",
            SENDS_PER_S,
            {"{{broker}} {{election_result}}": per_second("raymq_election", "broker", "election_result")},
            "Elections of a master.",
        ),
        Panel(
            "Epochs, brokers that live",
            NUMBER,
            {
                "epoch of {{broker}}": highest("raymq_broker_epoch", "broker"),
                "brokers": highest("raymq_active_broker_num"),
            },
            "The number of each master's term, and the broker groups that have one.",
        ),
    ),
    collapsed=True,
)

CLIENTS: Final = Row(
    "Clients",
    (
        # Each client tells every broker of itself: a sum over brokers would count it once for each.
        Panel(
            "Producers",
            NUMBER,
            {
                "{{language}} {{version}}": f"max by (language, version) "
                f"({total('raymq_producer_connections', 'broker', 'language', 'version')})"
            },
            "Producers that are connected.",
        ),
        Panel(
            "Consumers",
            NUMBER,
            {
                "{{consumer_group}}": f"max by (consumer_group) "
                f"({total('raymq_consumer_connections', 'broker', 'consumer_group')})"
            },
            "Consumers that are connected, by group.",
        ),
        Panel(
            "Creating topics and groups",
            MILLISECONDS,
            {
                "p99 topic": percentile(99, "raymq_topic_create_execution_time_milliseconds"),
                "p99 group": percentile(99, "raymq_consumer_group_create_execution_time_milliseconds"),
            },
            "Time until a topic or a consumer group was made.",
        ),
    ),
    collapsed=True,
)

PROCESSES: Final = Row(
    "Ray processes of raymq",
    (
        Panel(
            "CPU",
            "percent",
            {"{{actor}}": _of_process("ray_component_cpu_percentage")},
            "100 is one core. From Ray.",
        ),
        Panel(
            "Memory",
            BYTES,
            {"{{actor}}": _of_process("ray_component_rss_bytes")},
            "Resident memory; the mapped files of stores count in it. From Ray.",
        ),
    ),
    collapsed=True,
)

ROWS: Final = (
    OVERVIEW,
    PRODUCE,
    CONSUME,
    DEAD_LETTERS,
    DELAYED,
    TRANSACTIONS,
    STORAGE,
    REPLICATION,
    CLIENTS,
    PROCESSES,
)
