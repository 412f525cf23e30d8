"""Converts the filter expression of a request to a subscription."""

from __future__ import annotations

from raymq.client.consumer.subscription import ALL, Subscription
from raymq.common.errors import FilterExpressionError, IllegalNameError, InvalidArgumentError
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.wire.enums import Code, FilterType
from raymq.gateway.wire.messages import FilterExpression
from raymq.records.filters.sql import SqlFilter


def subscription_of(topic: str, wanted: FilterExpression) -> Subscription:
    """Return the subscription of the stored topic `topic` that a client asks for. An empty expression and ``*`` select
    all messages, in both languages.

    Raises CallRefusedError or FilterExpressionError if the expression does not compile.
    """
    text = wanted.expression.strip() or ALL
    if wanted.type not in (FilterType.FILTER_TYPE_UNSPECIFIED, FilterType.TAG, FilterType.SQL):
        raise CallRefusedError(Code.ILLEGAL_FILTER_EXPRESSION, f"filter type {wanted.type} is unknown: use TAG or SQL")
    try:
        if wanted.type == FilterType.SQL and text != ALL:
            return Subscription.parse(topic, SqlFilter(text))
        return Subscription.parse(topic, text)
    except (FilterExpressionError, IllegalNameError):
        raise
    except InvalidArgumentError as error:
        raise CallRefusedError(Code.ILLEGAL_FILTER_EXPRESSION, str(error)) from None
