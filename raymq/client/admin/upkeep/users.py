"""Administration: the users of a raymq with access on, and their policies, while it runs.

The first broker group stores them. A change is durable when a call returns, and in effect at every server within
seconds. A restarted server uses the users from raymq's start until it has asked the broker. raymq.yaml names the super
user, who is changed there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from raymq.client.admin.base import AdminBase
from raymq.common.errors import UserNotExistError
from raymq.common.names import USERS_BROKER
from raymq.remoting.access.changes import (
    AccessChange,
    CreateUser,
    DeleteEntries,
    DeleteUser,
    PutEntries,
    UpdateUser,
    UserDescription,
)
from raymq.remoting.access.policies import Action, Decision, Pattern, make_entry
from raymq.remoting.access.users import (
    BOUNDS,
    Bounds,
    UserStatus,
    UserType,
    check_bounds,
    check_user_name,
    derive_key,
    make_user,
)


class UserAdmin(AdminBase):
    """Calls about users, for super users. Raises InvalidArgumentError if access is off."""

    def users(self) -> list[UserDescription]:
        """All users with their policies, sorted by name."""
        found: list[UserDescription] = self._call_broker(USERS_BROKER, "users")
        return found

    def user(self, name: str) -> UserDescription:
        """One user with its policies. UserNotExistError."""
        for one in self.users():
            if one.name == name:
                return one
        raise UserNotExistError(name)

    def create_user(
        self,
        name: str,
        secret: str,
        *,
        is_super: bool = False,
        **bounds: Unpack[Bounds],
    ) -> None:
        """Create a user, who may do nothing until a policy allows it, or everything with `is_super`. The secret has at
        least 7 characters and does not leave this process: the brokers keep a key derived from it. `bounds` are its
        quotas: `bytes_per_second` and `messages_per_second` of what it sends to each store, and
        `consume_bytes_per_second` and `consume_messages_per_second` of what it consumes from each; 0 is without bound.

        InvalidArgumentError: the name is taken or refused, or the secret too short.
        """
        kind = UserType.SUPER if is_super else UserType.NORMAL
        self._change_access(CreateUser(make_user(name, secret, type=kind, **bounds)))

    def update_user(
        self,
        name: str,
        *,
        secret: str | None = None,
        is_super: bool | None = None,
        enabled: bool | None = None,
        **bounds: Unpack[Bounds],
    ) -> None:
        """Change the given properties of a user, `bounds` as with `create_user`, and keep the others. A user that is
        not `enabled` is refused everything and keeps its policies. After a change of the secret, open lanes stay open;
        new lanes and calls need the new secret.

        Raises UserNotExistError; InvalidArgumentError, also if no enabled super user would remain.
        """
        key = None if secret is None else derive_key(check_user_name(name), secret)
        kind = None if is_super is None else UserType.SUPER if is_super else UserType.NORMAL
        status = None if enabled is None else UserStatus.ENABLE if enabled else UserStatus.DISABLE
        self._change_access(UpdateUser(name, key, kind, status, check_bounds(bounds)))

    def delete_user(self, name: str) -> None:
        """Delete a user with its policies. What it has open is refused from its next request on. UserNotExistError;
        InvalidArgumentError for the last enabled super user."""
        self._change_access(DeleteUser(name))

    def create_policy(
        self,
        user: str,
        resource: str,
        actions: Iterable[str | Action],
        decision: str | Decision = Decision.ALLOW,
        *,
        sources: Iterable[str] = (),
    ) -> None:
        """Allow a user actions (Pub, Sub, Create, Update, Delete, Get, List, All) on a resource (``Topic:orders``,
        ``Group:billing*``, ``Cluster:*`` or ``*``), or deny them with `decision` "Deny"; with `sources`, addresses or
        networks, only for requests from there.

        UserNotExistError; InvalidArgumentError, also for a resource that the user has an entry for.
        """
        entry = make_entry(resource, actions, decision, sources=sources)
        self._change_access(PutEntries(user, (entry,), is_new=True))

    def update_policy(
        self,
        user: str,
        resource: str,
        actions: Iterable[str | Action],
        decision: str | Decision = Decision.ALLOW,
        *,
        sources: Iterable[str] = (),
    ) -> None:
        """Put another entry in the place of the user's for `resource`, as `create_policy`. UserNotExistError,
        PolicyNotExistError, InvalidArgumentError."""
        entry = make_entry(resource, actions, decision, sources=sources)
        self._change_access(PutEntries(user, (entry,), is_new=False))

    def delete_policy(self, user: str, resource: str | None = None) -> None:
        """Delete the user's entry for `resource`, or all entries if None. Raises UserNotExistError,
        PolicyNotExistError."""
        self._change_access(DeleteEntries(user, None if resource is None else Pattern.parse(resource)))

    def _change_access(self, change: AccessChange) -> None:
        self._call_broker(USERS_BROKER, "change_access", change)


def shown_user(user: UserDescription) -> dict[str, Any]:  # Any: a JSON object
    """A user as a JSON object, for commands."""
    return {
        "name": user.name,
        "type": user.type,
        "status": user.status,
        **{bound: getattr(user, bound) for bound in BOUNDS},
        "policies": [entry.shown() for entry in user.policies],
    }
