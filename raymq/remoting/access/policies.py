"""The contents of policies: actions, resources, the patterns that match resources, and entries (spec/features.md §8).

A resource is a topic, a group or a cluster with its name. An entry of a policy has a resource pattern, actions, client
addresses (sources; none means all) and a decision. A pattern is written ``Topic:orders`` (literal), ``Topic:orders*``
(prefix), ``Topic:*`` (any topic) or ``*`` (any resource).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from raymq.common.errors import InvalidArgumentError
from raymq.common.names import DLQ_PREFIX, INTERNAL_TOPIC_NAME_MAX, RETRY_PREFIX
from raymq.remoting.access.addresses import check_source, source_matches

SOURCES_MAX: Final = 100

_Value = TypeVar("_Value", bound=Enum)


class Action(Enum):
    """An action on a resource. In a policy entry, ALL means every action. ANY occurs only in the permissions that
    requests need, and is never stored in an entry."""

    ALL = "All"
    ANY = "Any"
    PUB = "Pub"
    SUB = "Sub"
    CREATE = "Create"
    UPDATE = "Update"
    DELETE = "Delete"
    GET = "Get"
    LIST = "List"


class ResourceType(Enum):
    """The kind of a resource. ANY is the kind of the pattern ``*``. SERVER is the kind of raymq's own resources, which
    no pattern matches."""

    ANY = "*"
    CLUSTER = "Cluster"
    TOPIC = "Topic"
    GROUP = "Group"
    SERVER = "Server"


class PolicyType(Enum):
    """The rank of a policy entry: CUSTOM entries decide first; DEFAULT entries decide if no custom entry
    matches."""

    CUSTOM = "Custom"
    DEFAULT = "Default"


class Decision(Enum):
    """Decision of a policy entry about the requests that the entry matches: allow or deny."""

    ALLOW = "Allow"
    DENY = "Deny"


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource to which permissions apply: one topic, group or cluster by name."""

    type: ResourceType
    name: str

    def __str__(self) -> str:
        return f"{self.type.value}:{self.name}"


