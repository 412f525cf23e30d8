"""Changes of users and policies in a running raymq, and descriptions of users. Clients send the changes to the broker
that stores the users.

A change that sets a secret contains the key derived from the secret, and never the secret itself. A description
contains neither. `carry_out` is pure: it returns the next state, or raises and leaves the old state unchanged.
Repeating a change has no effect, except that a repeated deletion raises, because the object no longer exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from raymq.remoting.access.policies import Entry, Pattern, PolicyType
from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import Bounds, User, UserStatus, UserType, check_bounds


@dataclass(frozen=True, slots=True)
class UserDescription:
    """Description of a user for administrators, without the user's key.

    `type`: "Super" or "Normal". `status`: "enable" or "disable". The quotas are per second
    (raymq.remoting.access.users.Bounds), 0 for no quota. `policies`: the user's entries, in the order of their
    creation.
    """

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
    """A change that creates a user."""

    user: User


@dataclass(frozen=True, slots=True)
class UpdateUser:
    """A change that updates a user. A field that is None, and a quota that is not in `bounds`, leave the user's value
    unchanged."""

    name: str
    key: bytes | None = field(default=None, repr=False)
    type: UserType | None = None
    status: UserStatus | None = None
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(frozen=True, slots=True)
class DeleteUser:
    """A change that deletes a user and all policy entries of the user."""

    name: str


@dataclass(frozen=True, slots=True)
class PutEntries:
    """A change that adds entries to a user's policies. If `is_new` is false, it replaces the entries with the same
    policy type and resource."""

    name: str
    entries: Sequence[Entry]
    is_new: bool


@dataclass(frozen=True, slots=True)
class DeleteEntries:
    """A change that deletes a user's policy entry for `resource`. If `resource` is None, it deletes all of the user's
    entries of the policy type."""

    name: str
    resource: Pattern | None = None
    policy_type: PolicyType = PolicyType.CUSTOM


AccessChange = CreateUser | UpdateUser | DeleteUser | PutEntries | DeleteEntries


def carry_out(state: AuthState, change: AccessChange) -> AuthState:
    """Return the access-control state after `change` is applied to `state`. Raises InvalidArgumentError,
    UserNotExistError and PolicyNotExistError like the methods of AuthState."""
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
    """Return descriptions of all users, sorted by name, without their keys."""
    return [
        UserDescription(user.name, user.type.value, user.status.value, policies=state.entries(name), **user.bounds)
        for name, user in sorted(state.users.items())
    ]


def changed_user(change: AccessChange) -> str:
    """Return the name of the user whom an access-control change affects."""
    return change.user.name if isinstance(change, CreateUser) else change.name
