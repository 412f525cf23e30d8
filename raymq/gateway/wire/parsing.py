"""Parses the bytes of requests, so that no request takes much more memory than its bytes.

A message inside a message can have two bytes on the wire, and takes about 80 bytes in memory. So the number of messages
in a request is checked before the request is parsed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol, Self, TypeVar

from raymq.common.errors import InvalidArgumentError
from raymq.gateway.wire.messages import DecodeError, SendMessageRequest


class _Parsed(Protocol):
    @classmethod
    def FromString(cls, data: bytes) -> Self: ...  # noqa: N802  # protobuf's name


_Request = TypeVar("_Request", bound=_Parsed)

REQUEST_BYTES_MAX: Final = 1 << 20
"""Maximum size in bytes of a request without bodies of messages."""
SEND_BYTES_MAX: Final = 130 << 20
"""Maximum size in bytes of a request with messages to send: 32 bodies of 4 MiB, and 2 MiB for all other fields."""
SEND_MESSAGES_MAX: Final = 1024
"""Maximum number of messages in one request."""
_MESSAGES_TAG: Final = 0x0A
"""First byte of each message in a SendMessageRequest: field 1, with a length."""


class RequestTooLargeError(InvalidArgumentError):
    """A request has more bytes, or more messages, than the gateway accepts. Nothing was done."""


def parse_request(kind: type[_Request], data: bytes) -> _Request:
    """Return the request of class `kind` that has the bytes `data`.

    Raises RequestTooLargeError if the request has too many bytes or messages, and InvalidArgumentError if `data` is no
    message of protobuf. A request takes at most about 80 times REQUEST_BYTES_MAX of memory in addition to its bytes.
    """
    is_send = kind is SendMessageRequest
    size_max = SEND_BYTES_MAX if is_send else REQUEST_BYTES_MAX
    if len(data) > size_max:
        raise RequestTooLargeError(f"the request has {len(data)} bytes; at most {size_max} are allowed")
    if is_send:
        for count, _ in enumerate(_messages(data), 1):
            if count > SEND_MESSAGES_MAX:
                raise RequestTooLargeError(f"the request has more than {SEND_MESSAGES_MAX} messages: send fewer")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidArgumentError(f"the request is no {kind.__name__}: {error}") from None


def _messages(data: bytes) -> Iterator[int]:
    """Yield the position of each message in the bytes of a SendMessageRequest.

    Raises InvalidArgumentError at another field, which no client sends, and at a cut message.
    """
    at, end = 0, len(data)
    while at < end:
        if data[at] != _MESSAGES_TAG:
            raise InvalidArgumentError(f"the request has an unknown field at byte {at}")
        at += 1
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
        at += size
        if at > end:
            raise InvalidArgumentError("the request ends inside a message")
        yield at - size
