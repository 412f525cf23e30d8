"""Users: their names, kinds, keys and quotas (spec/features.md §8).

A secret is never kept. What is kept is the user's key, derived from secret and name by PBKDF2, with which requests are
signed: whoever reads a broker's state log could sign as its users, but does not learn secrets that are perhaps used
elsewhere, too. The key is no part of a user's `repr`, nor of what users are shown.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypedDict, Unpack

from raymq.common.errors import InvalidArgumentError
from raymq.common.numbers import NumberRange, number_in
from raymq.remoting.access.addresses import check_pattern

SECRET_MIN_CHARACTERS: Final = 7
"""As for accounts of ACL 1.0 (golden fact 142)."""
USER_CHARS_MAX: Final = 64
KEY_BYTES: Final = 32
KEY_ROUNDS: Final = 100_000
"""Rounds of PBKDF2: some 30 ms, once per connection, that make guessing a secret from its key slow."""

INTERNAL_USER: Final = "rmq_sys_internal"
"""The name under which raymq's own actors sign. No user can be created with it."""

_LEGAL_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]+")


class Bounds(TypedDict, total=False):
    """A user's quotas, each per second and at each store; 0 is no bound. The first two bound what it sends, the others
    what it consumes."""

    bytes_per_second: int
    messages_per_second: int
    consume_bytes_per_second: int
    consume_messages_per_second: int


BOUNDS: Final = tuple(Bounds.__annotations__)
QUOTA: Final = NumberRange(0, 2**53 - 1)
"""The values of each quota."""
SEND_BOUNDS: Final = BOUNDS[:2]
CONSUME_BOUNDS: Final = BOUNDS[2:]


class UserType(Enum):
    """The kind of a user: Super may do everything, Normal what policies allow."""

    SUPER = "Super"
    NORMAL = "Normal"


class UserStatus(Enum):
    """ENABLE, or DISABLE: every request of the user is refused, and its policies are kept."""

    ENABLE = "enable"
    DISABLE = "disable"


@dataclass(frozen=True, slots=True)
class User:
    """One user. Its quotas are those of Bounds.

    `white_addresses` is a pattern (raymq.remoting.access.addresses) of addresses from where the user needs no
    signature, as accounts of ACL 1.0 have it; blank, the default, is nowhere.
    """

    name: str
    key: bytes = field(repr=False)
    type: UserType = UserType.NORMAL
    status: UserStatus = UserStatus.ENABLE
    bytes_per_second: int = 0
    messages_per_second: int = 0
    consume_bytes_per_second: int = 0
    consume_messages_per_second: int = 0
    white_addresses: str = ""

    @property
    def is_super(self) -> bool:
        """True if the user may do everything."""
        return self.type is UserType.SUPER

    @property
    def is_enabled(self) -> bool:
        """True if the user's requests are looked at at all."""
        return self.status is UserStatus.ENABLE

    @property
    def bounds(self) -> Bounds:
        """The user's quotas."""
        return Bounds(
            bytes_per_second=self.bytes_per_second,
            messages_per_second=self.messages_per_second,
            consume_bytes_per_second=self.consume_bytes_per_second,
            consume_messages_per_second=self.consume_messages_per_second,
        )

    @property
    def has_consume_bound(self) -> bool:
        """True if there is a bound of what it consumes."""
        return bool(self.consume_bytes_per_second or self.consume_messages_per_second)

    def shown(self) -> dict[str, Any]:  # Any: a JSON object
        """The user as commands print it: a JSON object without the key."""
        return {
            "name": self.name,
            "type": self.type.value,
            "status": self.status.value,
            **self.bounds,
            "white_addresses": self.white_addresses,
        }


def make_user(
    name: str,
    secret: str,
    *,
    type: UserType = UserType.NORMAL,
    status: UserStatus = UserStatus.ENABLE,
    white_addresses: str = "",
    **bounds: Unpack[Bounds],
) -> User:
    """A user with the key of `secret`. InvalidArgumentError for a name, secret, quota or pattern that is refused."""
    user = User(name, derive_key(name, secret), type, status, white_addresses=white_addresses, **bounds)
    return check_user(user)


def check_user(user: User) -> User:
    """Return `user` if its name, key, quotas and pattern are allowed, else raise InvalidArgumentError."""
    check_user_name(user.name)
    check_bounds(user.bounds)
    if len(user.key) != KEY_BYTES:
        raise InvalidArgumentError(f"the key of user {user.name} has {len(user.key)} bytes, not {KEY_BYTES}")
    check_pattern(user.white_addresses)
    return user


def check_bounds(bounds: Bounds) -> Bounds:
    """Return `bounds` if a user may have them, else raise InvalidArgumentError."""
    given: Mapping[str, object] = bounds
    for name, bound in given.items():
        if name not in BOUNDS:
            raise InvalidArgumentError(f"a user has no quota {name}: there are {', '.join(BOUNDS)}")
        number_in(name, bound, QUOTA)
    return bounds


def check_user_name(name: str) -> str:
    """Return `name` if a user may have it, else raise InvalidArgumentError."""
    if not isinstance(name, str) or not _LEGAL_NAME.fullmatch(name) or len(name) > USER_CHARS_MAX:
        raise InvalidArgumentError(
            f"a user's name has 1 to {USER_CHARS_MAX} letters, digits and characters of . _ @ -, unlike {name!r}"
        )
    if name == INTERNAL_USER:
        raise InvalidArgumentError(f"{name} is the name of raymq's own actors")
    return name


def derive_key(name: str, secret: str) -> bytes:
    """The key, KEY_BYTES long, with which the user `name` signs. InvalidArgumentError for a secret that is too short.

    The name is the salt: two users with the same secret have different keys.
    """
    if not isinstance(secret, str) or len(secret) < SECRET_MIN_CHARACTERS:
        raise InvalidArgumentError(f"the secret of user {name} must have at least {SECRET_MIN_CHARACTERS} characters")
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), b"raymq user " + name.encode(), KEY_ROUNDS, KEY_BYTES)
