"""Parses the bytes of requests, so that no request takes much more memory than its bytes.

A message inside a message can have two bytes on the wire, and takes about 80 bytes in memory. So the number of messages
in a request, and the size of all fields but their bodies, are checked before the request is parsed.
"""

from __future__ import annotations

from typing import Final, Protocol, Self, TypeVar

from raymq.common.errors import InvalidArgumentError
from raymq.gateway.wire.messages import DecodeError, SendMessageRequest, TelemetryCommand


class _Parsed(Protocol):
    @classmethod
    def FromString(cls, data: bytes) -> Self: ...  # noqa: N802  # protobuf's name

    def DiscardUnknownFields(self) -> None: ...  # noqa: N802  # protobuf's name


_Request = TypeVar("_Request", bound=_Parsed)

REQUEST_BYTES_MAX: Final = 1 << 20
"""Maximum size in bytes of a request without bodies of messages."""
SEND_OTHERS_BYTES_MAX: Final = 2 << 20
"""Maximum size in bytes of all fields of a request with messages to send, without the bodies."""
SEND_BYTES_MAX: Final = (128 << 20) + SEND_OTHERS_BYTES_MAX
"""Maximum size in bytes of a request with messages to send: 32 bodies of 4 MiB, and the other fields."""
SEND_MESSAGES_MAX: Final = 1024
"""Maximum number of messages in one request."""
_MESSAGES_TAG: Final = 0x0A
"""First byte of each message in a SendMessageRequest: field 1, with a length."""
_BODY_TAG: Final = 0x22
"""First byte of the body in a Message: field 4, with a length."""
_LENGTH_TYPE: Final = 2
"""The last three bits of the first byte of a field with a length."""


class RequestTooLargeError(InvalidArgumentError):
    """A request has more bytes, or more messages, than the gateway accepts. Nothing was done."""


def parse_request(kind: type[_Request], data: bytes) -> _Request:
    """Return the request of class `kind` that has the bytes `data`, without fields that the gateway does not know: an
    answer repeats parts of some requests many times. Only a TelemetryCommand keeps such fields, for the answer to the
    client's settings.

    Raises RequestTooLargeError if the request has too many bytes or messages, and InvalidArgumentError if `data` is no
    message of protobuf. A request takes at most about 80 times SEND_OTHERS_BYTES_MAX of memory in addition to its
    bytes.
    """
    is_send = kind is SendMessageRequest
    size_max = SEND_BYTES_MAX if is_send else REQUEST_BYTES_MAX
    if len(data) > size_max:
        raise RequestTooLargeError(f"the request has {len(data)} bytes; at most {size_max} are allowed")
    if is_send:
        _check_send(data)
    try:
        request = kind.FromString(data)
    except DecodeError as error:
        raise InvalidArgumentError(f"the request is no {kind.__name__}: {error}") from None
    if kind is not TelemetryCommand:
        request.DiscardUnknownFields()
    return request


def _check_send(data: bytes) -> None:
    """Raise RequestTooLargeError if a SendMessageRequest has too many messages, or too many bytes beside their bodies.
    Raises InvalidArgumentError at a field that no client sends, and at a cut message."""
    at = count = bodies = 0
    while at < len(data):
        if data[at] != _MESSAGES_TAG:
            raise InvalidArgumentError(f"the request has an unknown field at byte {at}")
        start, end = _span(data, at + 1, len(data))
        count += 1
        if count > SEND_MESSAGES_MAX:
            raise RequestTooLargeError(f"the request has more than {SEND_MESSAGES_MAX} messages: send fewer")
        if len(data) > SEND_OTHERS_BYTES_MAX:
            bodies += _body_bytes(data, start, end)
        at = end
    if len(data) - bodies > SEND_OTHERS_BYTES_MAX:
        raise RequestTooLargeError(
            f"the messages of the request have {len(data) - bodies} bytes beside their bodies; at most "
            f"{SEND_OTHERS_BYTES_MAX} are allowed"
        )


def _body_bytes(data: bytes, at: int, end: int) -> int:
    """Return the size of the body of the Message between two positions. All fields before the body have a length; a
    field without one ends the search."""
    found = 0
    others = 0
    while at < end and data[at] & 7 == _LENGTH_TYPE and others <= SEND_OTHERS_BYTES_MAX:
        start, stop = _span(data, at + 1, end)
        if data[at] == _BODY_TAG:
            found += stop - start
        else:
            others += stop - at
        at = stop
    return found


def _span(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return where the bytes begin and end whose length is written at `at`. Raises InvalidArgumentError if they would
    end after `end`."""
    size = shift = 0
    while True:
        if at == end or shift > 63:
            raise InvalidArgumentError("the request ends inside a message")
        byte = data[at]
        at += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if at + size > end:
        raise InvalidArgumentError("the request ends inside a message")
    return at, at + size
