"""LeasedTasks decides what happens to each message that a share-mode instance has leased.

    receive ─► leased ─► tasks, for the threads of the listener ─► reported ─► Settlement
                                                                   ├ acks    consumed
                                                                   ├ later   failed: visible after the retry interval
                                                                   │         not begun: visible at once, not counted
                                                                   └ letters the last attempt failed

A message is held from its receive until its settlement has reached the broker. Held messages count against the bound of
the prefetch (raymq.client.consumer.share.prefetch).

In order mode the messages of one message group (sharding key) form one task, in the order of their offsets, and its
calls follow one another. The broker leases no further messages of a queue until all leased messages of the queue are
acknowledged or visible. So the next message of a message group waits for the acknowledgement of the message before.
After a failure, the failed message and the messages behind it in its task become visible at the same time; only the
failed message's attempt counts. Messages whose records have no message group are in order with each other, by queue.

The class has no clock, no thread and no calls. Times are in s, of any one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raymq.client.consumer.share.prefetch import Prefetch, Room
from raymq.client.consumer.simple.received_message import Receipt, ReceivedMessage
from raymq.common.delay import DELAY_LEVELS_MS
from raymq.common.message import PROPERTY_SHARDING_KEY
from raymq.common.protocol.consume_result import SUSPEND_MAX_MS, SUSPEND_MIN_MS, ConsumeReport, Failure
from raymq.common.protocol.group import retry_interval_s
from raymq.common.protocol.pop import INVISIBLE_MAX_MS


class Later(NamedTuple):
    """Messages that become visible again `invisible_ms` from now. `counted`: False if the listener was not called with
    them, so that their attempt does not count."""

    messages: tuple[ReceivedMessage, ...]
    invisible_ms: int
    counted: bool


class Letter(NamedTuple):
    """A message that becomes a dead letter, after `attempts` failed deliveries. `failure`: why the last one failed."""

    message: ReceivedMessage
    attempts: int
    failure: str


@dataclass(slots=True)
class Settlement:
    """The calls to the brokers about messages. The parts are carried out in the order of the fields: in order mode
    a message group continues only after the letter of its failed message is stored. `size_bytes`: the size of the
    records of all these messages. `failed`: the number of messages whose listener calls failed."""

    acks: list[ReceivedMessage] = field(default_factory=list)
    letters: list[Letter] = field(default_factory=list)
    later: list[Later] = field(default_factory=list)
    size_bytes: int = 0
    failed: int = 0

    @property
    def count(self) -> int:
        """The number of messages that the settlement covers."""
        return len(self.acks) + len(self.letters) + sum(len(one.messages) for one in self.later)


@dataclass(slots=True, eq=False)
class LeasedTask:
    """Messages for one request of the listener's threads. `key`: the message group whose order counts; None without
    order. `running`: the indices of messages whose listener calls have not ended. `size_bytes`: the size of the records
    of the running messages. `after_ms`: when the messages behind a failed message of the group become visible."""

    messages: list[ReceivedMessage]
    key: str | None
    running: set[int]
    size_bytes: int
    after_ms: int = 0

    @property
    def receipts(self) -> list[Receipt]:
        """The receipts of all leases to which the task's messages belong."""
        return list({id(message._receipt): message._receipt for message in self.messages}.values())


