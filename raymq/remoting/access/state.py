"""All users and policies of a raymq, as one value that is changed as a whole: AuthState.

Every change makes a new value with the next version (`with_user`, `without_user`, `with_entries`, `without_entries`),
or raises and leaves the old one. Servers are started with it; `dump` makes a JSON object of it. Of two values the one
with the higher version is the newer. Users that are deleted take their policies along; entries merge by equal resource
(spec/features.md §8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from raymq.common.errors import InvalidArgumentError, PolicyNotExistError, UserNotExistError
from raymq.remoting.access.policies import Entry, Pattern, PolicyType, read_entry
from raymq.remoting.access.users import BOUNDS, User, UserStatus, UserType, check_user

USERS_MAX: Final = 1000
ENTRIES_MAX: Final = 4000
"""Entries of all users together, so that the record of all of them stays below a message's greatest size."""


@dataclass(frozen=True, slots=True)
class AuthState:
    """Users by name, and their entries by the user's name. Never changed in place; equal values decide alike."""

    users: Mapping[str, User] = field(default_factory=lambda: MappingProxyType({}))
    policies: Mapping[str, tuple[Entry, ...]] = field(default_factory=lambda: MappingProxyType({}))
    version: int = 0

    def __reduce__(self) -> tuple[Any, ...]:  # Any: what pickle asks for
        # A mapping proxy cannot be pickled; a value travels to other actors as plain dicts.
        return _from_dicts, (dict(self.users), dict(self.policies), self.version)

    def user(self, name: str) -> User:
        """The user `name`. UserNotExistError."""
        if name not in self.users:
            raise UserNotExistError(name)
        return self.users[name]

    def entries(self, name: str) -> tuple[Entry, ...]:
        """The entries of the user `name`, empty if there are none. UserNotExistError."""
        self.user(name)
        return self.policies.get(name, ())

    def with_user(self, user: User, *, is_new: bool) -> AuthState:
        """This state with `user` created (`is_new`), or put in the place of the one of that name.

        InvalidArgumentError: there is one already, one too many, or the last enabled super user would be none;
        UserNotExistError: there is none to update.
        """
        check_user(user)
        if is_new and user.name in self.users:
            raise InvalidArgumentError(f"user {user.name!r} exists already: a name is there once")
        if not is_new:
            self.user(user.name)
        if is_new and len(self.users) >= USERS_MAX:
            raise InvalidArgumentError(f"there are {USERS_MAX} users, and no more are kept: delete one first")
        return self._changed({**self.users, user.name: user}, self.policies)

    def without_user(self, name: str) -> AuthState:
        """This state without the user `name` and its entries. UserNotExistError; InvalidArgumentError for the last
        enabled super user."""
        self.user(name)
        users = {one: user for one, user in self.users.items() if one != name}
        return self._changed(users, {one: entries for one, entries in self.policies.items() if one != name})

    def with_entries(self, name: str, entries: Iterable[Entry], *, is_new: bool | None = None) -> AuthState:
        """This state with `entries` for the user `name`, each in the place of the one of its policy type and resource.

        `is_new` True refuses entries that are there already, False those that are not. UserNotExistError,
        PolicyNotExistError, InvalidArgumentError.
        """
        kept = {(entry.policy_type, entry.resource): entry for entry in self.entries(name)}
        for entry in entries:
            place = entry.policy_type, entry.resource
            if is_new and place in kept:
                raise InvalidArgumentError(
                    f"user {name!r} has an entry for {entry.resource} already: a resource is there once"
                )
            if is_new is False and place not in kept:
                raise PolicyNotExistError(name, str(entry.resource))
            kept[place] = entry
        return self._changed(self.users, {**self.policies, name: tuple(kept.values())})

    def without_entries(
        self, name: str, resource: Pattern | None = None, policy_type: PolicyType = PolicyType.CUSTOM
    ) -> AuthState:
        """This state without the user's entry for `resource`, or without all of that policy type.

        UserNotExistError, PolicyNotExistError: there is none.
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
        """This state with a version that makes it newer than every state of a file: it is kept by a broker from now on.

        A file's version counts its users and entries; a kept one's is the time, or one more than that before."""
        return replace(self, version=max(self.version, now_ms))

    def with_owner(self, owner: User | None) -> AuthState:
        """This state with the super user of the settings as the settings have it, whatever it says of that user."""
        if owner is None or self.users.get(owner.name) == owner:
            return self
        return replace(self, users=MappingProxyType({**self.users, owner.name: owner}))

    def _changed(self, users: Mapping[str, User], policies: Mapping[str, tuple[Entry, ...]]) -> AuthState:
        count = sum(map(len, policies.values()))
        if count > ENTRIES_MAX:
            raise InvalidArgumentError(f"{count} entries of policies; at most {ENTRIES_MAX} are kept: join some with *")
        if self.has_admin and not _has_admin(users):
            raise InvalidArgumentError("this would leave no enabled super user, and nobody could undo it")
        return AuthState(MappingProxyType(dict(users)), MappingProxyType(dict(policies)), self.version + 1)

    @property
    def has_admin(self) -> bool:
        """True if an enabled super user is there."""
        return _has_admin(self.users)

    def dump(self) -> dict[str, Any]:  # Any: a JSON object
        """The state as a JSON object, keys included: it is kept, and never shown."""
        return {
            "version": self.version,
            "users": [{**user.shown(), "key": user.key.hex()} for user in self.users.values()],
            "policies": {name: [entry.shown() for entry in entries] for name, entries in self.policies.items()},
        }

    @classmethod
    def load(cls, dumped: Mapping[str, Any]) -> AuthState:  # Any: a JSON object
        """The state that `dump` made. InvalidArgumentError for one that cannot be."""
        try:
            users = [_read_user(one) for one in dumped["users"]]
            policies = {name: tuple(map(read_entry, entries)) for name, entries in dumped["policies"].items()}
            version = int(dumped["version"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            # The class only: a text of such an error may hold a piece of a key.
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
            **{name: dumped.get(name, 0) for name in BOUNDS},  # what was kept by 0.1 has only the first two
        )
    )
