"""Tests that a server's results for plain Ray handles contain only built-in values and exceptions. A process without
raymq can then unpickle the results."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from actors.broker.plain_answers import plain_error, plain_errors, plain_pull_result, plain_send_result
from raymq.common.errors import RaymqError, RequestTimeoutError, TopicNotExistError
from raymq.common.message import MessageExt, MessageQueue, PullResult, PullStatus, SendResult, SendStatus
from tests.support.cases import ERRORS, any_error

MESSAGE = MessageExt(
    topic="orders",
    body=b"1",
    tags=None,
    keys=("a", "b"),
    properties={"shop": "x"},
    flag=0,
    broker_name="broker-a",
    queue_id=1,
    queue_offset=7,
    physical_offset=99,
    born_timestamp_ms=1,
    store_timestamp_ms=2,
    born_host="127.0.0.1:1",
    store_host="127.0.0.1:2",
    message_id="M",
    offset_message_id="O",
    reconsume_times=0,
    sys_flag=0,
    system_properties={"UNIQ_KEY": "M"},
)


def kinds(value: Any) -> set[type]:
    """Return the types of a value and of all values nested in the value."""
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return {type(value)}.union(*map(kinds, inner))


def test_an_answer_is_made_of_built_in_values_only() -> None:
    sent = plain_send_result(SendResult(SendStatus.SEND_OK, "M", "O", MessageQueue("orders", "broker-a", 1), 7))
    assert sent == {
        "status": "SEND_OK",
        "message_id": "M",
        "offset_message_id": "O",
        "topic": "orders",
        "broker_name": "broker-a",
        "queue_id": 1,
        "queue_offset": 7,
    }
    pulled = plain_pull_result(PullResult(PullStatus.FOUND, (MESSAGE,), 8, 0, 9))
    [message] = pulled["messages"]
    assert (message["body"], message["keys"], message["properties"]) == (b"1", ["a", "b"], {"shop": "x"})
    assert (pulled["status"], pulled["next_offset"], pulled["min_offset"], pulled["max_offset"]) == ("FOUND", 8, 0, 9)
    assert kinds(sent) | kinds(pulled) <= {dict, list, str, int, bytes, type(None)}


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_is_a_built_in_one_and_keeps_its_name_its_code_and_its_text(kind: type[RaymqError]) -> None:
    error = any_error(kind)
    plain: Any = pickle.loads(pickle.dumps(plain_error(error)))
    assert type(plain) in (ValueError, TimeoutError, RuntimeError)
    assert isinstance(error, ValueError) == isinstance(plain, ValueError)
    assert (str(plain), plain.name, plain.code, plain.retryable) == (
        str(error),
        kind.__name__,
        kind.code,
        kind.retryable,
    )


def test_only_errors_of_raymq_are_changed() -> None:
    with pytest.raises(RuntimeError, match="'nowhere' does not exist"), plain_errors():
        raise TopicNotExistError("nowhere")
    with pytest.raises(TimeoutError), plain_errors():
        raise RequestTimeoutError("broker-a", 1.0)
    with pytest.raises(KeyError), plain_errors():
        raise KeyError("a bug")
