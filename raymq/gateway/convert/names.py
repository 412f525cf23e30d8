"""Reads the names in a request: namespace, topics, groups, filter expressions and receipt handles.

Clients name the namespace in each Resource, in the metadata of the call, or in both. A handle is raymq's text with 8
fields. RocketMQ's brokers write a ninth field, the message's place in their log. A client may have stored such a
handle, so the ninth field is ignored.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from raymq.client.consumer.simple.received_message import parse_handle
from raymq.client.consumer.subscription import ALL, Subscription
from raymq.common.errors import FilterExpressionError, IllegalNameError, InvalidArgumentError
from raymq.common.names import TOPIC_NAME_MAX, check_group, check_user_topic
from raymq.common.namespaces import NO_NAMESPACE, Namespace, wrap
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.wire.enums import Code, FilterType
from raymq.gateway.wire.messages import FilterExpression, Resource
from raymq.records.filters.sql import SqlFilter

NAMES_KNOWN_MAX: Final = 4096
"""Number of names of each kind whose check is kept for the next call."""
_HANDLE_FIELDS: Final = 8


def namespace_of(resource: Resource, header: str = "") -> Namespace:
    """Return the namespace of a request. `resource`: the request's first Resource; if it names no namespace, `header`
    counts, the text from the call's metadata. Raises IllegalNameError if the namespace is not legal."""
    name = resource.resource_namespace or header
    if not name:
        return NO_NAMESPACE
    return _namespace(name) if len(name) <= TOPIC_NAME_MAX else Namespace(name)


def topic_of(namespace: Namespace, resource: Resource) -> str:
    """Return the stored name of a topic. Raises IllegalNameError if the name is not legal, or is a system topic's."""
    return _stored_topic(namespace.name, resource.name)


def group_of(namespace: Namespace, resource: Resource) -> str:
    """Return the stored name of a consumer group. Raises IllegalNameError if the name is not legal."""
    return _stored_group(namespace.name, resource.name)


# Clients repeat their names in each call. A refused name is not kept.


@lru_cache(maxsize=NAMES_KNOWN_MAX)
def _namespace(name: str) -> Namespace:
    return Namespace(name)


@lru_cache(maxsize=NAMES_KNOWN_MAX)
def _stored_topic(namespace: str, name: str) -> str:
    return check_user_topic(wrap(namespace, check_user_topic(name)))


@lru_cache(maxsize=NAMES_KNOWN_MAX)
def _stored_group(namespace: str, name: str) -> str:
    return check_group(wrap(namespace, check_group(name)))


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


def handle_of(group: str, topic: str, text: str) -> str:
    """Return the receipt handle in `text`, as raymq's calls take it. Raises CallRefusedError if it is no handle."""
    fields = text.split(" ", _HANDLE_FIELDS + 1)
    handle = " ".join(fields[:_HANDLE_FIELDS]) if len(fields) == _HANDLE_FIELDS + 1 else text
    try:
        parse_handle(group, topic, handle)
    except InvalidArgumentError as error:
        raise CallRefusedError(Code.INVALID_RECEIPT_HANDLE, str(error)) from None
    return handle
