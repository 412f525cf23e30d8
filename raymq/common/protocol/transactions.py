"""Transactions on the wire: how a producer ends one, what a check carries, and how many wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from raymq.common.protocol.store import AppendResult


class LocalTransactionState(IntEnum):
    """The outcome of a local transaction, as its producer knows it. The values are RocketMQ's transaction bits."""

    UNKNOW = 0
    COMMIT_MESSAGE = 8
    ROLLBACK_MESSAGE = 12


@dataclass(frozen=True, slots=True)
class EndTransactionRequest:
    """The order to end a transaction. `queue_offset` and `physical_offset` are those of its half message, or of any
    copy of it that a check made. `commit_or_rollback` is COMMIT_MESSAGE or ROLLBACK_MESSAGE."""

    producer_group: str
    queue_offset: int
    physical_offset: int
    commit_or_rollback: int
    transaction_id: str
    from_transaction_check: bool = False


class EndResult(AppendResult, frozen=True, gc=False):
    """The answer to an EndTransactionRequest: the message's place in queue `queue_id` of its `topic`.

    After a rollback there is none, and the offsets are those of the record that says so. `duplicate`: the transaction
    had ended in this way before, and nothing was written now.
    """

    topic: str = ""
    queue_id: int = -1


@dataclass(frozen=True, slots=True)
class TransactionCheck:
    """The question to a producer group how a transaction has ended. `record` is the half message as it is in the log;
    `times` counts the checks of this message, this one included."""

    producer_group: str
    transaction_id: str
    queue_offset: int
    physical_offset: int
    times: int
    record: bytes


@dataclass(frozen=True, slots=True)
class CheckRound:
    """The checks of a part of a round. While `more`, the round goes on: ask again with the same `start_ms`."""

    start_ms: int
    checks: list[TransactionCheck]
    given_up: int
    more: bool


@dataclass(frozen=True, slots=True)
class WaitingTransactions:
    """The transactions of one producer group with one topic that have no outcome yet, and the birth of the oldest, in
    ms since 1970."""

    topic: str
    producer_group: str
    waiting: int
    oldest_born_timestamp_ms: int


@dataclass(frozen=True, slots=True)
class TransactionFigures:
    """The transactions of one store that wait; and counters since it was opened."""

    waiting: list[WaitingTransactions] = field(default_factory=list)
    committed: int = 0
    rolled_back: int = 0
    given_up: int = 0
    checked: int = 0
