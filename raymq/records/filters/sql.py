"""`raymq.sql`: a condition on the properties of messages, in RocketMQ's dialect of SQL92."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raymq.records.filters.parser import compiled, property_names
from raymq.records.filters.plan import Truth
from raymq.records.filters.scalar import matches


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """A condition on messages' properties. Two with the same text are equal; it can be hashed and pickled.

    FilterExpressionError, with the position and the mend, if the text does not compile.
    """

    text: str

    def __post_init__(self) -> None:
        compiled(self.text)

    @property
    def plan(self) -> Truth:
        """The operations that decide."""
        return compiled(self.text)

    @property
    def names(self) -> tuple[str, ...]:
        """The properties that the condition looks at, each once."""
        return property_names(self.plan)

    def matches(self, properties: Mapping[str, str]) -> bool:
        """True if a message with these properties, the reserved ones such as TAGS and KEYS among them, passes."""
        return matches(self.plan, properties)

    def __str__(self) -> str:
        return self.text


def sql(text: str) -> SqlFilter:
    """A filter for `subscribe`, for scans and for jobs: ``raymq.sql("price > 5 AND region = 'eu'")``.

    The language: `=`, `<>`, `<`, `<=`, `>`, `>=`, [NOT] BETWEEN x AND y, [NOT] IN ('a', 'b'), [NOT] CONTAINS,
    STARTSWITH and ENDSWITH 'text', IS [NOT] NULL, NOT, AND, OR and brackets, over properties, numbers, texts in single
    quotes, TRUE and FALSE. A property that a message does not have is NULL.

    FilterExpressionError if the text does not compile.
    """
    return SqlFilter(text)
