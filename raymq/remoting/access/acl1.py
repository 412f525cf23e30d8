"""Reads files of ACL 1.0 (RocketMQ's ``plain_acl.yml``) and converts them to the users and policies of ACL 2.0.

A file is a list of accounts with permissions on topics and groups, and of white-listed addresses (spec/features.md
§7.1). Every scalar is read as the text in the file, as in RocketMQ, whose own example has ``secretKey: 12345678``.

An account may send and consume as before, but the rules are evaluated in ACL 2.0's order (§7.3, 6 to 10). Each
permission of the account on a name becomes a custom ALLOW entry. If the account's default allows an action, but the
permission on a name does not, a default DENY entry for this name is added. The account's defaults become default
entries for ``Topic:*`` and ``Group:*``. DENY denies sending and consuming. An admin without permissions of its own
becomes a super user. An admin with such permissions may create, update and delete topics and groups. `left_out` lists
the settings that ACL 2.0 does not support. The module keeps no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Flag
from typing import Any, Final

import yaml

from raymq.common.errors import ConfigError, InvalidArgumentError
from raymq.common.names import RETRY_PREFIX, TRACE_TOPIC
from raymq.remoting.access.addresses import check_pattern
from raymq.remoting.access.policies import (
    Action,
    Decision,
    Entry,
    Pattern,
    PolicyType,
    Resource,
    ResourceType,
    topic_resource,
)
from raymq.remoting.access.users import SECRET_MIN_CHARACTERS, check_user_name

ACCESS_KEY_MIN_CHARACTERS: Final = 7

_FILE_KEYS: Final = frozenset(("globalWhiteRemoteAddresses", "accounts"))
_ACCOUNT_KEYS: Final = frozenset(
    (
        "accessKey",
        "secretKey",
        "whiteRemoteAddress",
        "admin",
        "defaultTopicPerm",
        "defaultGroupPerm",
        "topicPerms",
        "groupPerms",
    )
)


class Perm(Flag):
    """A permission of ACL 1.0: the bits DENY, PUB and SUB, with RocketMQ's values (golden fact 138)."""

    DENY = 1
    PUB = 4
    SUB = 8


_PERMS: Final = {
    "PUB": Perm.PUB,
    "SUB": Perm.SUB,
    "PUB|SUB": Perm.PUB | Perm.SUB,
    "SUB|PUB": Perm.PUB | Perm.SUB,
}
_ACTIONS: Final = ((Perm.PUB, Action.PUB), (Perm.SUB, Action.SUB))
_NONE: Final = Perm(0)
_BOTH: Final = Perm.PUB | Perm.SUB
_ADMINISTERS: Final = frozenset((Action.CREATE, Action.UPDATE, Action.DELETE))


def parse_perm(text: str | None) -> Perm:
    """Parse a permission in an ACL 1.0 file. As in RocketMQ, every unknown text means DENY (golden fact 138 of
    spec/features.md)."""
    return _PERMS.get((text or "").strip(), Perm.DENY)


@dataclass(frozen=True, slots=True)
class Account:
    """One account of an ACL 1.0 file. `own` maps resources to the account's permissions on them. The `repr` does not
    show the secret."""

    access_key: str
    secret_key: str = field(repr=False)
    white_address: str = ""
    is_admin: bool = False
    topic_default: Perm = Perm.DENY
    group_default: Perm = Perm.DENY
    own: Mapping[Resource, Perm] = field(default_factory=dict)

    @property
    def is_super(self) -> bool:
        """True if the account is a super user: an admin without permissions of its own (spec/features.md §7.3,
        9)."""
        return self.is_admin and not self.own

    def entries(self) -> tuple[Entry, ...]:
        """Return the account's permissions as policy entries of ACL 2.0; empty for a super user, who needs no
        policy."""
        if self.is_super:
            return ()
        defaults = {ResourceType.TOPIC: self.topic_default, ResourceType.GROUP: self.group_default}
        # Every account may send to the trace topic (spec/features.md §7.3, 6).
        trace = Resource(ResourceType.TOPIC, TRACE_TOPIC)
        own = {**self.own, trace: _allowed(self.own.get(trace, self.topic_default)) | Perm.PUB}
        made = []
        for resource, perm in own.items():
            pattern = Pattern(resource.type, resource.name, is_prefix=False)
            allowed = _allowed(perm)
            # The account's permission on this name may exclude some actions. A DENY entry refuses these actions.
            # Otherwise the account's default entries (built below) could allow them.
            denied = _BOTH if perm & Perm.DENY else _allowed(defaults[resource.type]) & ~allowed
            made += _entry(pattern, _actions(allowed), Decision.ALLOW, PolicyType.CUSTOM)
            made += _entry(pattern, _actions(denied), Decision.DENY, PolicyType.DEFAULT)
        for kind, perm in defaults.items():
            actions = _actions(_allowed(perm)) | (_ADMINISTERS if self.is_admin else frozenset())
            made += _entry(Pattern(kind), actions, Decision.ALLOW, PolicyType.DEFAULT)
        return tuple(made)


