"""Signatures of requests: they prove which user sends a request, and that the request is recent and not a repeat.

A signature is an HMAC-SHA256 with the user's key (raymq.remoting.access.users). It covers the actor, the method, the
SHA-256 of the request's bytes, the id of the server's process incarnation (`life`), that process's time in ms, and a
random nonce. Each part is preceded by its length, so two different requests never have the same signed text. A
signature is therefore invalid for any other actor, method or argument, for any other process of the server, and for any
time outside SKEW_MS.

Signatures use no wall clock, so wrong or changed clocks have no effect. A process draws its random `life` when it
starts, and counts its own time (`time.monotonic`). If a client lacks the current `life` and time, the server sends both
in a SignedTooEarlyError, and the client signs again:

    client                                          server
    signed for no life           ────────────────▶  not fresh: nothing is carried out
    learns life and time         ◀────────────────  SignedTooEarlyError(life, now_ms)
    signed for life, about now   ────────────────▶  fresh, the HMAC fits, the nonce is new: carried out

While a signature is fresh, the process stores its nonce (`SeenNonces`), and so accepts each request only once. After a
restart the process has lost the nonces, but has another `life`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from raymq.common.errors import AuthenticationError, SignedTooEarlyError, SystemBusyError

SKEW_MS: Final = 60_000
"""Maximum difference, in ms, between a signature's time and the clock of the server's process. The signature's time may
be earlier or later."""
LIFE_BYTES: Final = 16
NONCE_BYTES: Final = 16
NONCES_MAX: Final = 1_000_000
"""Maximum number of nonces that a server stores, about 100 MB. If this number is reached, the server refuses further
signed requests with SystemBusyError. Each nonce is stored for 2 · SKEW_MS."""

_LABEL: Final = b"raymq request 2"


@dataclass(frozen=True, slots=True)
class Signature:
    """The signature that a client sends with a request.

    `user`: the user's name. `life`: the id of the server's process incarnation, empty if the client does not have the
    id yet. `time_ms`: the time by that process's clock. `nonce`: NONCE_BYTES random bytes. `mac`: the HMAC.
    """

    user: str
    life: bytes
    time_ms: int
    nonce: bytes
    mac: bytes = field(repr=False)


def sign(
    user: str, key: bytes, actor: str, method: str, payload: bytes, life: bytes, now_ms: int, nonce: bytes
) -> Signature:
    """Sign the request that calls `method` of `actor`. `payload` is the serialized arguments.

    `key` is `Credentials.key`. `life` is the id of the actor's process incarnation, and `now_ms` is the time of that
    process's clock. `nonce`: NONCE_BYTES random bytes.
    """
    return Signature(user, life, now_ms, nonce, _mac(user, key, actor, method, payload, life, now_ms, nonce))


def require_fresh(signature: Signature, actor: str, life: bytes, now_ms: int) -> None:
    """Check that `signature` was made for the present process of `actor`, whose id is `life`, and within SKEW_MS of
    `now_ms`.

    Raises SignedTooEarlyError if not. The error contains `life` and `now_ms`, so that the client can sign again. This
    function does not check which user signed.
    """
    if signature.life != life:
        reason = "for another process of this actor" if signature.life else "without the id of the actor's process"
    elif abs(signature.time_ms - now_ms) > SKEW_MS:
        reason = f"{abs(signature.time_ms - now_ms)} ms away from the actor's clock; at most {SKEW_MS} ms are allowed"
    else:
        return
    raise SignedTooEarlyError(
        f"the request of user {signature.user!r} to {actor} was signed {reason}: sign the request again",
        actor,
        life,
        now_ms,
    )


def check(key: bytes, signature: Signature, actor: str, method: str, payload: bytes) -> None:
    """Check that `signature` was made with `key` for exactly this request. Raises AuthenticationError if not.

    This function does not check the signature's time (see `require_fresh`). Nor does it check if the signature was used
    before (see `SeenNonces`).
    """
    if len(signature.nonce) != NONCE_BYTES:
        raise AuthenticationError(f"the nonce of a signature must have {NONCE_BYTES} bytes, not {len(signature.nonce)}")
    expected = _mac(signature.user, key, actor, method, payload, signature.life, signature.time_ms, signature.nonce)
    if not hmac.compare_digest(expected, signature.mac):
        raise AuthenticationError(
            f"the signature of user {signature.user!r} does not match the request: the client has another secret, "
            "or the request was changed on the way"
        )


class SeenNonces:
    """The nonces of the requests that a server process has accepted, stored while their signatures are fresh. Not
    thread-safe.

    `most`: the maximum number of stored nonces.
    """

    def __init__(self, most: int = NONCES_MAX) -> None:
        self._most = most
        self._seen: set[tuple[str, bytes]] = set()
        self._order: deque[tuple[int, tuple[str, bytes]]] = deque()
        """The stored nonces in order of expiry, each with the time in ms after which it is deleted."""

    def __len__(self) -> int:
        return len(self._seen)

    def take(self, signature: Signature, now_ms: int) -> None:
        """Store the nonce of a signature that is fresh and that `check` has accepted. `now_ms`: the process's clock,
        which never goes back.

        Raises AuthenticationError if the nonce is already stored: the request is a repeat. Raises SystemBusyError if
        the maximum number of nonces is stored.
        """
        self._forget(now_ms)
        one = signature.user, signature.nonce
        if one in self._seen:
            raise AuthenticationError(
                f"the request of user {signature.user!r} was accepted before: a signed request cannot be repeated"
            )
        if len(self._seen) >= self._most:
            raise SystemBusyError(
                f"the server received {self._most} signed requests within {2 * SKEW_MS} ms and cannot remember "
                "more; try again later"
            )
        self._seen.add(one)
        # Remember the nonce for 2 * SKEW_MS, so that it is not forgotten before its signature expires. The signature's
        # time is at most SKEW_MS after `now_ms`, and the signature expires SKEW_MS after its time. Nonces are appended
        # in the order in which they are forgotten.
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
