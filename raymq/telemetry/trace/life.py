"""Assembles the history of one message from trace records. The table names the kinds of records, and the ids by which
the module assigns records to the message:

    Pub, EndTransaction, Recall              by the message's id
    SubBefore + SubAfter = one Attempt       by request id and message id; one of both may be missing

A trace message may be sent twice, so several trace messages may contain the same record. Such a record counts only
once. The module has no state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raymq.telemetry.trace.records import ContextCode, EndTransaction, Pub, Recall, SubAfter, SubBefore, TraceRecord


@dataclass(frozen=True, slots=True)
class Attempt:
    """One delivery of a message to a consumer group. `began_ms` is None if only the end of the delivery is recorded.
    `code` and `cost_ms` are None if only the beginning is recorded: the consumer still works on the message, or has
    died. `retry_times`: number of earlier deliveries."""

    group: str
    began_ms: int | None
    retry_times: int | None
    code: ContextCode | None
    cost_ms: int | None
    ended_ms: int | None


@dataclass(frozen=True, slots=True)
class MessageLife:
    """The history of one message: its trace records, each kind sorted by time."""

    message_id: str
    sends: tuple[Pub, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    transactions: tuple[EndTransaction, ...] = ()
    recalls: tuple[Recall, ...] = ()

    @property
    def topic(self) -> str | None:
        """The topic to which the message was sent; None if no trace record contains the topic."""
        told: list[Pub | EndTransaction | Recall] = [*self.sends, *self.transactions, *self.recalls]
        return told[0].topic if told else None

    def __bool__(self) -> bool:
        """True if the history contains at least one trace record."""
        return bool(self.sends or self.attempts or self.transactions or self.recalls)


def life_of(message_id: str, records: Iterable[TraceRecord]) -> MessageLife:
    """Return the history of the message with this unique id, from trace records of any messages in any order."""
    own = list(dict.fromkeys(record for record in records if record.message_id == message_id))
    before = {one.request_id: one for one in own if isinstance(one, SubBefore)}
    after = {one.request_id: one for one in own if isinstance(one, SubAfter)}
    attempts = [_attempt(before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after])]
    return MessageLife(
        message_id,
        tuple(sorted((one for one in own if isinstance(one, Pub)), key=lambda one: one.time_ms)),
        tuple(sorted(attempts, key=lambda one: one.began_ms or one.ended_ms or 0)),
        tuple(sorted((one for one in own if isinstance(one, EndTransaction)), key=lambda one: one.time_ms)),
        tuple(sorted((one for one in own if isinstance(one, Recall)), key=lambda one: one.time_ms)),
    )


def _attempt(before: SubBefore | None, after: SubAfter | None) -> Attempt:
    group = before.group if before is not None else after.group if after is not None else None
    return Attempt(
        group or "",
        None if before is None else before.time_ms,
        None if before is None else before.retry_times,
        None if after is None else after.code,
        None if after is None else after.cost_ms,
        None if after is None else after.time_ms,
    )
