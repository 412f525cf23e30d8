"""Parses a filter expression in RocketMQ's dialect of SQL92 conditions into a plan.

The grammar is RocketMQ's, with two differences. Tokens after a complete expression are an error; RocketMQ ignores them
(RocketMQ reads `a like 'x%'` as `a`). An expression has a maximum length and a maximum depth.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache
from math import isinf
from typing import Final

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

from raymq.common.errors import FilterExpressionError
from raymq.common.numbers import shown
from raymq.records.filters import plan
from raymq.records.filters.plan import Literal, Name, Negative, Not, Operand, Order, RefusedError, TextTest, Truth
from raymq.records.filters.values import INTEGER_MAX, LONG_MAX, Number, ValueKind

TEXT_MAX: Final = 32_767
"""Maximum length of a filter expression, in characters."""
DEPTH_MAX: Final = 100
"""Maximum nesting depth of operators in a filter expression. A chain of ANDs or ORs counts as one level."""
_CACHED: Final = 100
_SURROGATE: Final = re.compile("[\ud800-\udfff]")

GRAMMAR: Final = r"""
start: disjunction
?disjunction: conjunction | disjunction OR conjunction -> either
?conjunction: equality | conjunction AND equality -> both
?equality: comparison
    | equality EQUAL comparison -> equal
    | equality UNEQUAL comparison -> unequal
    | equality IS NULL -> is_null
    | equality IS NOT NULL -> is_not_null
?comparison: unary
    | comparison ORDER unary -> ordered
    | comparison FIND TEXT -> find
    | comparison NOT FIND TEXT -> find_not
    | comparison BETWEEN unary AND unary -> between
    | comparison NOT BETWEEN unary AND unary -> not_between
    | comparison IN _OPEN TEXT (_COMMA TEXT)* _CLOSE -> one_of
    | comparison NOT IN _OPEN TEXT (_COMMA TEXT)* _CLOSE -> not_one_of
?unary: _PLUS unary
    | MINUS unary -> negative
    | NOT unary -> negation
    | TRUE -> true
    | FALSE -> false
    | NULL -> null
    | INTEGER -> integer
    | FLOAT -> double
    | TEXT -> text
    | NAME -> name
    | _OPEN disjunction _CLOSE

