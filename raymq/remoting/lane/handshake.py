"""The handshake of a lane: each side shows that it knows the secret, without sending it. No sockets here.

The bytes are in the package's docstring. Both sides' random parts are in each HMAC, so that nothing which was heard
before is of use; and the HMACs differ in their first word, so that no side can be made to answer for the other.

A client that acts as a user signs with the user's key, too: the lane is the user's from then on. A server that asks for
no users pays no heed to it.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from enum import IntEnum
from typing import Final

from raymq.common.errors import ServiceNotAvailableError
from raymq.common.identity import USER_NAME_MAX_BYTES, Identity
from raymq.remoting.lane.frames import ProtocolError

VERSION: Final = 3
_MAGIC: Final = b"RMQL"
_RANDOM_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_HEAD: Final = struct.Struct("<4sHH")
HELLO_BYTES: Final = _HEAD.size + _RANDOM_BYTES
_USER_BYTES: Final = 1 + USER_NAME_MAX_BYTES
_NAMED_BYTES: Final = HELLO_BYTES + _USER_BYTES
_PROVEN_BYTES: Final = _NAMED_BYTES + _PROOF_BYTES
REPLY_BYTES: Final = _PROVEN_BYTES + _PROOF_BYTES
VERDICT_BYTES: Final = 1 + _PROOF_BYTES


class HandshakeStatus(IntEnum):
    """The server's answer to a client that asks for a lane."""

    OPEN = 1
    FULL = 2
    OTHER_VERSION = 3
    NOT_THIS_USER = 4
    NOT_READY = 5


class LaneRefusedError(ServiceNotAvailableError):
    """The lane's server does not take this connection. Callers go another way."""


class LaneSecretError(ProtocolError):
    """The other side does not know the lane's secret."""


class TlsRefusedError(ConnectionRefusedError):
    """The two ends of a lane do not accept each other's certificates, or speak no TLS with each other. Callers go
    another way; the text says which certificate has to be another one."""


def make_hello(version: int = VERSION) -> bytes:
    """The beginning of a side's part."""
    return _HEAD.pack(_MAGIC, version, 0) + secrets.token_bytes(_RANDOM_BYTES)


def version_of(hello: bytes) -> int:
    """The version that the other side speaks. ProtocolError if it speaks no lane at all."""
    magic, version, _ = _HEAD.unpack_from(hello)
    if magic != _MAGIC:
        raise ProtocolError("the other side does not speak as a lane does")
    return int(version)


def _proof(secret: bytes, word: bytes, server_hello: bytes, client_part: bytes) -> bytes:
    return hmac.digest(secret, word + server_hello + client_part, "sha256")


def make_reply(secret: bytes, server_hello: bytes, identity: Identity | None = None) -> bytes:
    """The client's part, in the name of a user if `identity` is given.

    LaneRefusedError if the server speaks another version, or the user's name is longer than USER_NAME_MAX_BYTES;
    ProtocolError if it is no lane's server.
    """
    version = version_of(server_hello)
    if version != VERSION:
        raise LaneRefusedError(
            f"the server's lane speaks version {version}, this client version {VERSION}: use the same raymq on both"
        )
    name = b"" if identity is None else identity.user.encode()
    if len(name) > USER_NAME_MAX_BYTES:
        raise LaneRefusedError(f"a user's name of {len(name)} bytes is longer than the {USER_NAME_MAX_BYTES} allowed")
    named = make_hello() + bytes([len(name)]) + name.ljust(USER_NAME_MAX_BYTES, b"\0")
    proof = _proof(secret, b"client", server_hello, named)
    signed = bytes(_PROOF_BYTES) if identity is None else _proof(identity.key, b"user", server_hello, named)
    return named + proof + signed


def check_reply(secret: bytes, server_hello: bytes, reply: bytes) -> bool:
    """True if the client's reply shows that it knows the secret."""
    named, proof = reply[:_NAMED_BYTES], reply[_NAMED_BYTES:_PROVEN_BYTES]
    return hmac.compare_digest(proof, _proof(secret, b"client", server_hello, named))


def user_of(reply: bytes) -> str:
    """The name of the user that a reply is made in the name of; empty if it names none. ProtocolError if it is no
    name."""
    length = reply[HELLO_BYTES]
    try:
        return reply[HELLO_BYTES + 1 : HELLO_BYTES + 1 + length].decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a client named a user that cannot be read: {error}") from None


def check_user(key: bytes, server_hello: bytes, reply: bytes) -> bool:
    """True if the reply is signed with the user's key."""
    named, signed = reply[:_NAMED_BYTES], reply[_PROVEN_BYTES:]
    return hmac.compare_digest(signed, _proof(key, b"user", server_hello, named))


def make_verdict(secret: bytes, server_hello: bytes, reply: bytes, verdict: HandshakeStatus) -> bytes:
    """The end of the server's part."""
    word = b"server" + bytes([verdict])
    return bytes([verdict]) + _proof(secret, word, server_hello, reply[:HELLO_BYTES])


def check_verdict(secret: bytes, server_hello: bytes, reply: bytes, answer: bytes) -> None:
    """Return if the server has opened the lane. LaneRefusedError if it did not, LaneSecretError if it does not know
    the secret."""
    if answer[:1] not in {bytes([one]) for one in HandshakeStatus}:
        raise LaneSecretError("the lane's server gave no verdict")
    verdict = HandshakeStatus(answer[0])
    if not hmac.compare_digest(answer, make_verdict(secret, server_hello, reply, verdict)):
        raise LaneSecretError("the lane's server does not know its secret")
    if verdict is HandshakeStatus.FULL:
        raise LaneRefusedError("the lane's server has as many connections as it takes")
    if verdict is HandshakeStatus.OTHER_VERSION:
        raise LaneRefusedError("the lane's server speaks another version than this client")
    if verdict is HandshakeStatus.NOT_THIS_USER:
        raise LaneRefusedError(f"the lane's server does not take user {user_of(reply)!r}, or not with this secret")
    if verdict is HandshakeStatus.NOT_READY:
        raise LaneRefusedError("the lane's server does not know the users yet")
