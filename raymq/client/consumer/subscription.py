"""Subscription selects the messages of a topic that a consumer wants: by tag, by a filter expression, or by a
predicate.

A filter expression is evaluated by the reader that finds the messages, in the store or in its mapped files. Tags are
checked twice, because two tags may share a hash code (spec/messaging.md §8). First, the tag codes in the consume queue
exclude messages without reading them. Then the tag's text is checked after the message is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from raymq.client.predicates.predicate import Predicate
from raymq.common.errors import InvalidArgumentError
from raymq.common.names import check_topic
from raymq.common.numbers import shown
from raymq.records.filters.sql import SqlFilter
from raymq.records.format.hashing import java_hash

ALL = "*"
Expression = str | SqlFilter | Predicate
"""A subscription expression: tags, a filter expression, or a predicate."""
Expressions = Expression | Mapping[str, Expression]
"""One subscription expression for all topics, or a separate expression for each topic."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """The subscription of one topic: the wanted tags, the filter expression `sql`, or the `predicate`. If `tags` is
    empty, no message is excluded by its tag, and `tag_codes` is None. `expression` is the text of the subscription."""

    topic: str
    expression: str
    tags: frozenset[str]
    tag_codes: frozenset[int] | None
    predicate: Predicate | None = None
    sql: str | None = None

    @classmethod
    def parse(cls, topic: str, expression: Expression | None = ALL) -> Subscription:
        """Create a subscription from ``"A || B"``, a filter expression or a predicate. None, the empty string and
        ``"*"`` select all messages.

        Raises IllegalNameError if the topic name is illegal, and InvalidArgumentError if an expression names no tag.
        """
        check_topic(topic)
        if isinstance(expression, Predicate):
            return cls(topic, expression.text, frozenset(), None, expression)
        if expression is None or expression in ("", ALL):
            return cls(topic, ALL, frozenset(), None)
        if isinstance(expression, SqlFilter):
            return cls(topic, expression.text, frozenset(), None, sql=expression.text)
        parts = expression.split("||") if isinstance(expression, str) else []
        tags = frozenset(tag for part in parts if (tag := part.strip()))
        if not tags:
            raise InvalidArgumentError(
                f'subscription expression {shown(expression)} contains no tag; write "paid || refunded", or "*" for all'
            )
        return cls(topic, expression, tags, frozenset(java_hash(tag) for tag in tags))

    def in_environment(self, runtime_env: Mapping[str, Any] | None) -> Subscription:
        """Return this subscription with its predicate set to run in `runtime_env`, unless the predicate has its own
        environment."""
        return self if self.predicate is None else replace(self, predicate=self.predicate.in_environment(runtime_env))

    @property
    def description(self) -> str:
        """The subscription's expression, for administrators and for comparison between group members. It is the sorted
        tags, or another expression with the name of its language."""
        if self.predicate is not None:
            return self.predicate.text
        if self.sql is not None:
            return f"SQL92: {self.sql}"
        return " || ".join(sorted(self.tags)) or ALL

    def matches(self, tags: str | None) -> bool:
        """True if a message with this tag text is wanted. This is the exact check, after the check of tag codes. Always
        True if the subscription has no tags: a filter expression or a predicate was checked when the message was found.
        """
        return not self.tags or tags in self.tags
