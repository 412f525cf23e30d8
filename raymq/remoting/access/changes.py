"""Changes of the users and policies of a running raymq, as a client asks the broker that keeps them for one, and users
as that broker describes them.

A change holds keys where it sets a secret, and never the secret itself; a description has neither. `carry_out` is pure:
it makes the next state, or raises and leaves the one before. To repeat a change that was carried out changes nothing,
but a deletion says that there is nothing to delete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from raymq.remoting.access.policies import Entry, Pattern, PolicyType
from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import Bounds, User, UserStatus, UserType, check_bounds


@dataclass(frozen=True, slots=True)
class UserDescription:
    """A user as administrators see it. `type`: "Super" or "Normal"; `status`: "enable" or "disable"; the quotas are per
    second (raymq.remoting.access.users.Bounds), 0 for none; `policies`: its entries, in the order in which they were
    made."""

    name: str
    type: str
    status: str
    bytes_per_second: int
    messages_per_second: int
    policies: tuple[Entry, ...] = ()
    consume_bytes_per_second: int = 0
    consume_messages_per_second: int = 0


@dataclass(frozen=True, slots=True)
class CreateUser:
    """A new user."""

    user: User


@dataclass(frozen=True, slots=True)
class UpdateUser:
    """Other values for a user; None, and a quota that is not in `bounds`, stays as it is."""

    name: str
    key: bytes | None = field(default=None, repr=False)
    type: UserType | None = None
    status: UserStatus | None = None
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(frozen=True, slots=True)
class DeleteUser:
    """No such user any more, and none of its entries."""

    name: str


@dataclass(frozen=True, slots=True)
class PutEntries:
    """Entries for a user: new ones (`is_new`), or others in place of those of the same policy type and resource."""

    name: str
    entries: Sequence[Entry]
    is_new: bool


@dataclass(frozen=True, slots=True)
class DeleteEntries:
    """No entry of a user for `resource` any more, or with None none of that policy type."""

    name: str
    resource: Pattern | None = None
    policy_type: PolicyType = PolicyType.CUSTOM


AccessChange = CreateUser | UpdateUser | DeleteUser | PutEntries | DeleteEntries


def carry_out(state: AuthState, change: AccessChange) -> AuthState:
    """`state` with a change. InvalidArgumentError, UserNotExistError and PolicyNotExistError as AuthState's methods."""
    match change:
        case CreateUser(user):
            return state if state.users.get(user.name) == user else state.with_user(user, is_new=True)
        case UpdateUser(name):
            wanted = {
                "key": change.key,
                "type": change.type,
                "status": change.status,
            }
            new = {field_name: value for field_name, value in wanted.items() if value is not None}
            changed = replace(state.user(name), **new, **check_bounds(change.bounds))  # type: ignore[arg-type]  # as named
            return state.with_user(changed, is_new=False)
        case DeleteUser(name):
            return state.without_user(name)
        case PutEntries(name, entries, is_new):
            if set(entries) <= set(state.entries(name)):
                return state
            return state.with_entries(name, entries, is_new=is_new)
        case DeleteEntries(name, resource, policy_type):
            return state.without_entries(name, resource, policy_type)


def describe_users(state: AuthState) -> list[UserDescription]:
    """All users, sorted by name, without their keys."""
    return [
        UserDescription(user.name, user.type.value, user.status.value, policies=state.entries(name), **user.bounds)
        for name, user in sorted(state.users.items())
    ]


def changed_user(change: AccessChange) -> str:
    """The name of the user whom a change is about."""
    return change.user.name if isinstance(change, CreateUser) else change.name