class LeasedTasks:
    """The messages that one instance has leased. Not thread-safe. `ordered`: True for order mode."""

    def __init__(self, prefetch: Prefetch, *, ordered: bool) -> None:
        self._prefetch, self._ordered = prefetch, ordered
        self.held = self.held_bytes = 0
        """Number of messages that are leased and not settled at their brokers, and the size of their records."""
        self.consumed = self.failures = 0
        """Numbers of messages whose listener calls succeeded or failed."""

    def room(self) -> Room:
        """Return how many messages a receive may lease now."""
        return self._prefetch.room(self.held, self.held_bytes)

    def leased(self, messages: Sequence[ReceivedMessage]) -> list[LeasedTask]:
        """Hold received messages, and divide them into tasks: one for each message group in order mode, otherwise one
        for each lease."""
        by_task: dict[object, list[ReceivedMessage]] = {}
        for message in messages:
            by_task.setdefault(_group_key(message) if self._ordered else id(message._receipt), []).append(message)
        shares = _shares(messages)
        tasks = []
        for key, own in by_task.items():
            size_bytes = round(sum(shares[id(message._receipt)] for message in own))
            tasks.append(LeasedTask(own, str(key) if self._ordered else None, set(range(len(own))), size_bytes))
        self.held += len(messages)
        self.held_bytes += sum(task.size_bytes for task in tasks)
        return tasks

    def reported(self, task: LeasedTask, report: ConsumeReport, now_s: float) -> Settlement:
        """Decide what follows from a report about a task's listener calls."""
        ended = task.running.difference(report.unfinished)
        settlement = Settlement()
        failed: dict[int, Failure] = {}
        for failure in report.failures:
            failed |= dict.fromkeys(ended.intersection(range(failure.first, failure.first + failure.count)), failure)
        settlement.acks = [task.messages[index] for index in sorted(ended.difference(failed))]
        for index, failure in sorted(failed.items()):
            self._fail(task, index, failure, settlement)
        gone = set(ended)
        if report.ended:
            left = sorted(task.running - ended)
            gone.update(left)
            if left:
                # The messages behind a failed message go first, so that a crash in between changes no order.
                rest = Later(tuple(task.messages[index] for index in left), task.after_ms, counted=False)
                settlement.later.insert(0, rest)
        settlement.size_bytes = _part_bytes(task, len(gone), len(task.running))
        settlement.failed = len(failed)
        task.size_bytes -= settlement.size_bytes
        task.running -= gone
        self.consumed += len(ended) - len(failed)
        self.failures += len(failed)
        self._prefetch.consumed(len(ended), now_s)
        return settlement

    def _fail(self, task: LeasedTask, index: int, failure: Failure, settlement: Settlement) -> None:
        message = task.messages[index]
        most = message._receipt.retry_max_times
        if failure.delay_level < 0 or failure.unreadable or 0 <= most < message.attempt:
            settlement.letters.append(Letter(message, message.attempt, failure.error))
            return
        after_ms = _retry_after_ms(message, failure, ordered=task.key is not None)
        if task.key is not None:
            task.after_ms = max(task.after_ms, after_ms)
        settlement.later.append(Later((message,), after_ms, counted=True))

    def settled(self, count: int, size_bytes: int) -> None:
        """Note that the brokers were told about messages, or never will be: they are held no more."""
        self.held -= count
        self.held_bytes -= size_bytes


def _group_key(message: ReceivedMessage) -> str:
    """Return the name of the message group of a message, within its queue."""
    receipt = message._receipt
    group = message.system_properties.get(PROPERTY_SHARDING_KEY, "")
    return f"{receipt.broker_name}:{receipt.queue_id}:{receipt.topic}:{group}"


def _retry_after_ms(message: ReceivedMessage, failure: Failure, *, ordered: bool) -> int:
    """Return the time in ms until a failed message is delivered again: as the listener asks, or else the group's retry
    interval. A call that timed out asks for nothing."""
    if ordered and failure.suspend_ms >= 0:
        return min(max(failure.suspend_ms, SUSPEND_MIN_MS), SUSPEND_MAX_MS)
    if not ordered and failure.delay_level > 0 and not failure.timed_out:
        return DELAY_LEVELS_MS[min(failure.delay_level, len(DELAY_LEVELS_MS)) - 1]
    interval_s = retry_interval_s(message._receipt.retry_intervals_s, message.attempt)
    return min(round(interval_s * 1000), INVISIBLE_MAX_MS)


def _shares(messages: Iterable[ReceivedMessage]) -> dict[int, float]:
    """Return for each receipt, by its id, the average size in bytes of one message of its lease."""
    counts: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for message in messages:
        receipt = message._receipt
        counts[id(receipt)] = counts.get(id(receipt), 0) + 1
        sizes[id(receipt)] = receipt.size_bytes
    return {key: sizes[key] / count for key, count in counts.items()}


def _part_bytes(task: LeasedTask, count: int, running: int) -> int:
    """Return the size of `count` of the task's running messages; the last ones have all the rest."""
    return task.size_bytes if count == running else task.size_bytes * count // running
