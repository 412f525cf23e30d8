"""Signatures of requests: who sends this request, and that it is sent now and once.

A signature is HMAC-SHA256 with the user's key (raymq.remoting.access.users) over the actor, the method, the SHA-256 of
the request's bytes, the id of the server's process (`life`), that process's time in ms and a random nonce. Each part
has its length before it, so that no two requests have the same text. A signature therefore fits no other actor, method
or argument, no other process of the server, and no time outside SKEW_MS.

No wall clock takes part, so clocks that are wrong, or set, change nothing. A process draws its life when it starts and
counts its own time (`time.monotonic`). A client that does not know both yet, or no longer, gets them with
SignedTooEarlyError, and signs anew:

    client                                          server
    signed for no life           ────────────────▶  not fresh: nothing is carried out
    learns life and time         ◀────────────────  SignedTooEarlyError(life, now_ms)
    signed for life, about now   ────────────────▶  fresh, the HMAC fits, the nonce is new: carried out

While a signature is fresh, the process remembers its nonce (`SeenNonces`), so the same request is taken once. The next
process has forgotten the nonces, and has another life.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from raymq.common.errors import AuthenticationError, SignedTooEarlyError, SystemBusyError

SKEW_MS: Final = 60_000
"""The most that a signature's time may differ from the clock of the server's process, in ms, before and after."""
LIFE_BYTES: Final = 16
NONCE_BYTES: Final = 16
NONCES_MAX: Final = 1_000_000
"""Nonces that a server remembers; more signed requests in two windows are refused as busy. Some 100 MB at the most."""

_LABEL: Final = b"raymq request 2"


@dataclass(frozen=True, slots=True)
class Signature:
    """The proof that goes with a request.

    `user`: the user's name. `life`: the id of the server's process, empty if the client does not know the process yet.
    `time_ms`: the time by that process's clock. `nonce`: NONCE_BYTES random bytes. `mac`: the HMAC.
    """

    user: str
    life: bytes
    time_ms: int
    nonce: bytes
    mac: bytes = field(repr=False)


def sign(
    user: str, key: bytes, actor: str, method: str, payload: bytes, life: bytes, now_ms: int, nonce: bytes
) -> Signature:
    """Sign the request that calls `method` of `actor` with the arguments whose bytes are `payload`.

    `key` is `Credentials.key`. `life` and `now_ms`: the id of the actor's process, and the time there in ms.
    `nonce`: NONCE_BYTES random bytes.
    """
    return Signature(user, life, now_ms, nonce, _mac(user, key, actor, method, payload, life, now_ms, nonce))


def require_fresh(signature: Signature, actor: str, life: bytes, now_ms: int) -> None:
    """Return if `signature` was made for the process `life` of `actor`, within SKEW_MS of the process's `now_ms`.

    SignedTooEarlyError otherwise, which carries both, so that the client can sign anew. Who signed is not checked here.
    """
    if signature.life != life:
        reason = "for another process of it" if signature.life else "without the id of its process"
    elif abs(signature.time_ms - now_ms) > SKEW_MS:
        reason = f"{abs(signature.time_ms - now_ms)} ms from its time, and {SKEW_MS} ms are allowed"
    else:
        return
    raise SignedTooEarlyError(
        f"the request of user {signature.user!r} to {actor} was signed {reason}: sign it anew", actor, life, now_ms
    )


def check(key: bytes, signature: Signature, actor: str, method: str, payload: bytes) -> None:
    """Return if `signature` was made with `key` for this very request. AuthenticationError otherwise.

    Says nothing about time and repeats: `require_fresh` and `SeenNonces` do.
    """
    if len(signature.nonce) != NONCE_BYTES:
        raise AuthenticationError(f"a signature's nonce has {NONCE_BYTES} bytes, not {len(signature.nonce)}")
    expected = _mac(signature.user, key, actor, method, payload, signature.life, signature.time_ms, signature.nonce)
    if not hmac.compare_digest(expected, signature.mac):
        raise AuthenticationError(
            f"the signature of user {signature.user!r} does not fit this request: its secret is another one, or the "
            "request was changed on its way"
        )


class SeenNonces:
    """The nonces of the requests that a server's process has taken, while their signatures are fresh. Not thread-safe.

    `most`: the most nonces that are remembered.
    """

    def __init__(self, most: int = NONCES_MAX) -> None:
        self._most = most
        self._seen: set[tuple[str, bytes]] = set()
        self._order: deque[tuple[int, tuple[str, bytes]]] = deque()
        """When each may be forgotten, and which it is."""

    def __len__(self) -> int:
        return len(self._seen)

    def take(self, signature: Signature, now_ms: int) -> None:
        """Note a signature that is fresh and that `check` has let pass. `now_ms`: the process's clock, which never goes
        back. AuthenticationError for a signature that was noted before; SystemBusyError if the memory is full."""
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


def _mac(
    user: str, key: bytes, actor: str, method: str, payload: bytes, life: bytes, time_ms: int, nonce: bytes
) -> bytes:
    parts = (
        _LABEL,
        user.encode(),
        actor.encode(),
        method.encode(),
        hashlib.sha256(payload).digest(),
        life,
        str(time_ms).encode(),
        nonce,
    )
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")
