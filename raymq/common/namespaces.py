"""Names of topics and groups within a namespace, in RocketMQ's spelling (spec/features.md §9).

A namespace separates teams that use the same names: topic `orders` of namespace `team-a` is stored as `team-a%orders`.
In the name of a retry, dead-letter or light-queue topic, the namespace follows the prefix: `%RETRY%team-a%billing`.
Names of the server (system topics, replies to requests, system groups) are the same in every namespace.

The module's functions convert text. `Namespace` converts a client's names, queues and messages. The module has no
state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final

from raymq.common.errors import IllegalNameError
from raymq.common.message import (
    PROPERTY_INNER_MULTI_DISPATCH,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RETRY_TOPIC,
    MessageExt,
    MessageQueue,
    MessageSource,
)
from raymq.common.names import (
    DLQ_PREFIX,
    LMQ_PREFIX,
    RETRY_PREFIX,
    SYSTEM_GROUP_PREFIX,
    SYSTEM_PREFIX,
    is_internal_topic,
    is_system_topic,
)

NAMESPACE_SEPARATOR: Final = "%"
"""The separator between a namespace and the name of a topic or group."""

_PREFIXES: Final = (RETRY_PREFIX, DLQ_PREFIX, LMQ_PREFIX)
_LEGAL_NAMESPACE: Final = re.compile(r"[|a-zA-Z0-9_-]+")


def check_namespace(namespace: str) -> str:
    """Return `namespace` if it is a legal namespace, else raise IllegalNameError.

    A namespace has letters, digits and the characters ``| - _``. A ``%`` would make the end of the namespace ambiguous.
    If a namespace had the prefix of system topics or system groups, each name in it would look like a system name.
    """
    if not isinstance(namespace, str) or not namespace.strip():
        raise IllegalNameError("namespace", str(namespace), "the name is blank")
    if not _LEGAL_NAMESPACE.fullmatch(namespace):
        raise IllegalNameError("namespace", namespace, "use letters, digits and the characters | - _")
    if namespace.startswith((SYSTEM_PREFIX, SYSTEM_GROUP_PREFIX)):
        raise IllegalNameError(
            "namespace", namespace, "names that begin like this are reserved for the system: choose another beginning"
        )
    return namespace


def wrap(namespace: str, name: str) -> str:
    """Return the name under which topic or group `name` of `namespace` is stored (spec/features.md §12.8, 145 to 151).

    `name` is returned unchanged if the namespace or the name is empty, if the name belongs to the server, or if the
    name is already in this namespace. If a name is in another namespace, `namespace` is added before it. In a retry,
    dead-letter or light-queue topic, the namespace is added after the prefix. So ``wrap(ns, retry_topic(g)) ==
    retry_topic(wrap(ns, g))`` for every group, even a system group.

    >>> wrap("team-a", "orders"), wrap("team-a", "%RETRY%billing"), wrap("team-a", "SCHEDULE_TOPIC_XXXX")
    ('team-a%orders', '%RETRY%team-a%billing', 'SCHEDULE_TOPIC_XXXX')
    """
    if not namespace or not name:
        return name
    prefix, rest = _split(name)
    if _is_system(rest) or rest.startswith(namespace + NAMESPACE_SEPARATOR):
        return name
    return f"{prefix}{namespace}{NAMESPACE_SEPARATOR}{rest}"


def unwrap(name: str, namespace: str | None = None) -> str:
    """Return `name` without its namespace (spec/features.md §12.8, 152 to 158). The prefix of a retry, dead-letter or
    light-queue topic is kept.

    If `namespace` is given, only this namespace is removed; an empty `namespace` removes nothing. If `namespace` is
    None, everything up to the first ``%`` that is not the first character counts as the namespace. So a name that
    contains a ``%`` but has no namespace is truncated. Names of the server are returned unchanged.

    >>> unwrap("team-a%orders"), unwrap("%DLQ%team-a%billing"), unwrap("team-a%orders", "team-b")
    ('orders', '%DLQ%billing', 'team-a%orders')
    """
    found = namespace_of(name)
    if not found or namespace not in (None, found):
        return name
    prefix, rest = _split(name)
    return prefix + rest[len(found) + len(NAMESPACE_SEPARATOR) :]


def namespace_of(name: str) -> str:
    """Return the namespace of topic or group `name`; empty if the name has no namespace or belongs to the server.

    >>> namespace_of("%RETRY%team-a%billing"), namespace_of("orders")
    ('team-a', '')
    """
    _, rest = _split(name)
    if _is_system(rest):
        return ""
    found, separator, _ = rest.partition(NAMESPACE_SEPARATOR)
    return found if separator else ""


def _split(name: str) -> tuple[str, str]:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name


def _is_system(name: str) -> bool:
    """True if RocketMQ adds no namespace to `name`. The result differs from `is_system_group`: RocketMQ adds a
    namespace to predefined groups such as TOOLS_CONSUMER, but not to groups with the system prefix."""
    return is_system_topic(name) or name.startswith(SYSTEM_GROUP_PREFIX)


NAMES_COMPARED_MAX: Final = 10_000
"""Maximum number of names that `nearest_names` compares. It bounds the time to less than a second."""
NEAREST_MAX: Final = 3
_COMPARED_CHARACTERS: Final = 255


def nearest_names(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return up to three of the names `known` that a user who wrote `name` may have meant, the most similar first.

    Only names of the same namespace are returned, and no topics of the server. Upper and lower case are equal. The
    caller must pass only names that the user may see.

    >>> nearest_names("team-a%ordrs", ["orders", "team-a%orders", "%DLQ%team-a%orders"])
    ('team-a%orders',)
    """
    home = namespace_of(name)
    candidates = (one for one in known if namespace_of(one) == home and one != name and not is_internal_topic(one))
    by_text: dict[str, list[str]] = {}
    for one in islice(candidates, NAMES_COMPARED_MAX):
        by_text.setdefault(unwrap(one, home).casefold(), []).append(one)
    wanted = unwrap(name, home).casefold()[:_COMPARED_CHARACTERS]
    found = get_close_matches(wanted, list(by_text), NEAREST_MAX)
    return tuple(one for text in found for one in by_text[text])[:NEAREST_MAX]


