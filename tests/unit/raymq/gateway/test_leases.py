"""Tests of the times and numbers in consumers' requests."""

from __future__ import annotations

from typing import Any

import pytest

from raymq.gateway.convert.leases import PUSH_INVISIBLE_MS, LeaseTerms, invisible_time, lease_terms
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.convert.times import duration
from raymq.gateway.wire.enums import Code
from raymq.gateway.wire.messages import Duration, ReceiveMessageRequest


def terms(left_s: float = 60.0, **fields: Any) -> LeaseTerms:
    return lease_terms(ReceiveMessageRequest(**{"batch_size": 10, "auto_renew": True, **fields}), left_s)


@pytest.mark.parametrize(
    ("timeout_ms", "left_s", "wait_s"),
    [
        (5_000, 60.0, 5.0),
        (0, 60.0, 0.0),
        (90_000, 60.0, 20.0),
        (20_000, 10.0, 9.5),
        (20_000, 0.3, 0.0),
        (None, 23.0, 20.0),
        (None, 3.0, 1.5),
        (None, 1.0, 0.0),
    ],
)
def test_a_receive_waits_as_long_as_its_client(timeout_ms: int | None, left_s: float, wait_s: float) -> None:
    timeout = None if timeout_ms is None else duration(timeout_ms)
    assert terms(left_s, long_polling_timeout=timeout).wait_s == wait_s


def test_a_negative_time_is_no_wait() -> None:
    assert terms(long_polling_timeout=Duration(seconds=-5)).wait_s == 0.0


def test_a_push_consumer_gets_at_most_32_messages_and_a_simple_consumer_4096() -> None:
    assert terms(batch_size=100) == LeaseTerms(32, PUSH_INVISIBLE_MS, 20.0)
    simple = terms(batch_size=5000, auto_renew=False, invisible_duration=duration(100))
    assert simple == LeaseTerms(4096, 100, 20.0)


@pytest.mark.parametrize(
    ("fields", "left_s", "code"),
    [
        ({"batch_size": 0}, 60.0, Code.BAD_REQUEST),
        ({"batch_size": -1}, 60.0, Code.BAD_REQUEST),
        ({}, 0.05, Code.ILLEGAL_POLLING_TIME),
        ({"auto_renew": False}, 60.0, Code.ILLEGAL_INVISIBLE_TIME),
        ({"auto_renew": False, "invisible_duration": Duration(seconds=2**62)}, 60.0, Code.ILLEGAL_INVISIBLE_TIME),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(fields: dict[str, Any], left_s: float, code: Code) -> None:
    with pytest.raises(CallRefusedError) as caught:
        terms(left_s, **fields)
    assert caught.value.status == code


@pytest.mark.parametrize(
    ("version", "code"),
    [
        *(("5.0.2", Code.BAD_REQUEST), ("1.0.8", Code.BAD_REQUEST), ("5.0.3", Code.ILLEGAL_POLLING_TIME)),
        *(("5.1.0-SNAPSHOT", Code.ILLEGAL_POLLING_TIME), ("", Code.ILLEGAL_POLLING_TIME)),
        *(("x.y.z", Code.ILLEGAL_POLLING_TIME), ("9" * 9999, Code.ILLEGAL_POLLING_TIME)),
    ],
    ids=range(7),
)
def test_an_old_client_gets_a_code_that_it_knows(version: str, code: Code) -> None:
    with pytest.raises(CallRefusedError) as caught:
        lease_terms(ReceiveMessageRequest(batch_size=10, auto_renew=True), 0.05, version)
    assert caught.value.status == code


def test_a_new_invisible_time_may_be_zero() -> None:
    assert invisible_time(duration(0)) == 0
    assert invisible_time(duration(12 * 3_600_000)) == 12 * 3_600_000
    for time in (duration(12 * 3_600_000 + 1), Duration(seconds=-1)):
        with pytest.raises(CallRefusedError):
            invisible_time(time)