// The longest token wins: a float before an integer, a comment before a minus, a name before the keyword in it.
BLANKS.9: /[ \t\n\r\f]+/
LINE_COMMENT.9: /--[^\n\r]*(\r\n|\n|\r)/
BLOCK_COMMENT.9: /\/\*(.|[\n\r])*?\*\//
FLOAT.8: /([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+/
INTEGER.7: /0|[1-9][0-9]*[lL]?/
TEXT.7: /'([^']|'')*'/
NOT.6: /NOT(?![A-Za-z0-9_$])/i
AND.6: /AND(?![A-Za-z0-9_$])/i
OR.6: /OR(?![A-Za-z0-9_$])/i
BETWEEN.6: /BETWEEN(?![A-Za-z0-9_$])/i
IN.6: /IN(?![A-Za-z0-9_$])/i
TRUE.6: /TRUE(?![A-Za-z0-9_$])/i
FALSE.6: /FALSE(?![A-Za-z0-9_$])/i
NULL.6: /NULL(?![A-Za-z0-9_$])/i
IS.6: /IS(?![A-Za-z0-9_$])/i
FIND.6: /(CONTAINS|STARTSWITH|ENDSWITH)(?![A-Za-z0-9_$])/i
NAME.5: /[A-Za-z_$][A-Za-z0-9_$]*/
UNEQUAL.4: "<>"
ORDER.3: />=|<=|>|</
EQUAL: "="
MINUS: "-"
_PLUS: "+"
_OPEN: "("
_CLOSE: ")"
_COMMA: ","
%ignore BLANKS
%ignore LINE_COMMENT
%ignore BLOCK_COMMENT
"""

_INSTEAD: Final = {
    "!": "write <> for unequal, and NOT (...) for the opposite",
    "==": "write a single =",
    '"': "put texts in single quotes",
    "'": "close the text with a single quote; inside a text write a quote as two quotes",
    "/*": "close the comment with */",
    "--": "a comment that begins with -- ends with a line break; leave a comment at the end of the text out",
    ".": "names have letters, digits, _ and $ only",
    "like": "LIKE is not supported: use CONTAINS, STARTSWITH or ENDSWITH",
    "0": "write numbers without leading zeros, and zero without L",
}
"""Suggested correction for each frequent mistake in a filter expression. The key is the text at the position of the
error."""
_TEXT_WANTED: Final = "put texts in single quotes, as in region IN ('eu', 'us') or name CONTAINS 'x'"
_ARITHMETIC: Final = "arithmetic is not supported"
_NO_MEND: Final = "combine comparisons with AND or OR, as in price > 5 AND region = 'eu'"


@lru_cache(maxsize=_CACHED)
def _compiled(text: str) -> Truth | FilterExpressionError:
    try:
        # `parse` returns no syntax tree. While the parser reads the filter expression, it calls the functions that
        # build the expression's plan. The result of the last call is the whole plan, and `parse` returns it.
        found: Truth = _parser().parse(text)  # type: ignore[assignment]
    except UnexpectedCharacters as error:
        return _bad_character(text, error)
    except UnexpectedToken as error:
        return _bad_token(text, error)
    except _AtError as error:
        return FilterExpressionError(text, error.position, error.reason)
    if max(depth for _, depth in plan.walk(found)) > DEPTH_MAX:
        return FilterExpressionError(text, 1, f"the expression is nested more than {DEPTH_MAX} deep")
    return found


def compiled(text: str) -> Truth:
    """Return the plan of a filter expression. Raises FilterExpressionError, with the position and the reason, if the
    expression does not compile.

    Results and errors of the last 100 expressions are cached.
    """
    if not isinstance(text, str) or not text.strip():
        raise FilterExpressionError(str(text), 1, "the expression is empty: " + _NO_MEND)
    if len(text) > TEXT_MAX:
        raise FilterExpressionError(
            text[:40] + "…", 1, f"the expression has {len(text)} characters, more than {TEXT_MAX}"
        )
    if surrogate := _SURROGATE.search(text):
        raise FilterExpressionError(ascii(text), surrogate.start() + 1, "the text has an unpaired surrogate")
    result = _compiled(text)
    if isinstance(result, FilterExpressionError):
        raise FilterExpressionError(*result.args)
    return result


def property_names(found: Truth) -> tuple[str, ...]:
    """Return the names of the properties in a plan, in the order of their first appearance. Each name occurs
    once."""
    return tuple(dict.fromkeys(node.name for node, _ in plan.walk(found) if isinstance(node, Name)))


class _AtError(Exception):
    """A RefusedError, together with the position of the error in the expression's text, counted from 1."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(position, reason)
        self.position, self.reason = position, reason


def _bad_character(text: str, error: UnexpectedCharacters) -> FilterExpressionError:
    at = error.pos_in_stream or 0
    mend = next((mend for start, mend in _INSTEAD.items() if text.startswith(start, at)), _NO_MEND)
    return FilterExpressionError(text, at + 1, f"{text[at]!r} is not part of the filter language: {mend}")


def _bad_token(text: str, error: UnexpectedToken) -> FilterExpressionError:
    if error.token.type == "$END":
        return FilterExpressionError(
            text, len(text) + 1, "the expression ends too early: a value or a bracket is missing"
        )
    at, word = error.token.start_pos or 0, str(error.token)
    if error.expected == {"TEXT"}:
        mend = _TEXT_WANTED
    elif text.startswith("--", at) or text.startswith("==", at - 1):
        mend = _INSTEAD[text[at - 1 : at + 1] if word == "=" else "--"]
    elif word in ("+", "-"):
        mend = _ARITHMETIC + ", and a property's name cannot contain a minus"
    elif text[at - 1 : at] == "0" and word[0] in "0123456789lL":
        mend = _INSTEAD["0"]
    else:
        mend = _INSTEAD.get(word.lower(), _NO_MEND)
    return FilterExpressionError(text, at + 1, f"{shown(word)} is not expected here: {mend}")


