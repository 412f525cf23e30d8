"""The parts of gRPC above HTTP/2: messages in a request's data, deadlines, statuses, and the headers of answers."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from raymq.gateway.front.header_blocks import header_block

MESSAGE_PREFIX_BYTES: Final = 5
"""Size in bytes in front of each message: whether it is compressed, and its size."""
STATUS_TEXT_MAX: Final = 1024
"""Maximum number of characters of a status message."""
TIMEOUT_S_MAX: Final = 365 * 24 * 3600.0
"""The longest deadline of a call in s. A longer one counts as this time."""

_UNITS_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_ENCODINGS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""The window bits with which zlib reads each encoding of messages."""
_CONTENT_TYPE: Final = ("content-type", "application/grpc")


class GrpcStatus(IntEnum):
    """The statuses with which a call ends."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class CallEndedError(Exception):
    """A call ends with a status other than OK. The text is for the caller."""

    def __init__(self, status: GrpcStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class CallMetadata(Mapping[str, str]):
    """The headers of a call as handlers get them: without pseudo-headers, and without headers with binary values.

    A header becomes text when it is read. A handler reads few of them, and a stream keeps them as long as it is open.
    """

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[bytes, bytes]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> str:
        field = name.encode()
        if not _is_metadata(field):
            raise KeyError(name)
        return self._fields[field].decode("utf-8", "replace")

    # Mapping's `get` raises and catches a KeyError for each header that a call does not have.
    def get(self, name: str, default: Any = None) -> Any:
        value = self._fields.get(field := name.encode())
        return value.decode("utf-8", "replace") if value is not None and _is_metadata(field) else default

    def __iter__(self) -> Iterator[str]:
        return (name.decode("ascii") for name in self._fields if _is_metadata(name))

    def __len__(self) -> int:
        return sum(map(_is_metadata, self._fields))


def _is_metadata(name: bytes) -> bool:
    return not (name.startswith(b":") or name.endswith(b"-bin"))


class GrpcMessage(NamedTuple):
    """A message of a request, as it came: its bytes may be compressed."""

    is_compressed: bool
    data: bytes


class MessageBuffer:
    """The data of one request, until its messages are taken. `bytes_max`: the maximum size of a message."""

    __slots__ = ("_bytes_max", "_data", "_whole_bytes")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._data = bytearray()
        self._whole_bytes = 0
        """Size in bytes of the first message with its prefix; 0 if its prefix has not arrived."""

    def __len__(self) -> int:
        return len(self._data)

    @property
    def has_message(self) -> bool:
        """True if a whole message has arrived."""
        return 0 < self._whole_bytes <= len(self._data)

    @property
    def has_surplus(self) -> bool:
        """True if more than one message has begun to arrive."""
        return 0 < self._whole_bytes < len(self._data)

    def add(self, data: bytes) -> None:
        """Add data of the request. Raises CallEndedError if the next message is too large."""
        self._data += data
        if not self._whole_bytes:
            self._read_prefix()
        self._check_size()

    def take(self) -> GrpcMessage | None:
        """Return the next message, or None if it has not wholly arrived. Raises CallEndedError if it is too large."""
        size = self._whole_bytes
        if not 0 < size <= len(self._data):
            self._check_size()
            return None
        with memoryview(self._data) as view:
            message = GrpcMessage(bool(view[0]), bytes(view[MESSAGE_PREFIX_BYTES:size]))
        del self._data[:size]
        self._whole_bytes = 0
        self._read_prefix()
        return message

    def _read_prefix(self) -> None:
        if len(self._data) >= MESSAGE_PREFIX_BYTES:
            self._whole_bytes = MESSAGE_PREFIX_BYTES + int.from_bytes(self._data[1:MESSAGE_PREFIX_BYTES], "big")

    def _check_size(self) -> None:
        size = self._whole_bytes - MESSAGE_PREFIX_BYTES
        if size > self._bytes_max:
            raise CallEndedError(
                GrpcStatus.RESOURCE_EXHAUSTED, f"a message has {size} bytes; at most {self._bytes_max} are allowed"
            )


def encoding_is_known(encoding: str) -> bool:
    """Return whether messages with a value of ``grpc-encoding`` can be read."""
    return encoding in _ENCODINGS or encoding == "identity"


def inflated(data: bytes, encoding: str, bytes_max: int) -> bytes:
    """Return a compressed message as it was before. Raises CallEndedError if the message is larger than `bytes_max`
    bytes, or if it is not compressed with `encoding`."""
    bits = _ENCODINGS.get(encoding)
    if bits is None:
        raise CallEndedError(GrpcStatus.INTERNAL, "a message is compressed, but the call names no encoding")
    inflater = zlib.decompressobj(bits)
    try:
        message = inflater.decompress(data, bytes_max + 1)
    except zlib.error:
        raise CallEndedError(GrpcStatus.INTERNAL, f"a message is not compressed with {encoding}") from None
    if len(message) > bytes_max:
        raise CallEndedError(
            GrpcStatus.RESOURCE_EXHAUSTED, f"a message has more than {bytes_max} bytes after it is inflated"
        )
    if not inflater.eof:
        raise CallEndedError(GrpcStatus.INTERNAL, "a compressed message ends too early")
    return message


def prefixed(message: bytes) -> bytes:
    """Return an answer's message with its prefix."""
    return b"\x00" + len(message).to_bytes(4, "big") + message


@lru_cache(maxsize=256)
def timeout_s(text: str) -> float:
    """Return the time in s in the header ``grpc-timeout``. Raises CallEndedError if it is malformed."""
    found = _TIMEOUT.fullmatch(text)
    if found is None:
        raise CallEndedError(GrpcStatus.INTERNAL, "the header grpc-timeout is malformed")
    return min(TIMEOUT_S_MAX, int(found[1]) * _UNITS_S[found[2]])


def status_text(reason: str) -> str:
    """Return a status message as gRPC writes it in a header: UTF-8, percent-encoded."""
    text = reason[:STATUS_TEXT_MAX].encode("utf-8", "replace")
    return "".join(chr(byte) if 0x20 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}" for byte in text)


def trailers(status: GrpcStatus, reason: str = "") -> bytes:
    """Return the header block that ends an answer."""
    return header_block(_status_fields(status, reason))


def only_trailers(status: GrpcStatus, reason: str = "") -> bytes:
    """Return the header block of an answer without a message."""
    fields = [(":status", "200"), _CONTENT_TYPE, *_status_fields(status, reason)]
    if status == GrpcStatus.UNIMPLEMENTED:
        fields.append(("grpc-accept-encoding", ",".join(("identity", *_ENCODINGS))))
    return header_block(fields)


def no_grpc(http_status: int) -> bytes:
    """Return the header block of the answer to a request that is no call of gRPC."""
    return header_block([(":status", str(http_status))])


def _status_fields(status: GrpcStatus, reason: str) -> list[tuple[str, str]]:
    fields = [("grpc-status", str(int(status)))]
    return [*fields, ("grpc-message", status_text(reason))] if reason else fields


ANSWER_HEAD: Final = header_block([(":status", "200"), _CONTENT_TYPE])
"""The header block with which an answer begins."""
OK_TRAILERS: Final = trailers(GrpcStatus.OK)
