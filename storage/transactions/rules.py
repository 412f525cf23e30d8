"""The rules of transactions: who may end a transaction, and what a check round does with a half message. The functions
get the current time as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from raymq.common.errors import InvalidArgumentError, TransactionError, TransactionTooLateError
from raymq.common.java_text import parse_number
from raymq.common.protocol.transactions import EndTransactionRequest, LocalTransactionState
from storage.dispatch.half_messages import EndedTransaction, HalfMessage, Outcome

_WANTED: Final = {
    int(LocalTransactionState.COMMIT_MESSAGE): Outcome.COMMITTED,
    int(LocalTransactionState.ROLLBACK_MESSAGE): Outcome.ROLLED_BACK,
}
_DONE: Final = {
    Outcome.COMMITTED: "committed",
    Outcome.ROLLED_BACK: "rolled back",
    Outcome.GIVEN_UP: "given up; its message is in TRANS_CHECK_MAX_TIME_TOPIC",
}


@dataclass(frozen=True, slots=True)
class TransactionRules:
    """Settings of the transaction rules.

    `time_out_ms`: the age in ms at which a half message is first checked. A half message is given up after `check_max`
    checks, or at the age of `reserved_ms`.
    """

    time_out_ms: int
    check_max: int
    reserved_ms: int


class CheckDecision(Enum):
    """Decision of a check round about one half message: wait, ask its producer for the outcome, or give it up."""

    WAIT = "WAIT"
    ASK = "ASK"
    GIVE_UP = "GIVE_UP"


@dataclass(frozen=True, slots=True)
class NamedHalf:
    """The half message at the physical offset that an EndTransaction request names, as stored in the log."""

    transaction_id: str
    producer_group: str
    queue_offset: int
    physical_offset: int
    born_ms: int
    # The value of the property CHECK_IMMUNITY_TIME_IN_SECONDS; None if the half message does not have the property.
    immunity: str | None


def wanted_outcome(commit_or_rollback: int) -> Outcome:
    """Return the outcome that an EndTransaction request asks for. Raises InvalidArgumentError unless the request asks
    for COMMIT_MESSAGE or ROLLBACK_MESSAGE."""
    outcome = _WANTED.get(commit_or_rollback)
    if outcome is None:
        raise InvalidArgumentError(
            f"a transaction must end with COMMIT_MESSAGE (8) or ROLLBACK_MESSAGE (12), not {commit_or_rollback}"
        )
    return outcome


def check_end(end: EndTransactionRequest, named: NamedHalf | None, now_ms: int, rules: TransactionRules) -> None:
    """Check that an EndTransaction request may end the half message `named`, in RocketMQ's order of checks (spec §1.3).
    Raises TransactionTooLateError if the producer can end the transaction only in answer to a check. Raises
    TransactionError if the request does not match a half message.

    A failover can remove a half message that was not acknowledged, and the new master can store another half message at
    the same offsets. So the transaction id must match, too. RocketMQ compares only the group and the offsets.
    """
    if named is None:
        raise TransactionError(f"physical offset {end.physical_offset} has no half message of a transaction")
    if end.transaction_id != named.transaction_id:
        raise TransactionError(
            f"physical offset {end.physical_offset} has the half message of transaction {named.transaction_id}, not of "
            f"transaction {end.transaction_id}; a check will decide transaction {end.transaction_id} if it still exists"
        )
    if not end.from_transaction_check and named.immunity is not None:
        limit_ms = max((parse_number(named.immunity) or 0) * 1000, rules.time_out_ms)
        if now_ms - named.born_ms > limit_ms:
            raise TransactionTooLateError(
                f"transaction {end.transaction_id} is {now_ms - named.born_ms} ms old, and its producer could end "
                f"it for {limit_ms} ms only; now only a check can end the transaction"
            )
    for what, said, found in (
        ("producer group", end.producer_group, named.producer_group),
        ("queue offset", end.queue_offset, named.queue_offset),
        ("physical offset", end.physical_offset, named.physical_offset),
    ):
        if said != found:
            raise TransactionError(
                f"transaction {end.transaction_id} has {what} {found!r}, but the request names {said!r}"
            )


def check_repeat(transaction_id: str, wanted: Outcome, ended: EndedTransaction | None) -> EndedTransaction:
    """Check a repeated request to end a transaction. Returns `ended`, the outcome with which the transaction has
    already ended, if it equals the requested outcome `wanted`. Raises TransactionError if the two outcomes differ, or
    if the first outcome is no longer stored."""
    if ended is None:
        raise TransactionError(f"transaction {transaction_id} ended so long ago that its outcome is no longer stored")
    if ended.outcome is not wanted:
        raise TransactionError(
            f"transaction {transaction_id} cannot be {_DONE[wanted]}: it is already {_DONE[ended.outcome]}"
        )
    return ended


def immunity_ms(immunity: str | None, rules: TransactionRules) -> int:
    """Return the minimum age, in ms, at which the broker begins to check a half message. `immunity`: the value of the
    message's property for this age, in seconds."""
    seconds = None if immunity is None else parse_number(immunity)
    return rules.time_out_ms if seconds is None or seconds == -1 else seconds * 1000


def decide_check(half: HalfMessage, now_ms: int, rules: TransactionRules, *, is_old: bool) -> CheckDecision:
    """Decide what a check round at `now_ms` does with a half message, in RocketMQ's order (spec §1.5).

    `is_old`: True if the message has certainly been in the store for `rules.reserved_ms`. So a wrong clock alone, of
    the producer or of the store, gives up no transaction. A message with an age below 0 (the clock was set back) is
    checked at once. Unlike in RocketMQ, a message that waits for its immunity time is not appended again. So its
    number of checks does not grow while it waits.
    """
    age_ms = now_ms - half.born_ms
    if half.check_times >= rules.check_max or (is_old and age_ms > rules.reserved_ms):
        return CheckDecision.GIVE_UP
    limit_ms = immunity_ms(half.immunity, rules)
    immune = age_ms <= limit_ms if half.immunity is not None else 0 <= age_ms <= limit_ms
    return CheckDecision.WAIT if immune else CheckDecision.ASK
