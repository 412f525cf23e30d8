"""The filter expression of a scan, as its option `expression` gives it."""

from __future__ import annotations

from raymq.common.errors import InvalidArgumentError
from raymq.records.filters.sql import SqlFilter


def text_of(expression: SqlFilter | None) -> str | None:
    """The text of a filter expression, None for none. InvalidArgumentError for what is no filter expression."""
    if expression is None:
        return None
    if not isinstance(expression, SqlFilter):
        raise InvalidArgumentError(
            f"expression={expression!r} is no filter expression; write "
            'expression=raymq.sql("price > 5"), or tags="paid || refunded"'
        )
    return expression.text
