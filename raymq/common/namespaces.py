"""Names of topics and groups within a namespace, as RocketMQ spells them (spec/features.md §9). Functions of text, and
`Namespace`, through which a client's names, queues and messages go.

A namespace keeps teams apart that use the same names: `orders` of namespace `team-a` is kept as `team-a%orders`. The
prefix of a retry, dead-letter or light-queue topic stays in front: `%RETRY%team-a%billing`. What belongs to the server
(system topics, replies to requests, groups of the system) has the same name in every namespace.

There is no state here and nothing to survive a crash: a wrapped name is the name under which everything is stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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
from raymq.common.names import DLQ_PREFIX, LMQ_PREFIX, RETRY_PREFIX, SYSTEM_GROUP_PREFIX, SYSTEM_PREFIX, is_system_topic

NAMESPACE_SEPARATOR: Final = "%"
"""Stands between a namespace and a name."""

_PREFIXES: Final = (RETRY_PREFIX, DLQ_PREFIX, LMQ_PREFIX)
_LEGAL_NAMESPACE: Final = re.compile(r"[|a-zA-Z0-9_-]+")


def check_namespace(namespace: str) -> str:
    """Return `namespace` if names can be wrapped in it and unwrapped again, else raise IllegalNameError.

    It has letters, digits and the characters ``| - _``, of which RocketMQ's names are made. A ``%`` would make its end
    unclear, and one that begins as system topics or groups do would have each of its names taken for the server's.
    """
    if not isinstance(namespace, str) or not namespace.strip():
        raise IllegalNameError("namespace", str(namespace), "it is blank")
    if not _LEGAL_NAMESPACE.fullmatch(namespace):
        raise IllegalNameError("namespace", namespace, "use letters, digits and the characters | - _")
    if namespace.startswith((SYSTEM_PREFIX, SYSTEM_GROUP_PREFIX)):
        raise IllegalNameError("namespace", namespace, "names of the system begin so: choose another beginning")
    return namespace


def wrap(namespace: str, name: str) -> str:
    """The name under which topic or group `name` of `namespace` is stored (spec/features.md §12.8, 145 to 151).

    An empty namespace or name, a name of the system, and one that is in this namespace already are given back as they
    are. Another namespace in `name` is not seen: it is wrapped once more. Of a retry, dead-letter or light-queue topic
    the part behind the prefix is wrapped, so that ``wrap(ns, retry_topic(g)) == retry_topic(wrap(ns, g))`` for every
    group, also those of the system.

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
    """`name` without its namespace (spec/features.md §12.8, 152 to 158); the prefix of a retry, dead-letter or
    light-queue topic stays.

    With `namespace` only that one is taken off, and names of others are given back as they are (so are all, if it is
    empty). Without it, everything up to the first ``%`` that is not the first character is taken for the namespace:
    a name that is in none, but has a ``%`` in it, is cut. Names of the system are given back as they are.

    >>> unwrap("team-a%orders"), unwrap("%DLQ%team-a%billing"), unwrap("team-a%orders", "team-b")
    ('orders', '%DLQ%billing', 'team-a%orders')
    """
    found = namespace_of(name)
    if not found or namespace not in (None, found):
        return name
    prefix, rest = _split(name)
    return prefix + rest[len(found) + len(NAMESPACE_SEPARATOR) :]


def namespace_of(name: str) -> str:
    """The namespace that topic or group `name` is in; empty for none and for names of the system.

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
    """Not `is_system_group`: RocketMQ wraps predefined groups, as TOOLS_CONSUMER, and leaves those of the prefix."""
    return is_system_topic(name) or name.startswith(SYSTEM_GROUP_PREFIX)


class Namespace:
    """One namespace as a client goes through it: names are wrapped on their way in, and unwrapped on their way out.

    The empty one changes nothing. A name that is in the namespace already is not wrapped again, so that it does no harm
    to wrap twice.
    """

    def __init__(self, name: str = "") -> None:
        """IllegalNameError for a name that no namespace can have."""
        self.name = check_namespace(name) if name else ""

    def __bool__(self) -> bool:
        """True if it changes names."""
        return bool(self.name)

    def __reduce__(self) -> tuple[type[Namespace], tuple[str]]:
        return Namespace, (self.name,)

    def wrap(self, name: str) -> str:
        """The name under which topic or group `name` is stored."""
        return wrap(self.name, name) if self.name and isinstance(name, str) else name

    def unwrap(self, name: str) -> str:
        """A stored name as users of this namespace know it; one of another namespace as it is."""
        return unwrap(name, self.name) if self.name else name

    def has(self, name: str) -> bool:
        """True if a stored name is in this namespace; all are in the empty one."""
        return not self.name or namespace_of(name) == self.name

    def queue(self, queue: MessageQueue) -> MessageQueue:
        """A queue as it is stored."""
        if not self.name or not isinstance(queue, MessageQueue):
            return queue  # what is no queue is for others to refuse
        return MessageQueue(wrap(self.name, queue.topic), queue.broker_name, queue.queue_id)

    def shown_queue(self, queue: MessageQueue) -> MessageQueue:
        """A stored queue as users of this namespace know it."""
        return MessageQueue(self.unwrap(queue.topic), queue.broker_name, queue.queue_id) if self.name else queue

    def shown_queues(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Stored queues, in their order, as users of this namespace know them."""
        return [self.shown_queue(queue) for queue in queues]

    def shown_messages(self, messages: list[MessageExt]) -> list[MessageExt]:
        """Messages whose topics are those that users of this namespace know. Nothing is decoded."""
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
        """One message, as `shown_messages`."""
        return self.shown_messages([message])[0]


NO_NAMESPACE: Final = Namespace()
"""The namespace of a client that names none."""


class _ShownMessages:
    """A source of messages with unwrapped topics. What it does not change is asked of the source behind it."""

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
"""The reserved properties that name a topic."""
