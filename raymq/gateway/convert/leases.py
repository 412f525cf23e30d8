"""Reads the times and numbers in a request of a consumer, with RocketMQ's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from raymq.common.protocol.pop import INVISIBLE_MAX_MS, INVISIBLE_MIN_MS, RECEIVE_MAX_MESSAGES
from raymq.gateway.convert.client_settings import LONG_POLLING_MS, RECEIVE_BATCH_SIZE
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.convert.times import millis
from raymq.gateway.wire.enums import Code
from raymq.gateway.wire.messages import Duration, ReceiveMessageRequest

PUSH_INVISIBLE_MS: Final = 60_000
"""Invisible time in ms of a message that a push consumer receives. The consumer names no time of its own."""
POLLING_LEFT_MIN_S: Final = 0.1
"""Shortest time in seconds before the caller's deadline in which a receive makes sense."""
POLLING_MARGIN_S: Final = 0.5
"""Time in seconds before the caller's deadline at which a receive ends, so that its answer arrives in time."""
POLLING_CODE_SINCE: Final = (5, 0, 3)
"""Version of the clients that know the code ILLEGAL_POLLING_TIME first."""
REQUEST_HALF_S: Final = 1.5
"""Half of a client's usual request timeout, in seconds: a client without a polling time adds it to its deadline."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The terms of one receive: the maximum number of messages, their invisible time, and the time to wait for the
    first message."""

    max_messages: int
    invisible_ms: int
    wait_s: float


def lease_terms(request: ReceiveMessageRequest, left_s: float, client_version: str = "") -> LeaseTerms:
    """Return the terms of a receive. `left_s`: the time in seconds until the caller stops waiting. `client_version`:
    the version of the client, empty if it is unknown.

    A request with `auto_renew` is a push consumer's. Raises CallRefusedError if a value is not allowed.
    """
    if request.batch_size < 1:
        raise CallRefusedError(Code.BAD_REQUEST, f"batch_size is {request.batch_size}; it must be at least 1")
    if left_s < POLLING_LEFT_MIN_S:
        code = Code.BAD_REQUEST if _is_old(client_version) else Code.ILLEGAL_POLLING_TIME
        raise CallRefusedError(code, "the deadline of the receive is too near")
    if request.HasField("long_polling_timeout"):
        wait_s = millis(request.long_polling_timeout) / 1000
    else:
        wait_s = left_s - REQUEST_HALF_S
    wait_s = max(0.0, min(wait_s, LONG_POLLING_MS / 1000, left_s - POLLING_MARGIN_S))
    if request.auto_renew:
        return LeaseTerms(min(request.batch_size, RECEIVE_BATCH_SIZE), PUSH_INVISIBLE_MS, wait_s)
    invisible_ms = invisible_time(request.invisible_duration, INVISIBLE_MIN_MS)
    return LeaseTerms(min(request.batch_size, RECEIVE_MAX_MESSAGES), invisible_ms, wait_s)


def invisible_time(value: Duration, least_ms: int = 0) -> int:
    """Return an invisible time in ms. Raises CallRefusedError if it is not between `least_ms` and 12 hours."""
    invisible_ms = millis(value)
    if not least_ms <= invisible_ms <= INVISIBLE_MAX_MS:
        raise CallRefusedError(
            Code.ILLEGAL_INVISIBLE_TIME,
            f"an invisible time of {invisible_ms} ms is not between {least_ms} and {INVISIBLE_MAX_MS} ms",
        )
    return invisible_ms


def _is_old(client_version: str) -> bool:
    """Return whether a client does not know the code ILLEGAL_POLLING_TIME, because its version is too low."""
    numbers = [int(part) for part in client_version[:32].split(".")[:3] if part.isascii() and part.isdecimal()]
    return len(numbers) == 3 and tuple(numbers) < POLLING_CODE_SINCE
