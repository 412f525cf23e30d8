"""`raymq store`, `broker` and `check`: commands about single broker groups and their stores.

`raymq store` shows runtime metrics, verifies and repairs stores, lists damage, and deletes expired messages. `raymq
broker` allows or forbids sends, and changes a broker group's replicas. `raymq check` measures the time to store a
message in every broker group and to read it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from raymq.common.message import MAX_MESSAGE_SIZE_BYTES
from raymq.common.names import REPLICAS_OF_GROUP_MAX
from raymq.common.numbers import NUMBER_MAX, NumberRange
from raymq.tools.cli.entry import cli
from raymq.tools.cli.known_names import completes, remember_all_names
from raymq.tools.cli.options import broker_argument, number_option
from raymq.tools.cli.terminal.command import CommandResult, command, rows_result
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import Table
from raymq.tools.cli.terminal.progress import counting

if TYPE_CHECKING:
    from raymq.client.admin.admin import Admin
    from raymq.client.client import Client
    from raymq.client.cluster.launcher import ProgressCallback
    from raymq.common.protocol.store import ScrubStatus, StoreVerification


@cli.group()
def broker() -> None:
    """Change whether a broker group accepts messages, and its replicas."""


@command(broker, "writable")
@click.argument("state", type=click.Choice(["on", "off"]))
@broker_argument
def broker_writable(admin: Admin, state: str, broker_name: str) -> CommandResult:
    """Allow or forbid sends to a broker group, also after restarts. Its messages can still be read.

    With `off`, producers send to the other broker groups, and messages whose sharding key selects one of this broker
    group's queues are refused. Example: raymq broker writable off broker-b
    """
    admin.set_broker_writable(broker_name, state == "on")
    text = f"{broker_name} {'takes messages' if state == 'on' else 'takes no messages; producers see it within 30 s'}"
    return CommandResult({"broker": broker_name, "writable": state == "on"}, text)


@command(broker, "replicas")
@broker_argument
@click.argument("count", type=NumberType(NumberRange(1, REPLICAS_OF_GROUP_MAX)), required=False)
@number_option("--replace", NumberRange(0, NUMBER_MAX), "Replace this replica by a new replica on another node.")
@number_option(
    "--min-in-sync",
    NumberRange(1, REPLICAS_OF_GROUP_MAX),
    "Accept messages only while this number of replicas is in sync.",
)
@click.option("--cancel", is_flag=True, help="Cancel the current change, as long as no replica has left.")
@click.option("--no-wait", "wait", flag_value=False, default=True, help="Do not wait until the change has ended.")
def broker_replicas(
    admin: Admin,
    progress: ProgressCallback,
    broker_name: str,
    count: int | None,
    replace: int | None,
    min_in_sync: int | None,
    cancel: bool,
    wait: bool,
) -> CommandResult:
    """Show a broker group's replicas, change their number, or replace one, while messages are sent and read.

    New replicas copy the log before others leave. Directories of removed replicas stay on their disks. Exit code 1 if
    the change takes more than four minutes: the cluster continues it. Examples: raymq broker replicas broker-a 3; raymq
    broker replicas broker-a --min-in-sync 2
    """
    if cancel and (count is not None or replace is not None):
        raise click.UsageError("--cancel takes no number of replicas and no --replace")
    if min_in_sync is not None and (cancel or count is not None or replace is not None):
        raise click.UsageError("--min-in-sync is a change of its own: leave out the other changes")
    if min_in_sync is not None:
        admin.change_min_in_sync_replicas(broker_name, min_in_sync)
    elif cancel:
        admin.cancel_replica_change(broker_name)
    elif count is not None or replace is not None:
        admin.change_replicas(broker_name, count, replace=replace)
    changes = cancel or count is not None or replace is not None
    group = admin.wait_for_replicas(broker_name, progress=progress) if changes and wait else admin.replicas(broker_name)
    text = (
        f"{broker_name} has the replicas {', '.join(str(one.replica) for one in group.replicas)}, and accepts messages "
        f"while {group.min_in_sync_replicas} of them are in sync"
    )
    names = ["replica", "role", "in_sync", "lag_bytes", "state"]
    rows = [
        [one.replica, one.role, one.replica in group.in_sync, one.lag_bytes, one.note or one.error]
        for one in group.replicas
    ]
    plain = {
        "broker": broker_name,
        "master": group.master,
        "in_sync": list(group.in_sync),
        "min_in_sync_replicas": group.min_in_sync_replicas,
        "change": group.change,
    }
    return CommandResult(
        {**plain, "replicas": [dict(zip(names, row, strict=True)) for row in rows]},
        text + (f"; {group.change}" if group.change else ""),
        Table(names, rows),
        failed=changes and wait and bool(group.change),
    )


@cli.group()
def store() -> None:
    """List stores, show their figures, and delete expired messages now."""


@command(store, "stats")
@broker_argument
def store_stats(admin: Admin, broker_name: str) -> CommandResult:
    """Show RocketMQ's runtime figures of a broker group's store. Example: raymq store stats broker-a"""
    statistics = admin.store_statistics(broker_name)
    return CommandResult(
        {"runtime": statistics.runtime, "put_latency_buckets": list(statistics.put_latency_buckets)},
        Table(["figure", "value"], [list(row) for row in statistics.runtime.items()]),
    )


@command(store, "list")
def store_list(admin: Admin) -> CommandResult:
    """List the broker groups and their stores. Example: raymq store list"""
    brokers = admin.brokers()
    remember_all_names("brokers", brokers)
    rows = [[name, storage] for name, data in brokers.items() for _, storage in sorted(data.storages.items())]
    return rows_result("stores", ["broker", "store"], rows)


@command(store, "clean")
@broker_argument
def store_clean(admin: Admin, broker_name: str) -> CommandResult:
    """Delete messages that are older than file_reserved_time_hours now, at any time of the day.

    Example: raymq store clean broker-a
    """
    admin.clean_store(broker_name)
    text = f"{broker_name} deletes messages that are older than its settings allow; see `raymq status`"
    return CommandResult({"broker": broker_name, "cleaning": True}, text)


@command(store, "verify")
@click.option("--now", is_flag=True, help="Verify all files now, at full speed, and wait for the result.")
@click.option("--broker", shell_complete=completes("brokers"), help="Only the stores of this broker group.")
@number_option("--timeout", NumberRange(1, 604_800), "Seconds to wait with --now; then the stores go on alone.", 86_400)
def store_verify(admin: Admin, now: bool, broker: str | None, timeout: int) -> CommandResult:
    """Show how far each store has verified its files, and which damage it found. With --now, verify them at once.

    Each store reads all its files once a week (scrub_period_hours), and checks every record and queue entry. Damage is
    repaired from another replica or from the log, or is counted as lost. Exit code 1 if damage is not repaired, or a
    store does not answer. Example: raymq store verify --now
    """
    if now:
        with counting("verifying bytes") as counter:
            shown = 0

            def on_progress(checked: int, total: int) -> None:
                nonlocal shown
                counter.expect(total)
                counter.advance(checked - shown)
                shown = checked

            found = admin.verify_stores(broker, timeout_s=timeout, on_progress=on_progress)
    else:
        found = admin.verification(broker)
    rows = [
        [
            name,
            one.error or one.scrub.error or "-",
            "-" if one.error else verified_text(one.scrub),
            *(one.scrub.checked_bytes, one.scrub.found, one.scrub.repaired, one.lost),
        ]
        for name, one in found.items()
    ]
    damage = [f"{name}: {text}" for name, one in found.items() for text in _damage_of(one)]
    return rows_result(
        "stores",
        ["store", "error", "verified", "bytes", "found", "repaired", "lost"],
        rows,
        more={"damage": damage, "details": {name: asdict(one) for name, one in found.items()}},
        errors=damage,
        failed=any(one.error or one.lost or (now and one.scrub.running) for one in found.values()),
    )


def verified_text(scrub: ScrubStatus) -> str:
    """Return a text about the verification of a store: its progress, or the age of the last complete one."""
    age = f"{scrub.age_ms / 3_600_000:.1f} h ago" if scrub.completed else "not yet"
    if not scrub.running:
        return age
    return f"{100 * scrub.checked_bytes // max(scrub.total_bytes, 1)} % (before: {age})"


def _damage_of(store: StoreVerification) -> list[str]:
    """Return a text for each damaged place of a store that is not repaired."""
    holes = [f"{hole.size} bytes at {hole.offset} of the log: {hole.reason}" for hole in store.holes]
    return [*holes, *store.scrub.unrepaired]


@command(store, "close")
def store_close(address: str | None, progress: ProgressCallback) -> CommandResult:
    """Close the stores on this machine before the machine is shut down, so that they open without recovery.

    Closed stores answer no request until the machine has restarted and Ray starts their actors again. Example: raymq
    store close
    """
    from raymq.client.cluster.local_server import close_stores

    closed = close_stores(address, progress)
    return CommandResult({"closed": closed}, f"closed: {', '.join(closed) or 'this machine has no store'}")


@command(store, "repair")
@click.option("--export", "directory", type=click.Path(file_okay=False), help="Write the damaged bytes to this folder.")
@click.option("--broker", shell_complete=completes("brokers"), help="Only the stores of this broker group.")
def store_repair(admin: Admin, directory: str | None, broker: str | None) -> CommandResult:
    """List the damaged ranges of each store's log, their messages, and whether another replica can repair them.

    Stores repair their logs themselves, from other replicas. A range is lost if no replica in contact has its bytes:
    readers get an error for its messages, and continue. Exit code 1 if a range is damaged, or a store does not answer.
    Example: raymq store repair --export damage
    """
    found = admin.damage(broker)
    exported = [] if directory is None else admin.export_damage(directory, found)
    rows = [
        [name, "lost" if one.lost else "in repair", one.offset, one.size, _messages_text(one.spans), one.reason]
        for name, damage in found.items()
        for one in damage.ranges
    ]
    errors = [f"{name} does not answer: {damage.error}" for name, damage in found.items() if damage.error]
    names = ["store", "state", "physical offset", "bytes", "messages", "reason"]
    totals = Table(
        ["store", "damaged", "lost", "found while running", "repaired", "repaired bytes"],
        [
            [name, len(one.ranges), sum(part.lost for part in one.ranges), one.found, one.repaired, one.repaired_bytes]
            for name, one in found.items()
            if not one.error
        ],
    )
    listed = Table(names, rows)
    value = {"ranges": listed.objects(), "stores": totals.objects(), "exported": exported}
    shown: list[Table | str] = [totals, *([listed] if rows else [])]
    if directory is not None:
        shown.append(f"{len(exported)} damaged ranges were written to {directory}")
    return CommandResult(value, *shown, errors=errors, failed=bool(rows or errors))


def _messages_text(spans: Sequence[tuple[str, int, int, int]]) -> str:
    """Return the queue offsets of the messages in a damaged range, such as "orders:0 at 5, orders:1 at 7-9"."""
    texts = [
        f"{topic}:{queue_id} at {start}" + (f"-{end - 1}" if end - start > 1 else "")
        for topic, queue_id, start, end in spans
    ]
    return ", ".join(texts) or "unknown"


@cli.group()
def check() -> None:
    """Check that every broker group stores messages and returns them."""


@command(check, "send")
@click.option("--topic", "topic_name", help="A topic to send to. Default: raymq-check, which is created.")
@click.option("--broker", shell_complete=completes("brokers"), help="Check only this broker group. Default: all.")
@number_option("--count", NumberRange(1, 10_000), "Number of messages to send to each broker group.", 20)
@number_option("--size", NumberRange(1, MAX_MESSAGE_SIZE_BYTES), "Size of each message body in bytes.", 128)
def check_send(
    client: Client, progress: ProgressCallback, topic_name: str | None, broker: str | None, count: int, size: int
) -> CommandResult:
    """Send messages to a queue of each broker group, read each message back, and show the times.

    Exit code 1 if a message fails. Example: raymq check send --count 100
    """
    from raymq.client.admin.upkeep.send_check import check_queue

    def pull(queue: Any, offset: int) -> Any:  # The argument `queue` is a MessageQueue, and the result is a PullResult.
        return client.admin.pull(queue, offset, max_messages=1)

    results = []
    with client.producer("raymq-cli") as producer:
        for queue in client.admin.check_queues(topic_name, broker):
            progress(f"sending {count} messages to {queue}")
            results.append(check_queue(queue, producer.send, pull, count=count, size_bytes=size))
    names = ["broker", "sent", "failed", "send_ms", "send_max_ms", "round_trip_ms", "round_trip_max_ms", "error"]
    rows = [
        [round(value, 2) if isinstance(value, float) else value for value in asdict(one).values()] for one in results
    ]
    return rows_result("checks", names, rows, failed=any(one.failed for one in results))
