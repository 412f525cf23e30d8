"""AuthState: all users and policies of a raymq cluster, as one immutable value.

Every change (`with_user`, `without_user`, `with_entries`, `without_entries`) returns a new value with the next version,
or raises and leaves the old value unchanged. Servers get an AuthState when they start. `dump` converts the value to a
JSON object. Of two values, the one with the higher version is newer. Deleting a user deletes the user's policies. An
entry replaces an existing entry with an equal resource (spec/features.md §8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from raymq.common.errors import InvalidArgumentError, PolicyNotExistError, UserNotExistError
from raymq.common.namespaces import nearest_names
from raymq.remoting.access.policies import Entry, Pattern, PolicyType, read_entry
from raymq.remoting.access.users import BOUNDS, User, UserStatus, UserType, check_user

USERS_MAX: Final = 1000
ENTRIES_MAX: Final = 4000
"""Maximum number of policy entries of all users together. All users and entries are stored in one record. With this
limit the record is smaller than the maximum message size."""


@dataclass(frozen=True, slots=True)
class AuthState:
    """Users by name, and policy entries by user name. Immutable."""

    users: Mapping[str, User] = field(default_factory=lambda: MappingProxyType({}))
    policies: Mapping[str, tuple[Entry, ...]] = field(default_factory=lambda: MappingProxyType({}))
    version: int = 0

    def __reduce__(self) -> tuple[Any, ...]:  # Any: the return type of pickle's protocol
        # A mapping proxy cannot be pickled, so pickle this AuthState's users and policies as plain dicts.
        return _from_dicts, (dict(self.users), dict(self.policies), self.version)

    def user(self, name: str) -> User:
        """Return the user `name`. Raises UserNotExistError if no such user exists."""
        if name not in self.users:
            raise UserNotExistError(name, nearest_names(name, self.users))
        return self.users[name]

    def entries(self, name: str) -> tuple[Entry, ...]:
        """Return the policy entries of the user `name`; empty if the user has none. Raises UserNotExistError if no such
        user exists."""
        self.user(name)
        return self.policies.get(name, ())

    def with_user(self, user: User, *, is_new: bool) -> AuthState:
        """Return this state with `user` added (if `is_new`), or with `user` in place of the existing user of the same
        name.

        Raises InvalidArgumentError if a new user already exists, if there are too many users, or if no enabled super
        user would remain. Raises UserNotExistError if the user to update does not exist.
        """
        check_user(user)
        if is_new and user.name in self.users:
            raise InvalidArgumentError(f"user {user.name!r} exists already: change the user, or use another name")
        if not is_new:
            self.user(user.name)
        if is_new and len(self.users) >= USERS_MAX:
            raise InvalidArgumentError(f"there are already {USERS_MAX} users, the maximum: delete a user first")
        return self._changed({**self.users, user.name: user}, self.policies)

    def without_user(self, name: str) -> AuthState:
        """Return this state without the user `name` and without the user's policy entries.

        Raises UserNotExistError if no such user exists, and InvalidArgumentError if the user is the last enabled super
        user.
        """
        self.user(name)
        users = {one: user for one, user in self.users.items() if one != name}
        return self._changed(users, {one: entries for one, entries in self.policies.items() if one != name})

    def with_entries(self, name: str, entries: Iterable[Entry], *, is_new: bool | None = None) -> AuthState:
        """Return this state with the policy entries `entries` added for the user `name`. An entry replaces the existing
        entry of the same policy type and resource.

        If `is_new` is True, raises InvalidArgumentError if an entry already exists. If it is False, raises
        PolicyNotExistError if an entry does not exist. Raises UserNotExistError if the user does not exist, and
        InvalidArgumentError if there are too many entries.
        """
        kept = {(entry.policy_type, entry.resource): entry for entry in self.entries(name)}
        for entry in entries:
            place = entry.policy_type, entry.resource
            if is_new and place in kept:
                raise InvalidArgumentError(
                    f"user {name!r} already has a policy entry for {entry.resource}: update this entry"
                )
            if is_new is False and place not in kept:
                raise PolicyNotExistError(name, str(entry.resource))
            kept[place] = entry
        return self._changed(self.users, {**self.policies, name: tuple(kept.values())})

    def without_entries(
        self, name: str, resource: Pattern | None = None, policy_type: PolicyType = PolicyType.CUSTOM
    ) -> AuthState:
        """Return this state without the user's policy entry for `resource`. If `resource` is None, all of the user's
        entries of the policy type are removed.

        Raises UserNotExistError if the user does not exist, and PolicyNotExistError if no such entry exists.
        """
        before = self.entries(name)
        after = tuple(
            entry
            for entry in before
            if entry.policy_type is not policy_type or (resource is not None and entry.resource != resource)
        )
        if len(after) == len(before):
            raise PolicyNotExistError(name, "" if resource is None else str(resource))
        policies = {one: entries for one, entries in self.policies.items() if one != name}
        return self._changed(self.users, {**policies, name: after} if after else policies)

    def kept_at(self, now_ms: int) -> AuthState:
        """Return this state with a version that is higher than the version of any state from a file. A broker calls
        this method when it begins to store the state.

        The version of a state from a file is the number of its users and entries. The version of a stored state is the
        time in ms at which it was stored, or the previous version plus one.
        """
        return replace(self, version=max(self.version, now_ms))

    def with_owner(self, owner: User | None) -> AuthState:
        """Return this state with the super user `owner`, whom the settings define. `owner` replaces a user of the same
        name."""
        if owner is None or self.users.get(owner.name) == owner:
            return self
        return replace(self, users=MappingProxyType({**self.users, owner.name: owner}))

    def _changed(self, users: Mapping[str, User], policies: Mapping[str, tuple[Entry, ...]]) -> AuthState:
        count = sum(map(len, policies.values()))
        if count > ENTRIES_MAX:
            raise InvalidArgumentError(
                f"the change would make {count} policy entries; at most {ENTRIES_MAX} are allowed: join some "
                "entries with *"
            )
        if self.has_admin and not _has_admin(users):
            raise InvalidArgumentError("the change would leave no enabled super user, so nobody could undo it")
        return AuthState(MappingProxyType(dict(users)), MappingProxyType(dict(policies)), self.version + 1)

    @property
    def has_admin(self) -> bool:
        """True if the state has an enabled super user."""
        return _has_admin(self.users)

    def dump(self) -> dict[str, Any]:  # Any: a JSON object
        """Return the state as a JSON object for storage. The object contains the users' keys, so it must never be
        printed."""
        return {
            "version": self.version,
            "users": [{**user.shown(), "key": user.key.hex()} for user in self.users.values()],
            "policies": {name: [entry.shown() for entry in entries] for name, entries in self.policies.items()},
        }

    @classmethod
    def load(cls, dumped: Mapping[str, Any]) -> AuthState:  # Any: a value of a JSON object
        """Decode a state of users and policies from the JSON object that `dump` returned. Raises InvalidArgumentError
        if the object is not a valid state."""
        try:
            users = [_read_user(one) for one in dumped["users"]]
            policies = {name: tuple(map(read_entry, entries)) for name, entries in dumped["policies"].items()}
            version = int(dumped["version"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            # Name only the class of the original error, because the error's text may contain part of a user's key.
            raise InvalidArgumentError(f"users and policies cannot be read: {type(error).__name__}") from None
        return _from_dicts({user.name: user for user in users}, policies, version)


NO_USERS: Final = AuthState()


def _from_dicts(users: Mapping[str, User], policies: Mapping[str, tuple[Entry, ...]], version: int) -> AuthState:
    return AuthState(MappingProxyType(dict(users)), MappingProxyType(dict(policies)), version)


def _has_admin(users: Mapping[str, User]) -> bool:
    return any(user.is_super and user.is_enabled for user in users.values())


def _read_user(dumped: Mapping[str, Any]) -> User:
    return check_user(
        User(
            dumped["name"],
            bytes.fromhex(dumped["key"]),
            UserType(dumped["type"]),
            UserStatus(dumped["status"]),
            white_addresses=dumped["white_addresses"],
            # A state that raymq 0.1 stored has only the first two quotas of each user; missing quotas become 0 (no
            # limit).
            **{name: dumped.get(name, 0) for name in BOUNDS},
        )
    )
