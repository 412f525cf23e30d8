"""Converts errors and results of raymq to the status codes of RocketMQ's gRPC protocol.

Clients decide by the code whether they send a request again. So each error that a later attempt may not raise has a
code that clients retry.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import ClassVar, Final

from raymq.common.errors import (
    AuthenticationError,
    FilterExpressionError,
    GroupNotExistError,
    IllegalNameError,
    InSyncReplicasError,
    InvalidArgumentError,
    MessageIllegalError,
    NoPermissionError,
    NotMasterError,
    QuotaExceededError,
    RaymqError,
    RecallError,
    ReceiptExpiredError,
    RequestTimeoutError,
    SendUnknownError,
    ServiceNotAvailableError,
    SystemBusyError,
    TopicNotExistError,
    TransactionError,
)
from raymq.common.message import SendStatus
from raymq.gateway.wire.enums import Code
from raymq.gateway.wire.messages import Status
from raymq.gateway.wire.parsing import RequestTooLargeError

logger = logging.getLogger(__name__)


class CallRefusedError(RaymqError):
    """A request breaks a rule that has a status code of its own. Nothing was done. `status`: the code. `text`: the
    reason."""

    code: ClassVar[int] = 13

    def __init__(self, status: Code, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text

    def __str__(self) -> str:
        return self.text


_CODES: Final[tuple[tuple[type[BaseException], Code], ...]] = (
    (TopicNotExistError, Code.TOPIC_NOT_FOUND),
    (GroupNotExistError, Code.CONSUMER_GROUP_NOT_FOUND),
    (AuthenticationError, Code.UNAUTHORIZED),
    (NoPermissionError, Code.FORBIDDEN),
    (FilterExpressionError, Code.ILLEGAL_FILTER_EXPRESSION),
    (ReceiptExpiredError, Code.INVALID_RECEIPT_HANDLE),
    (RecallError, Code.BAD_REQUEST),
    (TransactionError, Code.INVALID_TRANSACTION_ID),
    (QuotaExceededError, Code.TOO_MANY_REQUESTS),
    (SystemBusyError, Code.TOO_MANY_REQUESTS),
    (InSyncReplicasError, Code.HA_NOT_AVAILABLE),
    (NotMasterError, Code.HA_NOT_AVAILABLE),
    (ServiceNotAvailableError, Code.HA_NOT_AVAILABLE),
    (RequestTimeoutError, Code.PROXY_TIMEOUT),
    (SendUnknownError, Code.PROXY_TIMEOUT),
    (RequestTooLargeError, Code.PAYLOAD_TOO_LARGE),
    (MessageIllegalError, Code.BAD_REQUEST),
    (InvalidArgumentError, Code.BAD_REQUEST),
)
"""The code of each class of errors. The first class that fits counts, so a class is before its base class."""

_SENT: Final[Mapping[SendStatus, Code]] = {
    SendStatus.SEND_OK: Code.OK,
    SendStatus.FLUSH_DISK_TIMEOUT: Code.MASTER_PERSISTENCE_TIMEOUT,
    SendStatus.FLUSH_SLAVE_TIMEOUT: Code.SLAVE_PERSISTENCE_TIMEOUT,
    SendStatus.SLAVE_NOT_AVAILABLE: Code.HA_NOT_AVAILABLE,
}


def code_of(error: BaseException) -> Code | None:
    """Return the code of an error; None if the error is unexpected."""
    if isinstance(error, CallRefusedError):
        return error.status
    if isinstance(error, IllegalNameError):
        return Code.ILLEGAL_CONSUMER_GROUP if error.kind == "group" else Code.ILLEGAL_TOPIC
    return next((code for kind, code in _CODES if isinstance(error, kind)), None)


def status_of(error: BaseException) -> Status:
    """Return the status that answers a call which raised `error`.

    The text of an unexpected error may contain data of other users, so the client gets only a number, with which the
    log has the error.
    """
    code = code_of(error)
    if code is not None:
        return Status(code=code, message=str(error))
    number = secrets.token_hex(4)
    logger.error("call failed with an unexpected error (number %s)", number, exc_info=error)
    return Status(code=Code.INTERNAL_SERVER_ERROR, message=f"unexpected error; the gateway's log has it: {number}")


def ok() -> Status:
    """Return the status of a call that succeeded."""
    return Status(code=Code.OK, message="OK")


def sent_status(status: SendStatus) -> Status:
    """Return the status of a stored message. The message is stored in all cases; other codes than OK report that it is
    less durable than its topic's settings promise."""
    code = _SENT[status]
    return Status(code=code, message=code.name)


def common_status(statuses: list[Status]) -> Status:
    """Return the status of an answer with several entries: their status if all codes are equal, else
    MULTIPLE_RESULTS, for which clients look at each entry."""
    codes = {status.code for status in statuses}
    if len(codes) == 1:
        return statuses[0]
    return Status(code=Code.MULTIPLE_RESULTS, message="the entries have different results")
