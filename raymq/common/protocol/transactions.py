"""Requests about transactions: how a producer ends a transaction, what a broker's check of a transaction contains, and
how many transactions are open."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from raymq.common.protocol.store import AppendResult


class LocalTransactionState(IntEnum):
    """The outcome of a local transaction, as its producer reports it. The values are RocketMQ's transaction
    bits."""

    UNKNOW = 0
    COMMIT_MESSAGE = 8
    ROLLBACK_MESSAGE = 12


@dataclass(frozen=True, slots=True)
class EndTransactionRequest:
    """A request to end a transaction. `queue_offset` and `physical_offset`: offsets of the transaction's half message,
    or of a copy that a check stored. `commit_or_rollback`: COMMIT_MESSAGE or ROLLBACK_MESSAGE."""

    producer_group: str
    queue_offset: int
    physical_offset: int
    commit_or_rollback: int
    transaction_id: str
    from_transaction_check: bool = False


class EndResult(AppendResult, frozen=True, gc=False):
    """The answer to an EndTransactionRequest: the position of the committed message in queue `queue_id` of its `topic`.

    A rollback stores no message, so the offsets are the offsets of the rollback's record. `duplicate`: True if the
    transaction already had this outcome, so that nothing was written now.
    """

    topic: str = ""
    queue_id: int = -1


@dataclass(frozen=True, slots=True)
class TransactionCheck:
    """A broker's query to a producer group for the outcome of a transaction. `record`: the half message, as in the log.
    `times`: number of checks of this message, including this check."""

    producer_group: str
    transaction_id: str
    queue_offset: int
    physical_offset: int
    times: int
    record: bytes


@dataclass(frozen=True, slots=True)
class CheckRound:
    """A portion of the transaction checks of one round. If `more` is True, the round has further checks, and the client
    repeats the request with the same `start_ms`."""

    start_ms: int
    checks: list[TransactionCheck]
    given_up: int
    more: bool


@dataclass(frozen=True, slots=True)
class WaitingTransactions:
    """The number of open transactions of one producer group in one topic, and the birth time of the oldest transaction
    in ms since 1970."""

    topic: str
    producer_group: str
    waiting: int
    oldest_born_timestamp_ms: int


@dataclass(frozen=True, slots=True)
class TransactionFigures:
    """Metrics of one store's transactions: the open transactions, and counters since the store was opened."""

    waiting: list[WaitingTransactions] = field(default_factory=list)
    committed: int = 0
    rolled_back: int = 0
    given_up: int = 0
    checked: int = 0