@v_args(inline=True)
class _Planner(Transformer[Token, Operand]):
    """Builds the plan of a filter expression from the parsed grammar rules, innermost operands first."""

    def start(self, whole: Operand) -> Truth:
        return _made(None, plan.truth, whole)

    def either(self, left: Operand, operator: Token, right: Operand) -> Truth:
        return _made(operator, plan.either, left, right)

    def both(self, left: Operand, operator: Token, right: Operand) -> Truth:
        return _made(operator, plan.both, left, right)

    def equal(self, left: Operand, operator: Token, right: Operand) -> Truth:
        return _made(operator, plan.equal, left, right)

    def unequal(self, left: Operand, operator: Token, right: Operand) -> Truth:
        return Not(_made(operator, plan.equal, left, right))

    def is_null(self, operand: Operand, *_: Token) -> Truth:
        return plan.is_null(operand)

    def is_not_null(self, operand: Operand, *_: Token) -> Truth:
        return Not(plan.is_null(operand))

    def ordered(self, left: Operand, operator: Token, right: Operand) -> Truth:
        return _made(operator, plan.ordered, Order(str(operator)), left, right)

    def find(self, operand: Operand, operator: Token, text: Token) -> Truth:
        return plan.Find(TextTest(operator.upper()), operand, _unquoted(text), negated=False)

    def find_not(self, operand: Operand, _: Token, operator: Token, text: Token) -> Truth:
        return plan.Find(TextTest(operator.upper()), operand, _unquoted(text), negated=True)

    def between(self, operand: Operand, operator: Token, low: Operand, _: Token, high: Operand) -> Truth:
        return _made(operator, plan.between, operand, low, high)

    def not_between(self, operand: Operand, _: Token, operator: Token, low: Operand, __: Token, high: Operand) -> Truth:
        return _made(operator, plan.not_between, operand, low, high)

    def one_of(self, operand: Operand, operator: Token, *texts: Token) -> Truth:
        return _made(operator, plan.one_of, operand, frozenset(map(_unquoted, texts)))

    def not_one_of(self, operand: Operand, _: Token, operator: Token, *texts: Token) -> Truth:
        return Not(self.one_of(operand, operator, *texts))

    def negative(self, _: Token, operand: Operand) -> Operand:
        return Negative(operand)

    def negation(self, operator: Token, operand: Operand) -> Truth:
        return Not(_made(operator, plan.truth, operand))

    def true(self, _: Token) -> Truth:
        return Literal(True)

    def false(self, _: Token) -> Truth:
        return Literal(False)

    def null(self, _: Token) -> Truth:
        return Literal(None)

    def integer(self, digits: Token) -> Operand:
        number = int(digits.rstrip("lL")) if len(digits) <= 20 else LONG_MAX + 1
        if number > LONG_MAX:
            raise _AtError(_position(digits), f"{digits} is larger than {LONG_MAX}: write it as a float, as in 1e20")
        return Literal(Number(number, ValueKind.INTEGER if number <= INTEGER_MAX else ValueKind.LONG))

    def double(self, digits: Token) -> Operand:
        number = float(digits)
        if number == 0.0 or isinf(number):
            raise _AtError(_position(digits), f"{digits} is not a float of the filter language: write 0 for zero")
        return Literal(Number(number, ValueKind.DOUBLE))

    def text(self, quoted: Token) -> Operand:
        return Literal(_unquoted(quoted))

    def name(self, name: Token) -> Operand:
        return Name(str(name))


def _made(operator: Token | None, make: Callable[..., Truth], *operands: object) -> Truth:
    """Call `make` with the operands of `operator`, and return the condition that `make` builds. If `make` raises
    RefusedError, raise the error again with the operator's position."""
    try:
        return make(*operands)
    except RefusedError as error:
        raise _AtError(1 if operator is None else _position(operator), str(error)) from None


def _position(token: Token) -> int:
    return (token.start_pos or 0) + 1


def _unquoted(text: Token) -> str:
    return text[1:-1].replace("''", "'")


@cache
def _parser() -> Lark:
    return Lark(GRAMMAR, parser="lalr", lexer="basic", transformer=_Planner())
