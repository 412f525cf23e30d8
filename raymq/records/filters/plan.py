"""The plan of a filter expression: a tree of operations that decide if a message matches.

Truths (`Truth`) are TRUE, FALSE or NULL; operands (`Operand`) are values. The functions below raise `RefusedError` for
expressions that RocketMQ's parser refuses although its grammar allows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from raymq.records.filters.values import Number, Value, ValueKind, compare


class RefusedError(Exception):
    """A combination of operator and operands that RocketMQ does not compile. Its text has the reason and the
    correction."""


class Order(Enum):
    """An order operator."""

    GREATER = ">"
    GREATER_OR_EQUAL = ">="
    LESS = "<"
    LESS_OR_EQUAL = "<="

    def holds(self, comparison: int) -> bool:
        """True if the operator holds for this result of `compare`."""
        if self is Order.GREATER:
            return comparison > 0
        if self is Order.GREATER_OR_EQUAL:
            return comparison >= 0
        return comparison < 0 if self is Order.LESS else comparison <= 0


class TextTest(Enum):
    """An operator that searches a text in another text."""

    CONTAINS = "CONTAINS"
    STARTSWITH = "STARTSWITH"
    ENDSWITH = "ENDSWITH"


@dataclass(frozen=True, slots=True)
class Name:
    """A property's value; NULL if the message does not have the property."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant. TRUE, FALSE and NULL are also truths."""

    value: Value


@dataclass(frozen=True, slots=True)
class Negative:
    """A number with the opposite sign; NULL if the operand is no number."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Equal:
    """`left = right`. IS NULL is `left = NULL`."""

    left: Operand
    right: Operand


@dataclass(frozen=True, slots=True)
class Compare:
    """`left > right` and similar comparisons."""

    order: Order
    left: Operand
    right: Operand


@dataclass(frozen=True, slots=True)
class In:
    """`name IN (texts)`."""

    name: Name
    texts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Find:
    """`operand [NOT] CONTAINS 'text'` and similar searches. They are never NULL: for an operand that is no text, both
    forms are FALSE."""

    test: TextTest
    operand: Operand
    text: str
    negated: bool


@dataclass(frozen=True, slots=True)
class IsPresent:
    """A name in place of a truth: NULL if the message does not have the property, else FALSE for any text."""

    name: Name


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite truth; NULL stays NULL."""

    operand: Truth


@dataclass(frozen=True, slots=True)
class And:
    """FALSE if an operand is FALSE, else NULL if one is NULL. Operands after the first FALSE are not evaluated."""

    operands: tuple[Truth, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """TRUE if an operand is TRUE, else NULL if one is NULL. Operands after the first TRUE are not evaluated."""

    operands: tuple[Truth, ...]


Truth = Equal | Compare | In | Find | IsPresent | Not | And | Or | Literal
Operand = Name | Negative | Truth

_ORDERED_NUMBERS = "only numbers have an order: write the number without quotes, as in price > 5"


def truth(operand: Operand) -> Truth:
    """Return an operand of AND, OR or NOT, or the whole expression, as a truth."""
    if isinstance(operand, Name):
        return IsPresent(operand)
    if isinstance(operand, Negative):
        raise RefusedError("a number is neither true nor false: compare it, as in price = 5")
    if isinstance(operand, Literal) and isinstance(operand.value, str | Number):
        raise RefusedError("a literal alone is neither true nor false: compare it with a property, as in price = 5")
    return operand


def both(left: Operand, right: Operand) -> And:
    """`left AND right`."""
    first = truth(left)
    return And((*(first.operands if isinstance(first, And) else (first,)), truth(right)))


def either(left: Operand, right: Operand) -> Or:
    """`left OR right`."""
    first = truth(left)
    return Or((*(first.operands if isinstance(first, Or) else (first,)), truth(right)))


def equal(left: Operand, right: Operand) -> Equal:
    """`left = right`."""
    for side in (left, right):
        if isinstance(side, Literal) and side.value is None:
            raise RefusedError("nothing equals NULL: write IS NULL or IS NOT NULL")
    match left, right:
        case Literal(bool()), Literal(str() | Number()):
            raise RefusedError("TRUE or FALSE cannot be compared with another kind of literal")
    return Equal(left, right)


def is_null(operand: Operand) -> Equal:
    """`operand IS NULL`."""
    return Equal(operand, Literal(None))


def ordered(order: Order, left: Operand, right: Operand) -> Compare:
    """`left > right` and similar comparisons."""
    for side in (left, right):
        if isinstance(side, Literal):
            if not isinstance(side.value, Number):
                raise RefusedError(_ORDERED_NUMBERS)
        elif not isinstance(side, Name | Negative):
            raise RefusedError("true and false have no order: combine comparisons with AND or OR")
    return Compare(order, left, right)


def between(operand: Operand, low: Operand, high: Operand) -> And:
    """`operand BETWEEN low AND high`."""
    plan = And((ordered(Order.GREATER_OR_EQUAL, operand, low), ordered(Order.LESS_OR_EQUAL, operand, high)))
    if isinstance(low, Literal) and isinstance(high, Literal) and compare(low.value, high.value) > 0:
        raise RefusedError("the range is empty: write the lower number first")
    return plan


def not_between(operand: Operand, low: Operand, high: Operand) -> Or:
    """`operand NOT BETWEEN low AND high`."""
    return Or((ordered(Order.LESS, operand, low), ordered(Order.GREATER, operand, high)))


def one_of(operand: Operand, texts: frozenset[str]) -> In:
    """`operand IN (texts)`."""
    if not isinstance(operand, Name):
        raise RefusedError("only a property can be IN a list: write region IN ('eu', 'us')")
    return In(operand, texts)


def negative(number: Number) -> Number:
    """Return the number with the opposite sign, of the same type."""
    if number.kind is ValueKind.DOUBLE:
        return Number(-number.value, number.kind)
    bits = 32 if number.kind is ValueKind.INTEGER else 64
    return Number((int(-number.value) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1), number.kind)


def children(node: Operand) -> tuple[Operand, ...]:
    """Return the operands of a node."""
    if isinstance(node, And | Or):
        return node.operands
    if isinstance(node, Equal | Compare):
        return (node.left, node.right)
    if isinstance(node, Negative | Not | Find):
        return (node.operand,)
    return (node.name,) if isinstance(node, In | IsPresent) else ()


def walk(plan: Operand) -> Iterator[tuple[Operand, int]]:
    """Yield all nodes of a plan, each with its depth from 1. It uses no recursion, so any depth is allowed."""
    left: list[tuple[Operand, int]] = [(plan, 1)]
    while left:
        node, depth = left.pop()
        yield node, depth
        left += [(child, depth + 1) for child in reversed(children(node))]
