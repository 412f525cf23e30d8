"""`raymq.sql`: a condition on the properties of messages, in RocketMQ's dialect of SQL92, and its evaluation for one
message.

This evaluation is the reference for columns.py, which evaluates many messages at once. Truth values are True, False,
and None for NULL. A message matches only if the condition is True.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raymq.records.filters.parser import compiled, property_names
from raymq.records.filters.plan import (
    And,
    Compare,
    Equal,
    Find,
    In,
    IsPresent,
    Literal,
    Name,
    Negative,
    Not,
    Operand,
    Or,
    TextTest,
    Truth,
    negative,
)
from raymq.records.filters.values import IncomparableError, Number, Value, compare, compare_as_doubles

Properties = Mapping[str, str]


def matches(plan: Truth, properties: Properties) -> bool:
    """True if the plan of a filter expression is TRUE for these properties. False if its evaluation raises an
    error."""
    try:
        return truth_of(plan, properties) is True
    except IncomparableError:
        return False


def truth_of(plan: Truth, properties: Properties) -> bool | None:
    """Return the truth value of a parsed filter expression (`plan`) for these message properties. Raises
    IncomparableError if RocketMQ's evaluation would raise an error."""
    value = value_of(plan, properties)
    assert value is None or isinstance(value, bool)
    return value


def value_of(plan: Operand, properties: Properties) -> Value:
    """Return the value of an operand for these message properties; for a condition, the truth value."""
    match plan:
        case Name(name):
            return properties.get(name)
        case Literal(value):
            return value
        case Equal(left, right):
            return equal_values(value_of(left, properties), value_of(right, properties))
        case Compare(order, left, right):
            comparison = _comparison(value_of(left, properties), value_of(right, properties))
            return None if comparison is None else order.holds(comparison)
        case And(operands):
            return _first(operands, properties, decisive=False)
        case Or(operands):
            return _first(operands, properties, decisive=True)
        case Not(operand):
            truth = truth_of(operand, properties)
            return None if truth is None else not truth
        case In(Name(name), texts):
            return properties[name] in texts if name in properties else None
        case Find(test, operand, text, negated):
            value = value_of(operand, properties)
            return isinstance(value, str) and text != "" and _finds(test, value, text) is not negated
        case IsPresent(Name(name)):
            return False if name in properties else None
        case Negative(operand):
            value = value_of(operand, properties)
            return negative(value) if isinstance(value, Number) else None


def equal_values(left: Value, right: Value) -> bool | None:
    """Evaluate `left = right`, also if a side is NULL. The result is NULL if only the left side is NULL, FALSE if only
    the right side is NULL, and TRUE if both sides are NULL."""
    if right is None:
        return left is None
    return None if left is None else compare(left, right) == 0


def _comparison(left: Value, right: Value) -> int | None:
    if left is None or right is None:
        return None
    if isinstance(left, str) and isinstance(right, str):
        return compare_as_doubles(left, right)
    return compare(left, right)


def _first(operands: tuple[Truth, ...], properties: Properties, *, decisive: bool) -> bool | None:
    """Evaluate an AND (`decisive` is False) or an OR (`decisive` is True). If an operand has the truth value
    `decisive`, returns this value, and does not evaluate later operands. Otherwise returns NULL if an operand is NULL,
    else the opposite of `decisive`."""
    result: bool | None = not decisive
    for operand in operands:
        truth = truth_of(operand, properties)
        if truth is decisive:
            return decisive
        if truth is None:
            result = None
    return result


def _finds(test: TextTest, value: str, text: str) -> bool:
    if test is TextTest.CONTAINS:
        return text in value
    return value.startswith(text) if test is TextTest.STARTSWITH else value.endswith(text)


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """A condition on messages' properties, for filters. Two conditions with the same text are equal. Hashable and
    picklable.

    Raises FilterExpressionError, with the position and the correction, if the text does not compile.
    """

    text: str

    def __post_init__(self) -> None:
        compiled(self.text)

    @property
    def plan(self) -> Truth:
        """The compiled form of this SQL condition: a tree of operations that decides if a message matches."""
        return compiled(self.text)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the properties in the filter expression; each name occurs once."""
        return property_names(self.plan)

    def matches(self, properties: Mapping[str, str]) -> bool:
        """True if a message with the given properties matches the condition. `properties` includes reserved properties
        such as TAGS and KEYS."""
        return matches(self.plan, properties)

    def __str__(self) -> str:
        return self.text


def sql(text: str) -> SqlFilter:
    """Create a filter for `subscribe`, for scans and for jobs: ``raymq.sql("price > 5 AND region = 'eu'")``.

    The language: `=`, `<>`, `<`, `<=`, `>`, `>=`, [NOT] BETWEEN x AND y, [NOT] IN ('a', 'b'), [NOT] CONTAINS,
    STARTSWITH and ENDSWITH 'text', IS [NOT] NULL, NOT, AND, OR and brackets, over properties, numbers, texts in single
    quotes, TRUE and FALSE. A property that a message does not have is NULL.

    Raises FilterExpressionError if the text does not compile.
    """
    return SqlFilter(text)
