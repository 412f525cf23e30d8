"""The handshake of a lane (direct socket connection): client and server each prove that they have the lane's secret,
without sending it. Uses no sockets.

The package's docstring describes the bytes. Each HMAC covers the random bytes of both sides, so a recorded handshake
cannot be replayed. The HMACs of client and server begin with different words, so neither proof can be sent back to its
sender as a proof.

A client that acts as a user also signs with the user's key; the lane then belongs to the user. A server without users
ignores the user's signature.
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
    """The server's decision about a client that requests a lane: accept it, or refuse it for a reason."""

    OPEN = 1
    FULL = 2
    OTHER_VERSION = 3
    NOT_THIS_USER = 4
    NOT_READY = 5


class LaneRefusedError(ServiceNotAvailableError):
    """Raised if the server of a lane (direct socket connection) refuses the client's connection. A later attempt may
    succeed."""


class LaneSecretError(ProtocolError):
    """Raised if the peer of a lane does not have the lane's secret."""


class TlsRefusedError(ConnectionRefusedError):
    """Raised if the client or the server of a lane (direct socket connection) refuses the other's certificate, or if
    only one of them uses TLS.

    The error text names the certificate that must be replaced.
    """


def make_hello(version: int = VERSION) -> bytes:
    """Build the hello: the first message that client and server send in a handshake."""
    return _HEAD.pack(_MAGIC, version, 0) + secrets.token_bytes(_RANDOM_BYTES)


def version_of(hello: bytes) -> int:
    """Return the protocol version in the peer's hello. Raises ProtocolError if the bytes are not a hello."""
    magic, version, _ = _HEAD.unpack_from(hello)
    if magic != _MAGIC:
        raise ProtocolError("the other end does not use raymq's lane protocol")
    return int(version)


def _proof(secret: bytes, word: bytes, server_hello: bytes, client_part: bytes) -> bytes:
    return hmac.digest(secret, word + server_hello + client_part, "sha256")


def make_reply(secret: bytes, server_hello: bytes, identity: Identity | None = None) -> bytes:
    """Build the client's reply to the hello (first message) of a lane server, which serves direct socket connections.
    If `identity` is given, the reply is signed as this user.

    Raises LaneRefusedError if the server uses another version, or if the user's name is longer than
    USER_NAME_MAX_BYTES. Raises ProtocolError if the hello is not from a lane server.
    """
    version = version_of(server_hello)
    if version != VERSION:
        raise LaneRefusedError(
            f"the server uses version {version} of the lane protocol, and this client uses version {VERSION}: "
            "install the same version of raymq on both"
        )
    name = b"" if identity is None else identity.user.encode()
    if len(name) > USER_NAME_MAX_BYTES:
        raise LaneRefusedError(f"the user's name has {len(name)} bytes; at most {USER_NAME_MAX_BYTES} are allowed")
    named = make_hello() + bytes([len(name)]) + name.ljust(USER_NAME_MAX_BYTES, b"\0")
    proof = _proof(secret, b"client", server_hello, named)
    signed = bytes(_PROOF_BYTES) if identity is None else _proof(identity.key, b"user", server_hello, named)
    return named + proof + signed


def check_reply(secret: bytes, server_hello: bytes, reply: bytes) -> bool:
    """True if the client's reply proves that the client has the secret of the lane (direct socket connection)."""
    named, proof = reply[:_NAMED_BYTES], reply[_NAMED_BYTES:_PROVEN_BYTES]
    return hmac.compare_digest(proof, _proof(secret, b"client", server_hello, named))


def user_of(reply: bytes) -> str:
    """Return the user's name in a client's handshake reply; empty if the reply has no user. Raises ProtocolError if the
    name cannot be decoded."""
    length = reply[HELLO_BYTES]
    try:
        return reply[HELLO_BYTES + 1 : HELLO_BYTES + 1 + length].decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"cannot decode the user's name that a client sent: {error}") from None


def check_user(key: bytes, server_hello: bytes, reply: bytes) -> bool:
    """True if the client's reply is signed with the user's key."""
    named, signed = reply[:_NAMED_BYTES], reply[_PROVEN_BYTES:]
    return hmac.compare_digest(signed, _proof(key, b"user", server_hello, named))


def make_verdict(secret: bytes, server_hello: bytes, reply: bytes, verdict: HandshakeStatus) -> bytes:
    """Build the server's last message of the handshake: its verdict, which opens or refuses the lane."""
    word = b"server" + bytes([verdict])
    return bytes([verdict]) + _proof(secret, word, server_hello, reply[:HELLO_BYTES])


def check_verdict(secret: bytes, server_hello: bytes, reply: bytes, answer: bytes) -> None:
    """Check the server's verdict, which ends the handshake.

    Raises LaneRefusedError if the server refuses the lane, and LaneSecretError if the server lacks the lane's secret.
    """
    if answer[:1] not in {bytes([one]) for one in HandshakeStatus}:
        raise LaneSecretError("the server did not finish the handshake")
    verdict = HandshakeStatus(answer[0])
    if not hmac.compare_digest(answer, make_verdict(secret, server_hello, reply, verdict)):
        raise LaneSecretError("the server could not prove that it has the lane's secret")
    if verdict is HandshakeStatus.FULL:
        raise LaneRefusedError(
            "the server has reached its maximum number of connections; close unused clients, or try again later"
        )
    if verdict is HandshakeStatus.OTHER_VERSION:
        raise LaneRefusedError(
            "the server uses another version of the lane protocol than this client: install the same version of "
            "raymq on both"
        )
    if verdict is HandshakeStatus.NOT_THIS_USER:
        raise LaneRefusedError(
            f"the server refuses user {user_of(reply)!r}: the user is unknown, or the secret is wrong"
        )
    if verdict is HandshakeStatus.NOT_READY:
        raise LaneRefusedError("the server has not loaded the users yet; try again later")
