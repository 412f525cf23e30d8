"""Administration: changes the users and their policies while raymq runs with access control on.

The first broker group stores the users. A change is durable when a call returns, and in effect at every server within
seconds. A restarted server first uses the users from raymq's start, until it has queried the broker. raymq.yaml names
the super user. The super user can be changed only in that file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from raymq.client.admin.base import AdminBase
from raymq.common.errors import UserNotExistError
from raymq.common.names import USERS_BROKER
from raymq.common.namespaces import nearest_names
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
    """Administration calls about users, for super users. Each call raises InvalidArgumentError if access control is
    off."""

    def users(self) -> list[UserDescription]:
        """Return all users with their policies, sorted by name."""
        found: list[UserDescription] = self._call_broker(USERS_BROKER, "users")
        return found

    def user(self, name: str) -> UserDescription:
        """Return one user with its policies. Raises UserNotExistError if the user does not exist."""
        users = {one.name: one for one in self.users()}
        if name not in users:
            raise UserNotExistError(name, nearest_names(name, users))
        return users[name]

    def create_user(
        self,
        name: str,
        secret: str,
        *,
        is_super: bool = False,
        **bounds: Unpack[Bounds],
    ) -> None:
        """Create a user. The user has no permission until a policy allows an action; with `is_super`, it has every
        permission.

        `secret`: at least 7 characters. It does not leave this process; the brokers store a key derived from it.
        `bounds`: the user's quotas, 0 for no limit. `bytes_per_second` and `messages_per_second` limit what it sends to
        each store. `consume_bytes_per_second` and `consume_messages_per_second` limit what it consumes from each store.

        Raises InvalidArgumentError if the name is taken or illegal, or if the secret is too short.
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
        """Change the given properties of a user, and keep its other properties. `bounds`: quotas as in `create_user`.

        If `enabled` is false, every request of the user is refused; the user keeps its policies. After a change of the
        secret, open lanes (direct socket connections) stay open; new lanes and calls need the new secret.

        Raises UserNotExistError if the user does not exist. Raises InvalidArgumentError if a value is invalid, or if no
        enabled super user would remain.
        """
        key = None if secret is None else derive_key(check_user_name(name), secret)
        kind = None if is_super is None else UserType.SUPER if is_super else UserType.NORMAL
        status = None if enabled is None else UserStatus.ENABLE if enabled else UserStatus.DISABLE
        self._change_access(UpdateUser(name, key, kind, status, check_bounds(bounds)))

    def delete_user(self, name: str) -> None:
        """Delete a user with its policies. Connections of the user are refused from their next request on.

        Raises UserNotExistError if the user does not exist. Raises InvalidArgumentError if the user is the last enabled
        super user.
        """
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
        """Allow a user to perform actions on a resource; with `decision` "Deny", forbid them.

        Actions: Pub, Sub, Create, Update, Delete, Get, List, All. Resources: ``Topic:orders``, ``Group:billing*``,
        ``Cluster:*`` or ``*``. `sources`: addresses or networks; if given, the policy entry applies only to requests
        from these addresses.

        Raises UserNotExistError if the user does not exist. Raises InvalidArgumentError if an argument is invalid, or
        if the user already has an entry for the resource.
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
        """Replace a user's policy entry for `resource`. Takes the arguments of `create_policy`. Raises
        UserNotExistError if the user does not exist, PolicyNotExistError if the user has no entry for the resource, or
        InvalidArgumentError if an argument is invalid."""
        entry = make_entry(resource, actions, decision, sources=sources)
        self._change_access(PutEntries(user, (entry,), is_new=False))

    def delete_policy(self, user: str, resource: str | None = None) -> None:
        """Delete a user's policy entry for `resource`, or all its entries if `resource` is None. Raises
        UserNotExistError if the user does not exist, or PolicyNotExistError if the user has no such entry."""
        self._change_access(DeleteEntries(user, None if resource is None else Pattern.parse(resource)))

    def _change_access(self, change: AccessChange) -> None:
        self._call_broker(USERS_BROKER, "change_access", change)


# the type is Any, because the fields of a JSON object have different types
def shown_user(user: UserDescription) -> dict[str, Any]:
    """Return a user as a JSON object, for the output of commands."""
    return {
        "name": user.name,
        "type": user.type,
        "status": user.status,
        **{bound: getattr(user, bound) for bound in BOUNDS},
        "policies": [entry.shown() for entry in user.policies],
    }
