"""Answers for programs without raymq: built-in values and built-in exceptions only.

`Broker.send` and `Broker.pull` return and raise these values, because any Ray program may call them. The calling
program must unpickle an actor's answer, and could unpickle a SendResult or a raymq error only if raymq is installed.
Each value in these answers is a str, int, bytes or None, or a list or dict of such values. Each error is a ValueError,
TimeoutError or RuntimeError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from raymq.common.errors import RaymqError
from raymq.common.message import MessageExt, PullResult, SendResult


def plain_send_result(result: SendResult) -> dict[str, Any]:
    """Return SendResult's fields as a dict. The status is given by its name, and the queue by its topic, broker name
    and queue id."""
    return {
        "status": result.status.value,
        "message_id": result.message_id,
        "offset_message_id": result.offset_message_id,
        "topic": result.queue.topic,
        "broker_name": result.queue.broker_name,
        "queue_id": result.queue.queue_id,
        "queue_offset": result.queue_offset,
    }


def plain_pull_result(result: PullResult) -> dict[str, Any]:
    """Return PullResult's fields as a dict. The status is given by its name, and each message is a dict of MessageExt's
    fields."""
    return {
        "status": result.status.value,
        "messages": [_plain_message(message) for message in result.messages],
        "next_offset": result.next_offset,
        "min_offset": result.min_offset,
        "max_offset": result.max_offset,
    }


def _plain_message(message: MessageExt) -> dict[str, Any]:
    values = {field.name: getattr(message, field.name) for field in fields(MessageExt)}
    return {
        **values,
        "keys": list(message.keys),
        "properties": dict(message.properties),
        "system_properties": dict(message.system_properties),
    }


@contextmanager
def plain_errors() -> Iterator[None]:
    """Context manager that converts a raymq error from the `with` block into a built-in exception (see `plain_error`).
    Other errors pass unchanged."""
    try:
        yield
    except RaymqError as error:
        raise plain_error(error) from None


def plain_error(error: RaymqError) -> Exception:
    """Return a built-in exception with the text of `error`: ValueError or TimeoutError if `error` is a subclass of it,
    else RuntimeError.

    The exception has three attributes: `name` is the class of `error`, `code` is RocketMQ's response code, and
    `retryable` is True if the same call may succeed later. All three survive pickling.
    """
    builtin = next((kind for kind in (ValueError, TimeoutError) if isinstance(error, kind)), RuntimeError)
    plain: Any = builtin(str(error))
    plain.name, plain.code, plain.retryable = type(error).__name__, error.code, error.retryable
    exception: Exception = plain
    return exception
