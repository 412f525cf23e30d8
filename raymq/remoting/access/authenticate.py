"""Finds out which user sends a request, from the request's signature or from an address that needs no signature.

The order of the checks is that of ACL 1.0 (spec/features.md §7.3, 1 to 5), which ACL 2.0 keeps. A request from an
address on the server's white list needs no user. Otherwise the request must name a known and enabled user. A request
from an address on the user's own white list needs no signature. A request from any other address needs a valid
signature, and must not be a repeat. White lists are empty by default. They are the only part of access control that
trusts addresses.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

from raymq.common.errors import AuthenticationError
from raymq.remoting.access.addresses import pattern_matches
from raymq.remoting.access.signatures import LIFE_BYTES, NONCES_MAX, SeenNonces, Signature, check, require_fresh
from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import INTERNAL_USER, User, UserType

ANYBODY: Final = User("", b"", UserType.SUPER)
"""The user of a request from an address on the server's white list. This user may do everything."""


class Authenticator:
    """Authenticates the signed requests of one server. Keeps the signatures of recent requests, and refuses a repeated
    request. Not thread-safe.

    `life`: the id of the server's process incarnation, LIFE_BYTES random bytes; None creates a random id.
    `internal_key`: the key with which raymq's own actors sign as INTERNAL_USER; None if no actors sign. `white_list`:
    patterns of addresses (raymq.remoting.access.addresses) from which requests need no signature.
    """

    def __init__(
        self,
        life: bytes | None = None,
        *,
        internal_key: bytes | None = None,
        white_list: Sequence[str] = (),
        nonces_max: int = NONCES_MAX,
    ) -> None:
        self._internal = None if internal_key is None else User(INTERNAL_USER, internal_key, UserType.SUPER)
        self._white_list = tuple(white_list)
        self._life = secrets.token_bytes(LIFE_BYTES) if life is None else life
        self._seen = SeenNonces(nonces_max)

    def user_of(
        self,
        state: AuthState,
        signature: Signature | None,
        actor: str,
        method: str,
        payload: bytes,
        *,
        address: str = "",
        now_ms: int,
    ) -> User:
        """Return the user who sends this request.

        Raises AuthenticationError if the user is missing, unknown or disabled, or if the signature is wrong or a
        repeat. Raises SignedTooEarlyError if the client must sign the request again, for this server process and the
        current time. An error changes no state.

        `address`: the client's address at the server's socket, empty if unknown. `now_ms`: the clock of the server's
        process, which never goes back.
        """
        if any(pattern_matches(pattern, address) for pattern in self._white_list):
            return ANYBODY
        if signature is None or not signature.user:
            raise AuthenticationError(
                f"the call {method} of {actor} needs a user: pass credentials to raymq.connect, or set "
                "RAYMQ_USER and RAYMQ_SECRET"
            )
        user = self._internal if signature.user == INTERNAL_USER else state.users.get(signature.user)
        if user is None:
            raise AuthenticationError(f"user {signature.user!r} does not exist: see the file in access.users_file")
        if not user.is_enabled:
            raise AuthenticationError(
                f"user {user.name!r} is disabled: see the user's status in the file in access.users_file"
            )
        if address and user.white_addresses and pattern_matches(user.white_addresses, address):
            return user
        require_fresh(signature, actor, self._life, now_ms)
        check(user.key, signature, actor, method, payload)
        self._seen.take(signature, now_ms)
        return user
