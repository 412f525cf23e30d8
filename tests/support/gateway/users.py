"""The users of a gateway with access control, with the rights that a test gives them."""

from __future__ import annotations

from typing import Final

from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import UserStatus, UserType, gateway_secret, make_user

SECRET: Final = "a long secret"
USERS: Final = {
    user.name: user
    for user in (
        make_user("root", SECRET, type=UserType.SUPER),
        make_user("shop", SECRET),
        make_user("till", SECRET, messages_per_second=4),
        make_user("eater", SECRET, consume_messages_per_second=2),
        make_user("gone", SECRET, status=UserStatus.DISABLE),
    )
}
"""The users by name. Only `root` has rights from the start."""
HANDLE: Final = "0 1795400000000 60000 0 0 a 0 0"
"""The handle of a message at broker group `a`."""


def secret_of(name: str) -> str:
    """Return the secret with which a user's clients sign their calls to a gateway."""
    return gateway_secret(USERS[name].key)


def state_of_users() -> AuthState:
    """Return the users without any policy."""
    state = AuthState()
    for user in USERS.values():
        state = state.with_user(user, is_new=True)
    return state
