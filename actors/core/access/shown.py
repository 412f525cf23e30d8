"""Reduces the lists that calls return to the entries that a user may see: topics and groups on which the user has some
permission.

A call that names its topic or group is allowed or rejected as a whole. A call for all topics or groups is allowed, and
this module reduces its answer, so that a user with a permission on one topic sees no other topic. This module defines
which answers are reduced; raymq.remoting.access.requests decides whether a call is allowed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class VisibleNames:
    """The names of the topics and groups that a user may see.

    `is_metered`: True if the amount that the user consumes is counted; the user must then not read the store's files
    directly.
    """

    topic: Callable[[str], bool]
    group: Callable[[str], bool]
    is_metered: bool = False


Cut = Callable[[Any, VisibleNames], Any]
"""A function that removes from one method's answer the topics and groups that the user may not see."""


def _topics(answer: list[str], visible: VisibleNames) -> list[str]:
    return [name for name in answer if visible.topic(name)]


def _groups(answer: list[str], visible: VisibleNames) -> list[str]:
    return [name for name in answer if visible.group(name)]


def _by_group(answer: Mapping[str, Any], visible: VisibleNames) -> dict[str, Any]:
    return {group: value for group, value in answer.items() if visible.group(group)}


def _producers(answer: list[Any], visible: VisibleNames) -> list[Any]:
    return [one for one in answer if visible.group(one.group)]


def _consumers(answer: list[Any], visible: VisibleNames) -> list[Any]:
    return [one for one in answer if visible.group(one.consumer.group)]


def _broker_status(answer: Mapping[str, Any], visible: VisibleNames) -> dict[str, Any]:
    unread = [one for one in answer["deleted_unread"] if visible.group(one["group"]) and visible.topic(one["topic"])]
    lists = {"topics": _topics(answer["topics"], visible), "groups": _groups(answer["groups"], visible)}
    return {**answer, **lists, "deleted_unread": unread}


def _pull_status(answer: Mapping[str, Any], visible: VisibleNames) -> dict[str, Any]:
    return {**answer, "instances": [one for one in answer["instances"] if visible.group(one["group"])]}


# Any: the answer is a StorageDescription, which this package must not import
def _description(answer: Any, visible: VisibleNames) -> Any:
    return replace(answer, in_place=False) if visible.is_metered else answer


CUTS: Final[Mapping[tuple[str, str], Cut]] = {
    ("NameServer", "topics"): _topics,
    ("Broker", "groups"): _groups,
    ("Broker", "group_topics"): _topics,
    ("Broker", "topic_offsets"): _by_group,
    ("Broker", "producer_connections"): _producers,
    ("Broker", "consumer_connections"): _consumers,
    ("Broker", "status"): _broker_status,
    ("Pull", "status"): _pull_status,
    ("Storage", "describe"): _description,
}
"""The functions that remove invisible topics and groups from answers, by server class and method name."""


# Any: the type of the answer depends on the method
def cut(server_class: str, method: str, answer: Any, visible: VisibleNames) -> Any:
    """Return a method's answer without the topics and groups that the user may not see."""
    how = CUTS.get((server_class, method))
    return answer if how is None else how(answer, visible)
