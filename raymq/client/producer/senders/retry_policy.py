"""The retry policy of producers: what an error means for the messages of an attempt.

RocketMQ's producers try a sync send on up to three brokers, and may store the message on each of them. In raymq a
message is stored once. So after each failure, one question decides: *may this attempt have stored the batch?*

    no:  the store refused the batch, or nothing was sent. The messages may be encoded again, with new sequences.
         Messages that asked for no order may go to another broker's queue.
    yes: there was no answer, or the disk failed. The batch stays with its queue, whose store has its sequences. The
         very same bytes are sent there again, until there is an answer or the deadline has passed.

No sequence is used twice. A refused batch leaves a gap in the sequences, and the store accepts gaps. The rule requires
that the connection delivers no attempt twice. A lane (direct socket connection) is one stream, so it delivers each
attempt at most once.

RocketMQ counts attempts: 3 for a sync send. For an async send it retries only transport failures. In raymq each send is
retried until its deadline, because a retry makes no duplicate. The error codes that are retried are RocketMQ's codes
for sync sends.
"""

from __future__ import annotations

from typing import Final

from raymq.common.errors import (
    AccessDeniedError,
    AuthenticationError,
    ClientStateError,
    InSyncReplicasError,
    InvalidArgumentError,
    MessageIllegalError,
    NoPermissionError,
    NotMasterError,
    QuotaExceededError,
    RaymqError,
    ServiceNotAvailableError,
    StoreCorruptError,
    StoreFailedError,
    StoreLockedError,
    StoreNotWritableError,
    SystemBusyError,
    TopicFullError,
    TopicNotExistError,
)

ANOTHER_BROKER_CODES: Final = frozenset({1, 2, 14, 16, 17})
"""Error codes after which RocketMQ's producer repeats a synchronous send at another broker. RocketMQ's codes 204, 205
and 1500 are not included, because raymq raises no error with these codes."""

_REFUSALS: Final = (
    NotMasterError,
    InSyncReplicasError,
    QuotaExceededError,
    SystemBusyError,
    MessageIllegalError,
    InvalidArgumentError,
    NoPermissionError,
    TopicNotExistError,
    ClientStateError,
    StoreLockedError,
    StoreCorruptError,
    StoreNotWritableError,
)


def may_be_stored(error: RaymqError) -> bool:
    """Return True if an append that failed with `error` may have stored messages. Returns True also if the error does
    not show whether messages were stored."""
    return isinstance(error, StoreFailedError) or not isinstance(error, _REFUSALS)


def another_broker_helps(error: RaymqError) -> bool:
    """Return True if another broker may store a message that one broker refused with `error`. Returns False for a
    missing permission, because all brokers have the same users and policies."""
    if isinstance(error, AccessDeniedError | AuthenticationError):
        return False
    return error.retryable or error.code in ANOTHER_BROKER_CODES


def given_up(error: RaymqError, timeout_s: float) -> RaymqError:
    """Return the error to report for a message whose timeout of `timeout_s` seconds has ended, and that is certainly
    not stored. `error`: the error of the last attempt."""
    if isinstance(error, TopicFullError):
        known = (error.topic, error.group, error.limit, error.waits, error.most, error.retry_after_s)
        return TopicFullError(*known, float(timeout_s))
    kind = SystemBusyError if isinstance(error, SystemBusyError) else ServiceNotAvailableError
    return kind(
        f"the message was not sent within {timeout_s:g} s and is not stored (last failure: {error}); see `raymq status`"
    )
