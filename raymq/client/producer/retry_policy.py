"""The retry policy of producers: what an error says about the messages of an attempt (spec/messaging.md §3.5).

RocketMQ's producers try a sync send on up to three brokers, and may store it on each. Here a message is stored once, so
the first question about a failure is another one: *may this attempt have stored the batch?*

    no:  the store refused it, or nothing was sent        → nothing is pinned: the messages may be encoded anew, with
         new sequences, and those that asked for no order may go to another broker's queue
    yes: no answer, or the disk failed in the middle      → the batch belongs to its queue for good, where the store
         knows its sequences: the very same bytes go there again, until there is an answer or the time is up

A sequence is never used again: what was refused leaves a gap, and the store expects gaps. The rule rests on
each attempt being carried out at most once, which holds for a lane (one stream), and for an actor call, since storage
actors have no task retries (actors.options).

How often: RocketMQ counts attempts per mode (sync 3, async transport failures only); here sync, async and oneway sends
are all retried until their time is up, since a retry costs no duplicate. Which codes are worth it is RocketMQ's table
for sync sends.
"""

from __future__ import annotations

from typing import Final

from raymq.common.errors import (
    AccessDeniedError,
    AuthenticationError,
    ClientStateError,
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
    TopicNotExistError,
)

ANOTHER_BROKER_CODES: Final = frozenset({1, 2, 14, 16, 17})
"""Codes on which RocketMQ's sync sends go to another broker. Its 204, 205 and 1500 are missing: nothing raises them."""

_REFUSALS: Final = (
    NotMasterError,
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
    """True if an append that failed with `error` may have stored something. In doubt it may."""
    return isinstance(error, StoreFailedError) or not isinstance(error, _REFUSALS)


def another_broker_helps(error: RaymqError) -> bool:
    """True if another broker may store a message that one broker refused with `error`. Users and policies are the same
    at all of them."""
    if isinstance(error, AccessDeniedError | AuthenticationError):
        return False
    return error.retryable or error.code in ANOTHER_BROKER_CODES


def given_up(error: RaymqError, timeout_s: float) -> RaymqError:
    """The error for a message that was surely not stored within `timeout_s`; `error` is the last attempt's."""
    kind = SystemBusyError if isinstance(error, SystemBusyError) else ServiceNotAvailableError
    return kind(
        f"not sent within {timeout_s:g} s, nothing of this one was stored (last failure: {error}); see `raymq status`"
    )
