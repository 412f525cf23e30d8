"""Subscription says which messages of a topic a consumer wants, by tag (spec/messaging.md §8.1).

The filter works twice: on the consume queue's tag codes, where messages are skipped without being read, and on the
tag's text once the message is decoded, because two tags may share a code.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymq.errors import InvalidArgumentError
from raymq.names import check_topic
from raymq.record.hashing import java_hash

ALL = "*"


@dataclass(frozen=True, slots=True)
class Subscription:
    """The wanted tags of one topic. Empty `tags` mean every message; `tag_codes` is None then."""

    topic: str
    expression: str
    tags: frozenset[str]
    tag_codes: frozenset[int] | None

    @classmethod
    def parse(cls, topic: str, expression: str | None = ALL) -> Subscription:
        """Read ``"A || B"``; None, the empty string and ``"*"`` mean everything.

        Raises IllegalNameError for the topic and InvalidArgumentError for an expression that names no tag.
        """
        check_topic(topic)
        if expression is None or expression in ("", ALL):
            return cls(topic, ALL, frozenset(), None)
        parts = expression.split("||") if isinstance(expression, str) else []
        tags = frozenset(tag for part in parts if (tag := part.strip()))
        if not tags:
            raise InvalidArgumentError(
                f'subscription expression {expression!r} names no tag; write "paid || refunded", or "*" for all'
            )
        return cls(topic, expression, tags, frozenset(java_hash(tag) for tag in tags))

    def matches(self, tags: str | None) -> bool:
        """True if a message with this tag text is wanted: the exact check behind the one on codes."""
        return not self.tags or tags in self.tags
