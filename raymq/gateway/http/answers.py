"""Converts answers of RocketMQ's protocol to JSON, and statuses to HTTP's. Pure.

The first three digits of a status code are the HTTP status. Two codes differ: a stored message that is less durable
than promised is accepted (202), and entries with different results are a multi-status (207).
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
from starlette.responses import Response

from raymq.gateway.convert.statuses import status_of
from raymq.gateway.convert.times import millis
from raymq.gateway.http.shapes import (
    AckAnswer,
    AckResult,
    ChangeAnswer,
    ErrorAnswer,
    LeasedMessage,
    SendAnswer,
    SentMessage,
    StoredMessage,
)
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code

JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
STORED_LESS_DURABLE: Final = 202
DIFFERENT_RESULTS: Final = 207


def json_answer(value: object, status: int = 200, *, kind: str = JSON, **headers: str) -> Response:
    """Return an answer with a JSON object. `kind`: its media type."""
    try:
        body = msgspec.json.encode(value)
    except UnicodeEncodeError:
        # The result of a task may have half of a surrogate pair, which JSON has only as an escape.
        body = json.dumps(msgspec.to_builtins(value)).encode()
    return Response(body, status, headers, kind)


def problem(status: wire.Status) -> Response:
    """Return the answer to a request that failed with a status of the protocol."""
    found = as_problem(status)
    answer = json_answer(found, found.status, kind=PROBLEM)
    if status.code == Code.UNAUTHORIZED:
        answer.headers["WWW-Authenticate"] = 'Bearer realm="raymq"'
    return answer


def as_problem(status: wire.Status) -> ErrorAnswer:
    """Return a status of the protocol as an object."""
    code = Code(status.code)
    return ErrorAnswer(title=code.name, status=code // 100, code=int(code), detail=status.message)


def problem_of(error: BaseException) -> Response:
    """Return the answer to a request that raised `error`. The log has unexpected errors."""
    return problem(status_of(error))


def send_answer(answer: wire.SendMessageResponse) -> Response:
    """Return the answer to a send."""
    if not answer.entries or not all(entry.message_id for entry in answer.entries):
        return problem(answer.status)
    sent = [
        SentMessage(
            message_id=entry.message_id,
            offset=entry.offset,
            code=Code(entry.status.code).name,
            recall_handle=entry.recall_handle,
        )
        for entry in answer.entries
    ]
    return json_answer(SendAnswer(messages=sent), 200 if answer.status.code == Code.OK else STORED_LESS_DURABLE)


def ack_answer(answer: wire.AckMessageResponse) -> Response:
    """Return the answer to an acknowledgement. If all entries failed alike, it is a problem."""
    if answer.status.code not in (Code.OK, Code.MULTIPLE_RESULTS):
        return problem(answer.status)
    results = [
        AckResult(
            receipt=entry.receipt_handle,
            code=Code(entry.status.code).name,
            message="" if entry.status.code == Code.OK else entry.status.message,
        )
        for entry in answer.entries
    ]
    return json_answer(AckAnswer(results=results), 200 if answer.status.code == Code.OK else DIFFERENT_RESULTS)


def change_answer(answer: wire.ChangeInvisibleDurationResponse) -> Response:
    """Return the answer to a change of an invisible time."""
    if answer.status.code != Code.OK:
        return problem(answer.status)
    return json_answer(ChangeAnswer(receipt=answer.receipt_handle))


def leased_message(message: wire.Message) -> LeasedMessage:
    """Return a received message as an object."""
    system = message.system_properties
    return LeasedMessage(**_fields(message), receipt=system.receipt_handle, attempt=system.delivery_attempt)


def stored_message(message: wire.Message) -> StoredMessage:
    """Return a message that is not leased as an object."""
    return StoredMessage(**_fields(message))


def _fields(message: wire.Message) -> dict[str, Any]:
    system = message.system_properties
    body: dict[str, str | bytes]
    try:
        body = {"body": message.body.decode()}
    except UnicodeDecodeError:
        body = {"body_base64": message.body}
    return {
        **body,
        "message_id": system.message_id,
        "topic": message.topic.name,
        "queue_id": system.queue_id,
        "offset": system.queue_offset,
        "born_at_ms": millis(system.born_timestamp),
        "stored_at_ms": millis(system.store_timestamp),
        "tag": system.tag,
        "keys": list(system.keys),
        "properties": dict(message.user_properties),
        "sharding_key": system.message_group,
        "deliver_at_ms": millis(system.delivery_timestamp) if system.HasField("delivery_timestamp") else 0,
        "priority": system.priority if system.HasField("priority") else None,
    }