@dataclass(frozen=True, slots=True)
class Acl1:
    """The contents of ACL 1.0 files. `left_out` describes the settings that the conversion to ACL 2.0 omits, one
    sentence per item."""

    accounts: tuple[Account, ...] = ()
    white_list: tuple[str, ...] = ()
    unknown_keys: tuple[str, ...] = ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sentences that describe which settings of the ACL 1.0 files are missing in the converted users and
        policies."""
        found = []
        if self.white_list:
            found.append(f"globalWhiteRemoteAddresses ({', '.join(self.white_list)}): every request needs a user")
        found += [
            f"whiteRemoteAddress of {one.access_key} ({one.white_address}): every request needs a signature"
            for one in self.accounts
            if one.white_address
        ]
        found += [
            f"the admin {one.access_key} has its own permissions, so it cannot change settings of brokers"
            for one in self.accounts
            if one.is_admin and not one.is_super
        ]
        return (*found, *(f"{key}: ACL 1.0 does not have this key" for key in self.unknown_keys))

    def users_file(self) -> str:
        """Return the converted users and policies as the text of a file for the setting `access.users_file`. The text
        contains the secrets."""
        users = [
            {
                "name": one.access_key,
                "secret": one.secret_key,
                "type": "Super" if one.is_super else "Normal",
                "policies": [entry.shown() for entry in one.entries()],
            }
            for one in self.accounts
        ]
        return yaml.safe_dump({"users": users}, sort_keys=False, allow_unicode=True, width=120)


def read_acl1(texts: Iterable[tuple[str, str]]) -> Acl1:
    """Parse ACL 1.0 files. `texts`: the name and the text of each file. Errors contain the file's name.

    If several accounts have the same access key, only the first of these accounts is used (spec/features.md §7.1).
    Raises ConfigError if RocketMQ also refuses the file, or if an access key is not allowed as a user name. The error
    names the position in the file, and never a secret.
    """
    accounts: dict[str, Account] = {}
    white_list: list[str] = []
    unknown: list[str] = []
    for name, text in texts:
        content = _load(name, text)
        unknown += [f"{name}: {key}" for key in content if key not in _FILE_KEYS]
        try:
            white_list += [check_pattern(one) for one in _list(content, "globalWhiteRemoteAddresses")]
            listed = _list(content, "accounts")
        except InvalidArgumentError as error:
            raise ConfigError(f"{name}: {error}") from None
        for number, values in enumerate(listed, 1):
            try:
                account = _account(values)
            except InvalidArgumentError as error:
                raise ConfigError(f"{name}: account {number}: {error}") from None
            unknown += [f"{name}: account {number}: {key}" for key in values if key not in _ACCOUNT_KEYS]
            accounts.setdefault(account.access_key, account)
    if not accounts:
        raise ConfigError("the accounts are missing: a file of ACL 1.0 has a list of accounts under `accounts`")
    return Acl1(tuple(accounts.values()), tuple(dict.fromkeys(white_list)), tuple(unknown))


def _load(name: str, text: str) -> dict[str, Any]:  # Any: untyped YAML values
    try:
        content = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        raise ConfigError(f"{name} is not YAML{('' if where is None else f' (line {where.line + 1})')}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{name} is not a file of ACL 1.0: such a file must have the key `accounts`")
    return content


def _account(values: Any) -> Account:  # Any: an untyped YAML value
    if not isinstance(values, dict):
        raise InvalidArgumentError("an account must have an accessKey and a secretKey")
    key, secret = _text(values, "accessKey"), _text(values, "secretKey")
    if len(key) < ACCESS_KEY_MIN_CHARACTERS or len(secret) < SECRET_MIN_CHARACTERS:
        raise InvalidArgumentError(
            f"accessKey must have at least {ACCESS_KEY_MIN_CHARACTERS} characters, and secretKey"
            f" {SECRET_MIN_CHARACTERS}"
        )
    own = dict(_perm(text, topic_resource) for text in _list(values, "topicPerms"))
    own.update(_perm(text, _group) for text in _list(values, "groupPerms"))
    return Account(
        check_user_name(key),
        secret,
        check_pattern(_text(values, "whiteRemoteAddress")),
        _text(values, "admin").strip().lower() == "true",
        parse_perm(_text(values, "defaultTopicPerm")),
        parse_perm(_text(values, "defaultGroupPerm")),
        own,
    )


def _group(name: str) -> Resource:
    return Resource(ResourceType.GROUP, name.removeprefix(RETRY_PREFIX))


# Both parameters are Any: `text` is a YAML value of unknown type, and `to_resource` is a function that converts a name
# to a Resource.
def _perm(text: Any, to_resource: Any) -> tuple[Resource, Perm]:
    parts = text.split("=") if isinstance(text, str) else []
    if len(parts) != 2:
        raise InvalidArgumentError(f"{text!r} must be NAME=PERM, such as orders=PUB|SUB")
    resource = to_resource(parts[0].strip())
    Pattern.parse(str(resource))  # Reject a name that cannot be used in a policy entry (raises InvalidArgumentError).
    if resource.name.endswith("*"):
        raise InvalidArgumentError(
            f"{text!r} contains a *: ACL 1.0 has no prefixes, and names of topics and groups cannot contain a *"
        )
    return resource, parse_perm(parts[1])


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key, "")
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{key} must be a single value")
    return "" if value in ("null", "~") else value


def _list(values: Mapping[str, Any], key: str) -> list[Any]:
    value = values.get(key, "")
    if value in ("", "null", "~"):
        return []
    if not isinstance(value, list):
        raise InvalidArgumentError(f"{key} must be a list")
    return value


def _allowed(perm: Perm) -> Perm:
    return _NONE if perm & Perm.DENY else perm & _BOTH


def _actions(perm: Perm) -> frozenset[Action]:
    return frozenset(action for bit, action in _ACTIONS if perm & bit)


def _entry(pattern: Pattern, actions: frozenset[Action], decision: Decision, policy_type: PolicyType) -> list[Entry]:
    return [Entry(pattern, actions, decision, (), policy_type)] if actions else []
