"""Reads the names of topics and groups in a request, and the namespace in which they are.

Clients name the namespace in each Resource, in the metadata of the call, or in both.
"""

from __future__ import annotations

from raymq.common.names import check_group, check_user_topic
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.gateway.wire.messages import Resource


def namespace_of(resource: Resource, header: str = "") -> Namespace:
    """Return the namespace of a request. `resource`: the request's first Resource; if it names no namespace, `header`
    counts, the text from the call's metadata. Raises IllegalNameError if the namespace is not legal."""
    name = resource.resource_namespace or header
    return Namespace(name) if name else NO_NAMESPACE


def topic_of(namespace: Namespace, resource: Resource) -> str:
    """Return the stored name of a topic. Raises IllegalNameError if the name is not legal, or is a system topic's."""
    check_user_topic(resource.name)
    return check_user_topic(namespace.wrap(resource.name))


def group_of(namespace: Namespace, resource: Resource) -> str:
    """Return the stored name of a consumer group. Raises IllegalNameError if the name is not legal."""
    check_group(resource.name)
    return check_group(namespace.wrap(resource.name))
