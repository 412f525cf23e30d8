"""Users: their names, types, keys and quotas (spec/features.md §8).

A secret is never stored. raymq stores the user's key, which PBKDF2 derives from the secret and the name. The key signs
the user's requests. So a person who reads a broker's state log can sign as its users, but does not get the secrets,
which users may also use elsewhere. A user's `repr` and the printed descriptions of users do not contain the key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypedDict, Unpack

from raymq.common.errors import InvalidArgumentError
from raymq.common.numbers import NumberRange, number_in
from raymq.remoting.access.addresses import check_pattern

SECRET_MIN_CHARACTERS: Final = 7
"""Minimum length of a user's secret in characters, as for accounts of ACL 1.0 (golden fact 142 of
spec/features.md)."""
USER_CHARS_MAX: Final = 64
KEY_BYTES: Final = 32
KEY_ROUNDS: Final = 100_000
"""Number of PBKDF2 rounds that derive a user's key from the user's secret. The rounds take about 30 ms, once per
connection. They make it slow to find the secret of a known key by guessing."""

INTERNAL_USER: Final = "rmq_sys_internal"
"""The user name with which raymq's own actors sign. No user can be created with this name."""

_GATEWAY_LABEL: Final = b"raymq gateway"
_LEGAL_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]+")


class Bounds(TypedDict, total=False):
    """A user's quotas, each per second and per store; 0 means no limit. The first two limit the bytes and messages that
    the user sends. The last two limit the bytes and messages that the user consumes."""

    bytes_per_second: int
    messages_per_second: int
    consume_bytes_per_second: int
    consume_messages_per_second: int


BOUNDS: Final = tuple(Bounds.__annotations__)
QUOTA: Final = NumberRange(0, 2**53 - 1)
"""The range of allowed values for each quota of a user."""
SEND_BOUNDS: Final = BOUNDS[:2]
CONSUME_BOUNDS: Final = BOUNDS[2:]


class UserType(Enum):
    """The type of a user. A Super user may do everything; a Normal user may do what the user's policies allow."""

    SUPER = "Super"
    NORMAL = "Normal"


class UserStatus(Enum):
    """The status of a user. If it is DISABLE, every request of the user is refused, but the user's policies are
    kept."""

    ENABLE = "enable"
    DISABLE = "disable"


@dataclass(frozen=True, slots=True)
class User:
    """A user of raymq, with a name, key, type, status and quotas (Bounds).

    `white_addresses` is a pattern (raymq.remoting.access.addresses) of addresses from which the user needs no
    signature, as for accounts of ACL 1.0. Blank, the default, matches no address.
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
        """True if the user is a super user, who may do everything."""
        return self.type is UserType.SUPER

    @property
    def is_enabled(self) -> bool:
        """True if the user is not disabled. A server refuses every request of a disabled user."""
        return self.status is UserStatus.ENABLE

    @property
    def bounds(self) -> Bounds:
        """The user's quotas for sending and consuming."""
        return Bounds(
            bytes_per_second=self.bytes_per_second,
            messages_per_second=self.messages_per_second,
            consume_bytes_per_second=self.consume_bytes_per_second,
            consume_messages_per_second=self.consume_messages_per_second,
        )

    @property
    def has_consume_bound(self) -> bool:
        """True if the user has a quota for consuming."""
        return bool(self.consume_bytes_per_second or self.consume_messages_per_second)

    def shown(self) -> dict[str, Any]:  # Any: a JSON object
        """Return the user as a JSON object for commands to print. The object does not contain the key."""
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
    """Create a user whose key is derived from `secret`. Raises InvalidArgumentError if the name, the secret, a quota or
    the address pattern is not allowed."""
    user = User(name, derive_key(name, secret), type, status, white_addresses=white_addresses, **bounds)
    return check_user(user)


def check_user(user: User) -> User:
    """Return `user` if its name, key, quotas and address pattern are allowed. Raises InvalidArgumentError if
    not."""
    check_user_name(user.name)
    check_bounds(user.bounds)
    if len(user.key) != KEY_BYTES:
        raise InvalidArgumentError(f"the key of user {user.name!r} must have {KEY_BYTES} bytes, not {len(user.key)}")
    check_pattern(user.white_addresses)
    return user


def check_bounds(bounds: Bounds) -> Bounds:
    """Return the quotas in `bounds` if they are allowed for a user. Raises InvalidArgumentError if not."""
    given: Mapping[str, object] = bounds
    for name, bound in given.items():
        if name not in BOUNDS:
            raise InvalidArgumentError(f"a user has no quota {name!r}; the quotas are {', '.join(BOUNDS)}")
        number_in(name, bound, QUOTA)
    return bounds


def check_user_name(name: str) -> str:
    """Return `name` if it is allowed as a user name. Raises InvalidArgumentError if not."""
    if not isinstance(name, str) or not _LEGAL_NAME.fullmatch(name) or len(name) > USER_CHARS_MAX:
        raise InvalidArgumentError(
            f"user name {name!r} is not legal: use 1 to {USER_CHARS_MAX} letters, digits and the characters . _ @ -"
        )
    if name == INTERNAL_USER:
        raise InvalidArgumentError(f"user name {name!r} is reserved for raymq's own actors: choose another name")
    return name


def derive_key(name: str, secret: str) -> bytes:
    """Derive the key of KEY_BYTES bytes with which the user `name` signs. Raises InvalidArgumentError if the secret is
    too short.

    The name is the salt: two users with the same secret have different keys.
    """
    if not isinstance(secret, str) or len(secret) < SECRET_MIN_CHARACTERS:
        raise InvalidArgumentError(f"the secret of user {name!r} must have at least {SECRET_MIN_CHARACTERS} characters")
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), b"raymq user " + name.encode(), KEY_ROUNDS, KEY_BYTES)


def gateway_secret(key: bytes) -> str:
    """Return the secret with which a user's gRPC clients sign their calls to a gateway. `key`: the user's key.

    The secret is not stored: gateways derive it from the key, too. It does not reveal the key. A change of the user's
    own secret changes it.
    """
    return hmac.new(key, _GATEWAY_LABEL, hashlib.sha256).hexdigest()
