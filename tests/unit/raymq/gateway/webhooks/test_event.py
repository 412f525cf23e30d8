"""Tests of the requests of web hooks: JSON, headers, signatures, keys."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json

import pytest

from raymq.common.errors import ConfigError
from raymq.gateway.webhooks.event import (
    RESULT_BYTES_MAX,
    event_body,
    event_headers,
    event_id,
    parse_keys,
    task_ended,
)
from raymq.serve.states import StateRecord, TaskState

DONE = StateRecord("hook-7", TaskState.SUCCESS, 1_795_400_000.25, 1_795_399_990.0, 1, {"bytes": 9}, "replica-1")


def test_the_body_has_the_task_as_the_status_has_it() -> None:
    assert json.loads(event_body(task_ended("jobs", DONE))) == {
        "type": "task.ended",
        "timestamp": "2026-11-23T02:13:20.250000+00:00",
        "data": {
            "id": "hook-7",
            "queue": "jobs",
            "state": "SUCCESS",
            "ended_at_s": 1_795_400_000.25,
            "created_at_s": 1_795_399_990.0,
            "attempt": 1,
            "result": {"bytes": 9},
            "is_result_omitted": False,
        },
    }


@pytest.mark.parametrize(("size", "is_omitted"), [(RESULT_BYTES_MAX - 2, False), (RESULT_BYTES_MAX - 1, True)])
def test_a_long_result_is_left_out(size: int, is_omitted: bool) -> None:
    state = StateRecord("hook-7", TaskState.SUCCESS, 1.0, result="x" * size)
    data = json.loads(event_body(task_ended("jobs", state)))["data"]
    assert (data["result"], data["is_result_omitted"]) == (None if is_omitted else "x" * size, is_omitted)


def test_a_result_that_is_no_utf8_is_sent() -> None:
    state = StateRecord("hook-7", TaskState.FAILURE, 1.0, result="\ud800")
    assert json.loads(event_body(task_ended("jobs", state)))["data"]["result"] == "\ud800"


def test_an_id_names_one_end() -> None:
    first, again = event_id(task_ended("jobs", DONE)), event_id(task_ended("jobs", DONE))
    assert first == again == "hook-7-SUCCESS-1795400000250"


def test_a_signature_is_that_of_the_standard_webhooks_specification() -> None:
    # the example of the specification's reference libraries
    [key] = parse_keys("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n")
    headers = event_headers("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', [key], 1_614_265_330.9)
    assert headers == {
        "content-type": "application/json",
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_each_key_signs_and_without_a_key_nothing_is_signed() -> None:
    keys = parse_keys("an old key of 16 bytes\n\n  a new key of 16 bytes  \n")
    headers = event_headers("a", b"{}", keys, 7.0)
    wanted = [base64.b64encode(hmac.new(key, b"a.7.{}", hashlib.sha256).digest()).decode() for key in keys]
    assert headers["webhook-signature"] == f"v1,{wanted[0]} v1,{wanted[1]}"
    assert "webhook-signature" not in event_headers("a", b"{}", [], 7.0)


@pytest.mark.parametrize(
    "text", ["", " \n", "short", "whsec_not base64 at all", "whsec_AAAA", "k" * 16 + "\n" + "short"]
)
def test_keys_that_cannot_be_used_are_refused_without_their_text(text: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.webhook_secret") as caught:
        parse_keys(text)
    assert not text.strip() or text not in str(caught.value)


def test_too_many_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 lines"):
        parse_keys("a key of more than 16 bytes\n" * 5)
