"""Checks the receipt handles that clients return.

A handle is raymq's text with 8 fields. RocketMQ's brokers write a ninth field, the message's place in their log. A
client may have stored such a handle, so the ninth field is ignored.
"""

from __future__ import annotations

from typing import Final

from raymq.client.consumer.simple.received_message import parse_handle
from raymq.common.errors import InvalidArgumentError
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.wire.enums import Code

_FIELDS: Final = 8


def handle_of(group: str, topic: str, text: str) -> str:
    """Return the receipt handle in `text`, as raymq's calls take it. Raises CallRefusedError if it is no handle."""
    fields = text.split(" ")
    handle = " ".join(fields[:_FIELDS]) if len(fields) == _FIELDS + 1 else text
    try:
        parse_handle(group, topic, handle)
    except InvalidArgumentError as error:
        raise CallRefusedError(Code.INVALID_RECEIPT_HANDLE, str(error)) from None
    return handle