class Namespace:
    """Adds one namespace to a client's names, and removes the namespace from the names that the client sees.

    The empty namespace changes nothing. A name that is already in the namespace is not changed again.
    """

    def __init__(self, name: str = "") -> None:
        """`name`: the namespace's name; empty for no namespace. Raises IllegalNameError if it is not a legal
        namespace."""
        self.name = check_namespace(name) if name else ""

    def __bool__(self) -> bool:
        """True if this is a real namespace, whose names have a prefix. False for the empty namespace, which leaves
        names unchanged."""
        return bool(self.name)

    def __reduce__(self) -> tuple[type[Namespace], tuple[str]]:
        return Namespace, (self.name,)

    def wrap(self, name: str) -> str:
        """Return the name under which topic or group `name` of this namespace is stored."""
        return wrap(self.name, name) if self.name and isinstance(name, str) else name

    def unwrap(self, name: str) -> str:
        """Return a stored name without the namespace, as users of this namespace see the name. A name in another
        namespace is returned unchanged."""
        return unwrap(name, self.name) if self.name else name

    def has(self, name: str) -> bool:
        """True if the stored name `name` is in this namespace. The empty namespace contains all names."""
        return not self.name or namespace_of(name) == self.name

    def queue(self, queue: MessageQueue) -> MessageQueue:
        """Return the stored queue for a queue that a user of this namespace names: its topic name then contains the
        namespace."""
        if not self.name or not isinstance(queue, MessageQueue):
            return queue  # `queue` is not a MessageQueue: return it unchanged, so that the caller refuses it
        return MessageQueue(wrap(self.name, queue.topic), queue.broker_name, queue.queue_id)

    def shown_queue(self, queue: MessageQueue) -> MessageQueue:
        """Convert a queue from the store's topic name to the name that users of this namespace see."""
        return MessageQueue(self.unwrap(queue.topic), queue.broker_name, queue.queue_id) if self.name else queue

    def shown_queues(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Return queues with the topic names that users of this namespace see. `queues` contain the stored topic names;
        the order stays the same."""
        return [self.shown_queue(queue) for queue in queues]

    def shown_messages(self, messages: list[MessageExt]) -> list[MessageExt]:
        """Return messages whose topics have the names that users of this namespace see. Decodes no message."""
        if not self.name:
            return messages
        shown: list[MessageExt] = []
        known: MessageSource | None = None
        source: MessageSource | None = None
        for message in messages:
            if message._source is not known or source is None:
                known, source = message._source, _ShownMessages(message._source, self.name)
            shown += MessageExt.of_source(source, (message._index,))
        return shown

    def shown_message(self, message: MessageExt) -> MessageExt:
        """Return `message` with the topic that users of this namespace see, without the namespace."""
        return self.shown_messages([message])[0]


NO_NAMESPACE: Final = Namespace()
"""The empty namespace, for clients without a namespace."""


class _ShownMessages:
    """Wraps a source of messages, and removes the namespace from the topics' names. All other fields are returned as
    the wrapped source has them."""

    def __init__(self, source: MessageSource, namespace: str) -> None:
        self._source: Any = source
        self._namespace = namespace
        self.body, self.queue_offset = source.body, source.queue_offset

    def topic(self, index: int) -> str:
        return unwrap(self._source.topic(index), self._namespace)

    def system_properties(self, index: int) -> dict[str, str]:
        found = dict(self._source.system_properties(index))
        for name in _TOPIC_PROPERTIES & found.keys():
            found[name] = unwrap(found[name], self._namespace)
        if PROPERTY_INNER_MULTI_DISPATCH in found:
            names = found[PROPERTY_INNER_MULTI_DISPATCH].split(",")
            found[PROPERTY_INNER_MULTI_DISPATCH] = ",".join(unwrap(name, self._namespace) for name in names)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


_TOPIC_PROPERTIES: Final = {PROPERTY_RETRY_TOPIC, PROPERTY_REAL_TOPIC, "DLQ_ORIGIN_TOPIC"}
"""The reserved properties whose value is the name of a topic."""
