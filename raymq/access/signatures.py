"""Signatures of requests: who sends this request, and that it is sent now and once.

A signature is HMAC-SHA256 with the user's key (raymq.access.users) over the actor, the method, the SHA-256 of the
request's bytes, the time in ms and a random nonce, each with its length before it, so that no two requests have the
same text. It therefore fits no other actor, method or argument, and no time outside SKEW_MS. Within the window a
server remembers the nonces that it has seen (`SeenNonces`), so that the very same request is taken once. A server that
was started again has forgotten them: what was signed before its start (`since_ms`) is refused, and the client signs
anew. Servers and clients therefore need clocks that are less than SKEW_MS apart.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from raymq.errors import AuthenticationError, SignedTooEarlyError, SystemBusyError

SKEW_MS: Final = 60_000
"""How far a signature's time may be from the server's clock, before and after."""
NONCE_BYTES: Final = 16
NONCES_MAX: Final = 1_000_000
"""Nonces that a server remembers; more signed requests in two windows are refused as busy. Some 100 MB at the most."""

_LABEL: Final = b"raymq request 1"


@dataclass(frozen=True, slots=True)
class Signature:
    """The proof that goes with a request: the user's name, when it was signed, a nonce of its own, the HMAC."""

    user: str
    time_ms: int
    nonce: bytes
    mac: bytes = field(repr=False)


def sign(user: str, key: bytes, actor: str, method: str, payload: bytes, now_ms: int, nonce: bytes) -> Signature:
    """Sign the request that calls `method` of `actor` with the arguments whose bytes are `payload`.

    `key` is `Credentials.key`, `nonce` NONCE_BYTES random bytes, `now_ms` ms since 1970.
    """
    return Signature(user, now_ms, nonce, _mac(user, key, actor, method, payload, now_ms, nonce))


def check(key: bytes, signature: Signature, actor: str, method: str, payload: bytes, now_ms: int) -> None:
    """Return if `signature` was made with `key` for this very request within SKEW_MS of `now_ms`.

    AuthenticationError otherwise. Says nothing about repeats: that is `SeenNonces`.
    """
    if len(signature.nonce) != NONCE_BYTES:
        raise AuthenticationError(f"a signature's nonce has {NONCE_BYTES} bytes, not {len(signature.nonce)}")
    apart_ms = signature.time_ms - now_ms
    if abs(apart_ms) > SKEW_MS:
        raise AuthenticationError(
            f"the request of user {signature.user!r} was signed {abs(apart_ms)} ms "
            f"{'after' if apart_ms > 0 else 'before'} the server's time, and {SKEW_MS} ms are allowed: set the clocks "
            "of both machines"
        )
    expected = _mac(signature.user, key, actor, method, payload, signature.time_ms, signature.nonce)
    if not hmac.compare_digest(expected, signature.mac):
        raise AuthenticationError(
            f"the signature of user {signature.user!r} does not fit this request: its secret is another one, or the "
            "request was changed on its way"
        )


class SeenNonces:
    """The nonces of the requests that a server has taken, for as long as their signatures are valid. Not thread-safe.

    `since_ms`: when the server began to remember; signatures from before are refused, as they might be repeats.
    """

    def __init__(self, since_ms: int, most: int = NONCES_MAX) -> None:
        self._since_ms, self._most = since_ms, most
        self._seen: set[tuple[str, bytes]] = set()
        self._order: deque[tuple[int, tuple[str, bytes]]] = deque()
        """When each may be forgotten, and which it is."""

    def __len__(self) -> int:
        return len(self._seen)

    def take(self, signature: Signature, now_ms: int) -> None:
        """Note a signature that `check` has let pass. AuthenticationError for one that was noted before, or that is
        older than this server; SystemBusyError where no more can be remembered."""
        if signature.time_ms < self._since_ms:
            raise SignedTooEarlyError(
                f"the request of user {signature.user!r} was signed before this server started, which cannot tell if it"
                " is a repeat: sign it anew"
            )
        self._forget(now_ms)
        one = signature.user, signature.nonce
        if one in self._seen:
            raise AuthenticationError(
                f"the request of user {signature.user!r} was taken already: this is a repeat of it"
            )
        if len(self._seen) >= self._most:
            raise SystemBusyError(f"{self._most} signed requests in {2 * SKEW_MS} ms: no more are remembered")
        self._seen.add(one)
        # A signature is valid until its time + SKEW_MS, which is no later than this; so the queue stays in order.
        self._order.append((now_ms + 2 * SKEW_MS, one))

    def _forget(self, now_ms: int) -> None:
        while self._order and self._order[0][0] < now_ms:
            self._seen.discard(self._order.popleft()[1])


def _mac(user: str, key: bytes, actor: str, method: str, payload: bytes, time_ms: int, nonce: bytes) -> bytes:
    parts = (
        _LABEL,
        user.encode(),
        actor.encode(),
        method.encode(),
        hashlib.sha256(payload).digest(),
        str(time_ms).encode(),
        nonce,
    )
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")
