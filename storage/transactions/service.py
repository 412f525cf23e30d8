"""The transactions of one store: ends them, and finds the half messages whose producers must be asked for the outcome.

Each change is one append under the append lock. Under this lock the table of half messages
(storage.dispatch.half_messages) shows whether the transaction is still open. So a transaction ends only once, even if
its end is requested several times or by several clients.

Only a master may end or check transactions; on other replicas the write gate refuses these appends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from msgspec import Struct

from raymq.common.errors import BodyUnreadableError, DataLossError, MessageIllegalError
from raymq.common.message import (
    PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS,
    PROPERTY_PRODUCER_GROUP,
    SendStatus,
)
from raymq.common.names import HALF_TOPIC
from raymq.common.protocol.store import AppendResult
from raymq.common.protocol.transactions import (
    CheckRound,
    EndResult,
    EndTransactionRequest,
    TransactionCheck,
    TransactionFigures,
    WaitingTransactions,
)
from raymq.records.format.check import check_record
from raymq.records.format.decode import CRC_WRONG
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.layout import IPV6_HOST_BYTES, RecordError, decode_host, unpack_header
from raymq.records.logfiles.log_reader import LogReader
from raymq.telemetry.metrics.histogram import Histogram, HistogramFigures
from raymq.telemetry.metrics.instruments import OTHER
from storage.append.appender import Appender
from storage.append.durability import ReplicaAcks, SettledAppend, StartedAppend, waits_for
from storage.append.write_gate import WriteGate
from storage.dispatch.delivery_progress import Delivery
from storage.dispatch.half_messages import HALF_QUEUE_ID, EndedTransaction, HalfMessage, Outcome, transaction_id
from storage.files.age_marks import AgeMarks
from storage.parts import StoreParts
from storage.stats import PutKind, StoreStats
from storage.transactions.records import HalfRecord, op_record
from storage.transactions.rules import (
    CheckDecision,
    NamedHalf,
    TransactionRules,
    check_end,
    check_repeat,
    decide_check,
    wanted_outcome,
)

CHECKS_AT_ONCE_MAX: Final = 256
"""Maximum number of half messages that one call of `check` appends again, to ask for their outcomes, or gives up. The
call holds the append lock, so it must be short."""
LATENCY_TOPICS_MAX: Final = 1000
"""Maximum number of topics whose transactions are timed separately, for metrics. Transactions of all further topics are
timed together."""
_HOUR_MS: Final = 3_600_000
_HALF_QUEUE: Final = f"queue {HALF_QUEUE_ID} of {HALF_TOPIC}"

logger = logging.getLogger(__name__)


class _Durable(Struct, frozen=True):
    """Options of the append that ends a transaction: the append always waits for the disk and the replicas."""

    wait_store_msg_ok: bool = True


class _Actions(NamedTuple):
    """Result of one selection of half messages for a check. `asked`: half messages whose producers are asked for the
    outcome, each with its new copy. `given_up`: the records for half messages that are given up."""

    asked: list[tuple[HalfMessage, Delivery]]
    given_up: list[Delivery]
    more: bool


class TransactionService:
    """Ends and checks the transactions of one store. Thread-safe."""

    def __init__(
        self, parts: StoreParts, gate: WriteGate, appender: Appender, stats: StoreStats, ages: AgeMarks
    ) -> None:
        """Serve the transactions of one store. `ages` tells how old the records of half messages are at least."""
        settings = parts.settings
        self._halves, self._log, self._append_lock = parts.halves, parts.log, parts.append_lock
        self._reader: LogReader = parts.reader
        self._holes = parts.holes
        self._gate, self._appender, self._stats = gate, appender, stats
        self._settings, self._ages = settings, ages
        ip, _, port = decode_host(appender.store_host).rpartition(":")
        self._store_host = ip.strip("[]"), int(port)
        self._ipv6 = len(appender.store_host) == IPV6_HOST_BYTES
        self._property_crc = settings.enabled_append_prop_crc
        self.on_damage: Callable[[int, int], None] = lambda physical_offset, size: None
        """Function that is called with the physical offset and the size of a damaged half message. It must not
        block."""
        # Number of checks of half messages since the store was opened.
        self._checked = 0
        self._finish_latencies: dict[str, Histogram] = {}
        """For each topic: a histogram of the times from the birth of a half message to the end of its transaction.
        Changed under the append lock."""

    @property
    def _rules(self) -> TransactionRules:
        """The settings about open transactions (timeouts, number of checks), with their current values."""
        settings = self._settings
        return TransactionRules(
            settings.transaction_time_out_ms,
            settings.transaction_check_max,
            settings.file_reserved_time_hours * _HOUR_MS,
        )

    @property
    def _op_size(self) -> int:
        """Maximum number of characters in the body of an op record."""
        return self._settings.transaction_op_msg_max_size

    def start_end(
        self, end: EndTransactionRequest, *, require_topic: Callable[[str], None], acks: ReplicaAcks | None = None
    ) -> StartedAppend:
        """Start to commit or roll back a transaction.

        The append has one result, an EndResult. Once the append is settled, the result is as durable as the settings
        promise. `require_topic` raises an error if messages must not be stored in a topic.

        If the transaction was already ended in the same way, the call succeeds and changes nothing. Raises
        InvalidArgumentError if the request is neither commit nor rollback, and TransactionTooLateError if the producer
        can end the transaction only in answer to a check. Raises TransactionError if the transaction belongs to another
        group, or has another outcome. Raises MessageIllegalError if the message cannot be stored; the transaction stays
        open. Raises the errors of AppendService.append, too.
        """
        wanted = wanted_outcome(end.commit_or_rollback)
        start_s, gate = time.monotonic(), self._gate
        waits = (gate.is_sync or acks is not None) and waits_for([_Durable()], acks)
        result, end_offset = gate.write(partial(self._end, end, wanted, require_topic))
        if wanted is Outcome.COMMITTED and not result.duplicate:
            self._stats.count_puts([(result.topic, 1, 0)], time.monotonic() - start_s, PutKind.TRANSACTION)
        results: list[AppendResult] = [result]
        if not waits:
            return SettledAppend(results, time.monotonic())
        disk = gate if gate.is_sync else None
        wait_s = gate.timeout_s if disk is not None or acks is None else acks.timeout_s
        return StartedAppend((results, end_offset), [_Durable()], disk, acks, deadline_s=start_s + wait_s)

    def end(
        self,
        end: EndTransactionRequest,
        *,
        require_topic: Callable[[str], None] = lambda topic: None,
        acks: ReplicaAcks | None = None,
    ) -> EndResult:
        """Commit or roll back a transaction as `start_end` does, and wait for the result."""
        started = self.start_end(end, require_topic=require_topic, acks=acks)
        [result] = self._gate.progress.wait_settled(started)
        assert isinstance(result, EndResult)
        return result

    def check(self, groups: Sequence[str], start_ms: int = 0) -> CheckRound:
        """Run a part of a check round. The round began at `start_ms` (0: now, by the store's clock).

        `groups` are the producer groups with live producers. If a half message is old enough and its group is in
        `groups`, it is appended again with a higher check count. It is also returned, so that its producer can be asked
        for the outcome. Other half messages wait, and their check count does not change. A half message is given up if
        it was checked often enough, or is as old as log files are kept. A damaged half message is logged, and waits
        until it is repaired or given up.
        """
        checks, _ = self._gate.write(partial(self._check, frozenset(groups), start_ms))
        return checks

    def figures(self) -> TransactionFigures:
        """Return the numbers of waiting transactions by group, starting with the group that has the oldest transaction.
        Also return the counters since the store was opened."""
        waiting: dict[tuple[str, str], tuple[int, int]] = {}
        with self._append_lock:
            for half in self._halves.open.values():
                key = half.topic, half.producer_group
                count, oldest_ms = waiting.get(key, (0, half.born_ms))
                waiting[key] = count + 1, min(oldest_ms, half.born_ms)
            counts = dict(self._halves.counts)
        rows = [WaitingTransactions(*key, *values) for key, values in waiting.items()]
        rows.sort(key=lambda row: row.oldest_born_timestamp_ms)
        return TransactionFigures(
            rows,
            counts[Outcome.COMMITTED],
            counts[Outcome.ROLLED_BACK],
            counts[Outcome.GIVEN_UP],
            self._checked,
        )

    def finish_latencies(self) -> dict[str, HistogramFigures]:
        """Return, by topic, a histogram of the times in ms from the birth of a half message to its commit or rollback.

        Counts transactions that ended since the store was opened.
        """
        with self._append_lock:
            return {topic: latencies.figures() for topic, latencies in self._finish_latencies.items()}

    # Methods whose caller must hold the append lock

    def _count_finish(self, half: HalfMessage) -> None:
        latencies = self._finish_latencies
        topic = half.topic if half.topic in latencies or len(latencies) < LATENCY_TOPICS_MAX else OTHER
        latency_ms = max(0, self._appender.read_clock() - half.born_ms)
        latencies.setdefault(topic, Histogram("raymq_finish_message_latency_milliseconds")).add(latency_ms)

    def _end(self, end: EndTransactionRequest, wanted: Outcome, require_topic: Callable[[str], None]) -> EndResult:
        check_end(end, self._named(end), self._appender.read_clock(), self._rules)
        key = end.transaction_id
        half = self._halves.open.get(key)
        if half is None:
            return _end_result(check_repeat(key, wanted, self._halves.ended(key)), duplicate=True)
        if wanted is Outcome.COMMITTED:
            require_topic(half.topic)
            record = self._read(half)
            if not record.is_intact:
                self.on_damage(half.physical_offset, half.size)
                raise _unreadable(half, CRC_WRONG)
            deliveries = [self._fitting(record.final_message())]
            if len(self._halves.unwritten_ops) * 8 >= self._op_size:
                deliveries.append(self._op([]))
        else:
            deliveries = [self._op(list(half.queue_offsets))]
        self._deliver(deliveries)
        self._count_finish(half)
        ended = self._halves.ended(key)
        assert ended is not None
        return _end_result(ended, duplicate=False)

    def _named(self, end: EndTransactionRequest) -> NamedHalf | None:
        """Return the half message at the physical offset that an EndTransaction request names. Return None if the log
        has none at this offset."""
        half = self._halves.open.get(end.transaction_id)
        if half is not None and half.physical_offset == end.physical_offset:
            place = half.queue_offset, half.physical_offset
            return NamedHalf(half.transaction_id, half.producer_group, *place, half.born_ms, half.immunity)
        offset, log_end = end.physical_offset, self._log.end_offset
        if not self._log.min_offset <= offset < log_end:
            return None
        self._appender.commit()
        file_end = offset - offset % self._log.file_size + self._log.file_size
        try:
            data = self._reader.log_bytes(offset, min(file_end, log_end))
            size, good = check_record(data)
            view = dispatch_view(data) if good and size > 0 else None
        except (DataLossError, RecordError):
            view = None
        hole = next((hole for hole in self._holes.holes if hole.offset <= offset < hole.end_offset), None)
        if hole is not None:
            raise BodyUnreadableError(_HALF_QUEUE, end.queue_offset, offset, hole.reason, True)
        if view is None or view.topic != HALF_TOPIC:
            return None
        properties = view.properties
        return NamedHalf(
            transaction_id(view),
            properties.get(PROPERTY_PRODUCER_GROUP, ""),
            view.queue_offset,
            view.physical_offset,
            unpack_header(data, 0)[8],
            properties.get(PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS),
        )

    def _check(self, groups: frozenset[str], start_ms: int) -> CheckRound:
        now_ms = self._appender.read_clock()
        start_ms = start_ms or now_ms
        asked, given_up, more = self._actions(groups, now_ms, start_ms)
        deliveries = [copy for _, copy in asked] + given_up
        if len(self._halves.unwritten_ops) and not more:
            deliveries.append(self._op([]))
        self._deliver(deliveries)
        self._checked += len(asked)
        checks = [self._question(self._halves.open[half.transaction_id]) for half, _ in asked]
        return CheckRound(start_ms, checks, len(given_up), more)

    def _actions(self, groups: frozenset[str], now_ms: int, start_ms: int) -> _Actions:
        asked: list[tuple[HalfMessage, Delivery]] = []
        given_up: list[Delivery] = []
        rules = self._rules
        old_until = self._ages.old_until(rules.reserved_ms)
        for half in list(self._halves.open.values()):
            if half.stored_ms >= start_ms:
                # end this round of checks: this half message and all later ones were stored after the round's start
                break
            if len(asked) + len(given_up) == CHECKS_AT_ONCE_MAX:
                return _Actions(asked, given_up, more=True)
            decision = decide_check(half, now_ms, rules, is_old=half.physical_offset < old_until)
            if decision is CheckDecision.WAIT or (decision is CheckDecision.ASK and half.producer_group not in groups):
                continue
            try:
                record = self._read(half)
            except DataLossError:
                self._halves.drop(half.transaction_id)
                continue
            # a damaged half message does not stop the check of the other half messages
            except BodyUnreadableError as error:
                logger.error("transaction %s cannot be checked: %s", half.transaction_id, error)
                if decision is CheckDecision.GIVE_UP:
                    # The half message is damaged, so its content can never be read. Give it up, because retention keeps
                    # the log's files as long as the half message is open.
                    logger.error("transaction %s is unreadable and now counts as rolled back", half.transaction_id)
                    given_up.append(self._op(list(half.queue_offsets)))
                continue
            if not record.is_intact:
                self.on_damage(half.physical_offset, half.size)
            if decision is CheckDecision.ASK and not record.is_intact:
                logger.error("transaction %s cannot be checked: %s", half.transaction_id, _unreadable(half, CRC_WRONG))
                continue
            if decision is CheckDecision.ASK:
                asked.append((half, record.checked_copy()))
            else:
                given_up.append(record.given_up())
        return _Actions(asked, given_up, more=False)

    def _question(self, half: HalfMessage) -> TransactionCheck:
        self._appender.commit()
        place = half.physical_offset, half.physical_offset + half.size
        record = bytes(self._reader.log_bytes(*place))
        offsets = half.queue_offset, half.physical_offset
        return TransactionCheck(half.producer_group, half.transaction_id, *offsets, half.check_times, record)

    def _read(self, half: HalfMessage) -> HalfRecord:
        """Return the newest record of a half message. Raises DataLossError if the record was deleted,
        BodyUnreadableError if it is damaged."""
        self._appender.commit()
        record = self._reader.log_bytes(half.physical_offset, half.physical_offset + half.size)
        try:
            return HalfRecord(half, record, store_host_ipv6=self._ipv6)
        except RecordError as error:
            self.on_damage(half.physical_offset, half.size)
            raise _unreadable(half, error.reason) from None

    def _op(self, first: list[int]) -> Delivery:
        """Build an op record that marks half messages as finished. The record names the half messages at the queue
        offsets `first`. It also names other finished half messages that have no op record yet, up to the record's
        maximum size."""
        offsets, size = list(first), 0
        for offset in self._halves.unwritten_ops:
            size += len(str(offset)) + 1
            if size > self._op_size:
                break
            offsets.append(offset)
        now_ms = self._appender.read_clock()
        return op_record(offsets, now_ms, self._store_host, ipv6=self._ipv6, property_crc=self._property_crc)

    def _fitting(self, delivery: Delivery) -> Delivery:
        """Check the size of the record in `delivery`, and return `delivery` unchanged. Raises MessageIllegalError if
        the record is longer than this store allows."""
        size = len(delivery.record)
        if size > self._appender.record_max_bytes:
            raise MessageIllegalError(
                f"a record of {size} bytes exceeds this store's limit of {self._appender.record_max_bytes}"
            )
        return delivery

    def _deliver(self, deliveries: list[Delivery]) -> None:
        if deliveries:
            self._appender.deliver(None, deliveries)


def _unreadable(half: HalfMessage, reason: str) -> BodyUnreadableError:
    """Build the error for a half message whose record is damaged."""
    place = half.queue_offset, half.physical_offset
    return BodyUnreadableError(_HALF_QUEUE, *place, reason, True)


def _end_result(ended: EndedTransaction, *, duplicate: bool) -> EndResult:
    return EndResult(
        SendStatus.SEND_OK,
        ended.queue_offset,
        ended.physical_offset,
        ended.stored_ms,
        duplicate,
        topic=ended.topic,
        queue_id=ended.queue_id,
    )