@dataclass(frozen=True, slots=True)
class Need:
    """A permission that a request needs: at least one of `actions` on `resource`."""

    actions: tuple[Action, ...]
    resource: Resource

    def __str__(self) -> str:
        return f"{' or '.join(action.value for action in self.actions)} on {self.resource}"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of the resources to which a policy entry applies. A prefix pattern with an empty name matches every
    resource of its type."""

    type: ResourceType
    name: str = ""
    is_prefix: bool = True

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Parse a resource pattern: ``Topic:orders``, ``Topic:orders*``, ``Topic:*`` or ``*``. Raises
        InvalidArgumentError for any other text."""
        if text == "*":
            return cls(ResourceType.ANY)
        kind, colon, name = text.partition(":") if isinstance(text, str) else ("", "", "")
        known = {one.value: one for one in (ResourceType.CLUSTER, ResourceType.TOPIC, ResourceType.GROUP)}
        if not colon or kind not in known or not name or len(name) > INTERNAL_TOPIC_NAME_MAX:
            raise InvalidArgumentError(
                f"{text!r} is not a resource: write Topic:NAME, Group:NAME, Cluster:NAME, PREFIX* in place of "
                "NAME, or *"
            )
        if "*" in name[:-1]:
            raise InvalidArgumentError(f"{text!r} is not a resource: a * may stand at the end only")
        is_prefix = name.endswith("*")
        return cls(known[kind], name.removesuffix("*"), is_prefix)

    def __str__(self) -> str:
        if self.type is ResourceType.ANY:
            return "*"
        return f"{self.type.value}:{self.name}{'*' if self.is_prefix else ''}"

    def matches(self, resource: Resource) -> bool:
        """True if the pattern matches `resource`. No pattern matches raymq's own resources
        (ResourceType.SERVER)."""
        if resource.type is ResourceType.SERVER or self.type not in (ResourceType.ANY, resource.type):
            return False
        return resource.name.startswith(self.name) if self.is_prefix else resource.name == self.name

    @property
    def closeness(self) -> tuple[bool, bool, int]:
        """Sort key of how closely a pattern describes a resource. A closer pattern has a greater key.

        A pattern with a type is closer than ``*``, a literal is closer than a prefix, and a longer prefix is closer
        than a shorter one.
        """
        return self.type is not ResourceType.ANY, not self.is_prefix, len(self.name)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a policy. A user has at most one entry per policy type and resource pattern."""

    resource: Pattern
    actions: frozenset[Action]
    decision: Decision
    sources: tuple[str, ...] = ()
    policy_type: PolicyType = PolicyType.CUSTOM

    def matches(self, need: Need, address: str) -> bool:
        """True if the policy entry applies to the permission `need` for a request from `address` (empty if unknown).

        If the address is unknown, an ALLOW entry with sources does not apply, but a DENY entry does. So a client that
        hides its address never gains access.
        """
        if not self.resource.matches(need.resource):
            return False
        if not (self.actions & {Action.ALL, *need.actions} or Action.ANY in need.actions):
            return False
        if not self.sources:
            return True
        if not address:
            return self.decision is Decision.DENY
        return any(source_matches(source, address) for source in self.sources)

    def shown(self) -> dict[str, Any]:  # Any: a JSON object
        """Return the policy entry as a JSON object, for storage and for printing. `read_entry` reads this
        object."""
        return {
            "policy_type": self.policy_type.value,
            "resource": str(self.resource),
            "actions": [action.value for action in Action if action in self.actions],
            "sources": list(self.sources),
            "decision": self.decision.value,
        }


def make_entry(
    resource: str,
    actions: Iterable[str | Action],
    decision: str | Decision = Decision.ALLOW,
    *,
    sources: Iterable[str] = (),
    policy_type: str | PolicyType = PolicyType.CUSTOM,
) -> Entry:
    """Build a policy entry from command-line texts, in upper or lower case. Raises InvalidArgumentError if a text is
    not valid; the error names the text."""
    chosen = frozenset(_one_of(Action, action) for action in actions)
    if not chosen:
        raise InvalidArgumentError(f"a policy entry for {resource} needs an action, such as Pub or Sub")
    if Action.ANY in chosen:
        raise InvalidArgumentError("a policy entry cannot have the action Any: write All for every action")
    where = tuple(check_source(source) for source in sources)
    if len(where) > SOURCES_MAX:
        raise InvalidArgumentError(f"a policy entry may have at most {SOURCES_MAX} sources, not {len(where)}")
    return Entry(Pattern.parse(resource), chosen, _one_of(Decision, decision), where, _one_of(PolicyType, policy_type))


def read_entry(shown: dict[str, Any]) -> Entry:  # Any: a value of a JSON object
    """Decode a policy entry from the JSON object that `Entry.shown` returns. Raises InvalidArgumentError if the object
    is not a valid entry."""
    return make_entry(
        shown["resource"],
        shown["actions"],
        shown["decision"],
        sources=shown["sources"],
        policy_type=shown["policy_type"],
    )


def topic_resource(topic: str) -> Resource:
    """Return the resource whose permissions apply to a topic. A retry or dead-letter topic counts as its group
    (spec/features.md §7.3, §8)."""
    for prefix in RETRY_PREFIX, DLQ_PREFIX:
        if topic.startswith(prefix):
            return Resource(ResourceType.GROUP, topic.removeprefix(prefix))
    return Resource(ResourceType.TOPIC, topic)


def group_resource(group: str) -> Resource:
    """Return the resource whose permissions apply to a group."""
    return Resource(ResourceType.GROUP, group)


def _one_of(kind: type[_Value], text: str | _Value) -> _Value:
    if isinstance(text, kind):
        return text
    for one in kind:
        if isinstance(text, str) and one.value.lower() == text.lower():
            return one
    raise InvalidArgumentError(f"{text!r} is not one of {', '.join(one.value for one in kind)}")
