"""Checks the digests of bodies, and decompresses bodies without using more memory than the largest body needs.

Clients write the same CRC32 as different texts: 8 hexadecimal digits, hexadecimal digits without leading zeros, or
decimal digits.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Final

from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.wire.enums import Code, DigestType, Encoding
from raymq.gateway.wire.messages import Digest, Message

_GZIP: Final = 16 + zlib.MAX_WBITS
"""The window size that tells zlib to read gzip's header."""


def md5_digest(body: bytes) -> Digest:
    """Return the digest that the gateway sends with a body. All clients check it."""
    checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    return Digest(type=DigestType.MD5, checksum=checksum)


def has_digest(body: bytes, digest: Digest) -> bool:
    """Return whether `body` has the digest `digest`. Raises CallRefusedError if the digest's type is unknown."""
    text = digest.checksum.strip().lower()
    if digest.type == DigestType.CRC32:
        number = zlib.crc32(body)
        return text in (f"{number:x}", f"{number:08x}", str(number))
    if digest.type == DigestType.MD5:
        return text == hashlib.md5(body, usedforsecurity=False).hexdigest()
    if digest.type == DigestType.SHA1:
        return text == hashlib.sha1(body, usedforsecurity=False).hexdigest()
    raise CallRefusedError(Code.UNSUPPORTED, f"digest type {digest.type} is unknown: use CRC32, MD5 or SHA1")


def body_of(message: Message, max_bytes: int) -> bytes:
    """Return the decompressed body of a message that a client sends.

    The digest covers the body as it was sent; a digest of the decompressed body is accepted too. Raises
    CallRefusedError if the body is empty, is longer than `max_bytes` after decompression, is damaged, or does not have
    the digest.
    """
    sent, properties = message.body, message.system_properties
    if not sent:
        raise CallRefusedError(Code.MESSAGE_BODY_EMPTY, "the body of a message must not be empty")
    if len(sent) > max_bytes:
        raise _too_large(max_bytes)
    encoding = properties.body_encoding
    if encoding == Encoding.GZIP:
        body = _gunzip(sent, max_bytes)
    elif encoding in (Encoding.IDENTITY, Encoding.ENCODING_UNSPECIFIED):
        body = sent
    else:
        raise CallRefusedError(Code.UNSUPPORTED, f"body encoding {encoding} is unknown: use IDENTITY or GZIP")
    digest = properties.body_digest
    is_given = digest.type != DigestType.DIGEST_TYPE_UNSPECIFIED and digest.checksum
    if is_given and not has_digest(sent, digest) and not has_digest(body, digest):
        raise CallRefusedError(Code.MESSAGE_CORRUPTED, "the body does not have the digest that came with it")
    return body


def _gunzip(data: bytes, max_bytes: int) -> bytes:
    reader = zlib.decompressobj(_GZIP)
    try:
        body = reader.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise CallRefusedError(Code.MESSAGE_CORRUPTED, f"the body cannot be decompressed: {error}") from None
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    if not reader.eof or reader.unused_data:
        raise CallRefusedError(Code.MESSAGE_CORRUPTED, "the compressed body is cut, or has bytes after its end")
    if not body:
        raise CallRefusedError(Code.MESSAGE_BODY_EMPTY, "the body of a message must not be empty")
    return body


def _too_large(max_bytes: int) -> CallRefusedError:
    return CallRefusedError(
        Code.MESSAGE_BODY_TOO_LARGE, f"the body of a message may have at most {max_bytes} bytes when it is decompressed"
    )
