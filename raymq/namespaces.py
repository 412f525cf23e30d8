"""Names of topics and groups within a namespace, as RocketMQ spells them (spec/features.md §9). Pure functions of text.

A namespace keeps teams apart that use the same names: `orders` of namespace `team-a` is kept as `team-a%orders`. The
prefix of a retry, dead-letter or light-queue topic stays in front: `%RETRY%team-a%billing`. What belongs to the server
(system topics, replies to requests, groups of the system) has the same name in every namespace.

There is no state here and nothing to survive a crash: a wrapped name is the name under which everything is stored.
"""

from __future__ import annotations

import re
from typing import Final

from raymq.errors import IllegalNameError
from raymq.names import DLQ_PREFIX, LMQ_PREFIX, RETRY_PREFIX, SYSTEM_GROUP_PREFIX, SYSTEM_PREFIX, is_system_topic

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
