"""Converts transactions: a client's message to a half message, transaction ids, and checks to commands for clients.

A transaction id names the half message's broker group and place, so any gateway can end any transaction. Producers of
RocketMQ 5 have no group. As in RocketMQ, their group in the store is the topic's stored name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from raymq.client.transactions.checks import UnsentHalfMessage, checked_message, half_message
from raymq.common.message import SendResult
from raymq.common.names import GROUP_NAME_MAX
from raymq.common.numbers import NUMBER_MAX
from raymq.common.protocol.transactions import EndTransactionRequest, LocalTransactionState, TransactionCheck
from raymq.gateway.convert.incoming import IncomingMessage
from raymq.gateway.convert.outgoing import outgoing
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.convert.times import millis
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code, TransactionResolution, TransactionSource
from raymq.records.format.message_id import parse_offset_message_id

IMMUNITY_MAX_S: Final = 3600
"""Longest time in seconds before the first check that a client can ask for."""
TRANSACTION_ID_CHARS_MAX: Final = 512
_STATES: Final[Mapping[int, LocalTransactionState]] = {
    TransactionResolution.COMMIT: LocalTransactionState.COMMIT_MESSAGE,
    TransactionResolution.ROLLBACK: LocalTransactionState.ROLLBACK_MESSAGE,
}


@dataclass(frozen=True, slots=True)
class TransactionPlace:
    """The broker group and the place of a half message, as a transaction id names them. `unique_id`: the unique id of
    the message. The text of a place is the transaction id."""

    broker_name: str
    queue_offset: int
    physical_offset: int
    unique_id: str

    def __str__(self) -> str:
        return f"{self.broker_name}/{self.queue_offset}/{self.physical_offset}/{self.unique_id}"

    @classmethod
    def parse(cls, text: str) -> TransactionPlace:
        """Return the place that a transaction id names. Raises CallRefusedError if `text` is no transaction id."""
        parts = text.split("/", 3) if len(text) <= TRANSACTION_ID_CHARS_MAX else []
        if len(parts) != 4 or not all(parts) or not all(map(_is_offset, parts[1:3])):
            raise CallRefusedError(Code.INVALID_TRANSACTION_ID, "the transaction id is not one of this cluster")
        return cls(parts[0], int(parts[1]), int(parts[2]), parts[3])


def _is_offset(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(NUMBER_MAX)) and int(text) <= NUMBER_MAX


def is_transactional(topic: str) -> bool:
    """Return whether a topic can have transactions: its stored name is legal for a producer group."""
    return len(topic) <= GROUP_NAME_MAX


def half_of(sent: wire.Message, converted: IncomingMessage) -> UnsentHalfMessage:
    """Return the half message of a client's message. `converted`: the same message, checked.

    The client's time before the first check counts up to IMMUNITY_MAX_S, rounded up to whole seconds.
    """
    properties, message = sent.system_properties, converted.message
    immunity_s: int | None = None
    if properties.HasField("orphaned_transaction_recovery_duration"):
        immunity_s = min(-(-millis(properties.orphaned_transaction_recovery_duration) // 1000), IMMUNITY_MAX_S)
    return half_message(message, message.topic, immunity_s if immunity_s and immunity_s > 0 else None)


def place_of(half: SendResult) -> TransactionPlace:
    """Return the place of a half message that was sent."""
    physical_offset = parse_offset_message_id(half.offset_message_id).physical_offset
    return TransactionPlace(half.queue.broker_name, half.queue_offset, physical_offset, half.message_id)


def end_order(
    topic: str, place: TransactionPlace, state: LocalTransactionState, *, from_check: bool = False
) -> EndTransactionRequest:
    """Return the request that ends a transaction. `topic`: the stored name."""
    return EndTransactionRequest(
        topic, place.queue_offset, place.physical_offset, int(state), place.unique_id, from_transaction_check=from_check
    )


def requested_end(topic: str, request: wire.EndTransactionRequest) -> tuple[str, EndTransactionRequest] | None:
    """Return the broker group and the request that end the transaction which a client names; None if the client does
    not know the outcome yet. `topic`: the stored name. Raises CallRefusedError if the id or the outcome is illegal."""
    place = TransactionPlace.parse(request.transaction_id)
    if request.resolution == TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED:
        return None
    state = _STATES.get(request.resolution)
    if state is None:
        raise CallRefusedError(Code.BAD_REQUEST, f"resolution {request.resolution} is unknown: use COMMIT or ROLLBACK")
    from_check = request.source == TransactionSource.SOURCE_SERVER_CHECK
    return place.broker_name, end_order(topic, place, state, from_check=from_check)


def recovery_command(check: TransactionCheck, broker_name: str, topic: wire.Resource) -> wire.TelemetryCommand:
    """Return the command that asks a producer for a transaction's outcome. `topic`: the name as the producer has it.

    Raises BodyUnreadableError if the half message cannot be read.
    """
    place = TransactionPlace(broker_name, check.queue_offset, check.physical_offset, check.transaction_id)
    message = outgoing(checked_message(check, broker_name), topic)
    command = wire.RecoverOrphanedTransactionCommand(message=message, transaction_id=str(place))
    return wire.TelemetryCommand(recover_orphaned_transaction_command=command)
