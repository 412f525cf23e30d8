"""Tests of the status codes that answer the errors and results of raymq's calls."""

from __future__ import annotations

import logging
import re

import pytest

from raymq.common.errors import (
    AccessDeniedError,
    AuthenticationError,
    GroupNotExistError,
    IllegalNameError,
    InSyncReplicasError,
    MessageIllegalError,
    OffsetOutOfRangeError,
    QuotaExceededError,
    RaymqError,
    RecallError,
    RequestTimeoutError,
    SendUnknownError,
    SystemBusyError,
    TopicNotExistError,
    TransactionTooLateError,
)
from raymq.common.message import SendStatus
from raymq.gateway.convert.statuses import CallRefusedError, code_of, common_status, ok, sent_status, status_of
from raymq.gateway.wire.enums import Code
from raymq.gateway.wire.messages import Status
from raymq.gateway.wire.parsing import RequestTooLargeError
from tests.support.cases import ERRORS, any_error, check_all

CODES = {
    TopicNotExistError("orders"): Code.TOPIC_NOT_FOUND,
    GroupNotExistError("billing"): Code.CONSUMER_GROUP_NOT_FOUND,
    AuthenticationError("no"): Code.UNAUTHORIZED,
    AccessDeniedError("eve", "Pub", "no"): Code.FORBIDDEN,
    IllegalNameError("topic", "!", "no"): Code.ILLEGAL_TOPIC,
    IllegalNameError("group", "!", "no"): Code.ILLEGAL_CONSUMER_GROUP,
    IllegalNameError("namespace", "!", "no"): Code.ILLEGAL_TOPIC,
    QuotaExceededError("eve", "bytes", 5): Code.TOO_MANY_REQUESTS,
    InSyncReplicasError("broker-a", 1, 2): Code.HA_NOT_AVAILABLE,
    RequestTimeoutError("a send", 3.0): Code.PROXY_TIMEOUT,
    SendUnknownError("orders", 1, 3.0, "no"): Code.PROXY_TIMEOUT,
    RecallError("late"): Code.BAD_REQUEST,
    TransactionTooLateError("late"): Code.INVALID_TRANSACTION_ID,
    MessageIllegalError("no"): Code.BAD_REQUEST,
    OffsetOutOfRangeError("q", 5, 0, 1): Code.BAD_REQUEST,
    RequestTooLargeError("big"): Code.PAYLOAD_TOO_LARGE,
    CallRefusedError(Code.ILLEGAL_MESSAGE_TAG, "no"): Code.ILLEGAL_MESSAGE_TAG,
}
RETRIED = {Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT, Code.TOO_MANY_REQUESTS, None}
"""Codes that clients retry. None is an unexpected error, whose code clients retry too."""


def test_each_error_has_its_code_and_its_text() -> None:
    for error, code in CODES.items():
        assert status_of(error) == Status(code=code, message=str(error)), error


def test_clients_retry_each_retryable_error() -> None:
    def check(kind: type[RaymqError]) -> None:
        if kind.retryable:
            assert code_of(any_error(kind)) in RETRIED

    check_all(ERRORS, check)


def test_only_a_busy_server_and_a_quota_stop_the_retries_of_clients() -> None:
    """At this code Python's producer does not retry a send, and Node's push consumer asks again after 20 ms."""

    def check(kind: type[RaymqError]) -> None:
        is_busy = issubclass(kind, (SystemBusyError, QuotaExceededError))
        assert (code_of(any_error(kind)) == Code.TOO_MANY_REQUESTS) == is_busy

    check_all(ERRORS, check)


def test_an_unexpected_error_is_logged_and_its_text_stays_here(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        status = status_of(KeyError("secret of another user"))
    assert status.code == Code.INTERNAL_SERVER_ERROR
    assert "secret" not in status.message
    number = re.findall(r"[0-9a-f]{8}", status.message)[-1]
    assert number in caplog.text
    assert "secret of another user" in caplog.text


def test_every_result_of_a_send_has_a_status() -> None:
    assert {sent_status(status).code for status in SendStatus} == {
        Code.OK,
        Code.MASTER_PERSISTENCE_TIMEOUT,
        Code.SLAVE_PERSISTENCE_TIMEOUT,
        Code.HA_NOT_AVAILABLE,
    }


def test_entries_with_different_codes_have_multiple_results() -> None:
    bad = Status(code=Code.BAD_REQUEST, message="no")
    assert common_status([ok(), ok()]) == ok()
    assert common_status([bad, bad]) == bad
    assert common_status([ok(), bad]).code == Code.MULTIPLE_RESULTS
