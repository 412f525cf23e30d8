"""Converts the route of a topic to the queues that clients of the gRPC protocol see.

Clients send every call to the endpoints in a route. So each queue has the endpoints by which the client reached the
gateway. Node's client takes only queues whose id is 0, for sends and simple receives: so queue 0 of every broker group
is one of the queues that can be read and written, if the group has such a queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from raymq.common.errors import NoPermissionError
from raymq.common.protocol.attributes import TopicMessageType
from raymq.common.protocol.route import MASTER_ID, PERM_READ, PERM_WRITE, QueueData, TopicRoute
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.wire.enums import AddressScheme, Code, MessageType, Permission
from raymq.gateway.wire.messages import Address, Assignment, Broker, Endpoints, MessageQueue, Resource

PORT_MAX: Final = 65535
ADDRESSES_MAX: Final = 32
"""Maximum number of addresses of a client's endpoints. A route repeats the endpoints for each queue."""
HOST_CHARS_MAX: Final = 253
"""Maximum length of the host in an address, as in DNS."""
ALL_QUEUES: Final = -1
"""Id of the queue in an assignment that stands for all queues of its broker group."""

_TYPES: Final[Mapping[TopicMessageType, tuple[MessageType, ...]]] = {
    TopicMessageType.NORMAL: (MessageType.NORMAL,),
    TopicMessageType.FIFO: (MessageType.FIFO,),
    TopicMessageType.DELAY: (MessageType.DELAY,),
    TopicMessageType.TRANSACTION: (MessageType.TRANSACTION,),
    TopicMessageType.PRIORITY: (MessageType.PRIORITY,),
}
_ALL_TYPES: Final = (MessageType.NORMAL, MessageType.FIFO, MessageType.DELAY, MessageType.TRANSACTION)
"""The types that topics of the types MIXED and UNSPECIFIED accept, as in RocketMQ."""
_PERMISSIONS: Final = {
    0: Permission.NONE,
    PERM_READ: Permission.READ,
    PERM_WRITE: Permission.WRITE,
    PERM_READ | PERM_WRITE: Permission.READ_WRITE,
}


def accepted_types(kind: TopicMessageType) -> tuple[MessageType, ...]:
    """Return the types of messages that a topic accepts. A client refuses to send a message of another type."""
    return _TYPES.get(kind, _ALL_TYPES)


def check_endpoints(endpoints: Endpoints) -> None:
    """Raise CallRefusedError if the endpoints that a client names are not legal: there is no address, or there are too
    many, a host or port is out of range, or a domain name has more than one address."""
    if not 0 < len(endpoints.addresses) <= ADDRESSES_MAX:
        raise CallRefusedError(Code.ILLEGAL_ACCESS_POINT, f"the endpoints must have 1 to {ADDRESSES_MAX} addresses")
    if any(not 0 < one.port <= PORT_MAX or not 0 < len(one.host) <= HOST_CHARS_MAX for one in endpoints.addresses):
        raise CallRefusedError(Code.ILLEGAL_ACCESS_POINT, "an address of the endpoints has no legal host or port")
    if endpoints.scheme == AddressScheme.DOMAIN_NAME and len(endpoints.addresses) > 1:
        raise CallRefusedError(Code.ILLEGAL_ACCESS_POINT, "endpoints with a domain name have exactly one address")


def endpoints_of(host: str, port: int) -> Endpoints:
    """Return the endpoints of one host: an IPv4 address, an IPv6 address, or a name."""
    if ":" in host:
        scheme = AddressScheme.IPv6
    elif host.replace(".", "").isdecimal():
        scheme = AddressScheme.IPv4
    else:
        scheme = AddressScheme.DOMAIN_NAME
    return Endpoints(scheme=scheme, addresses=[Address(host=host, port=port)])


def queues_of(route: TopicRoute, topic: Resource, endpoints: Endpoints) -> list[MessageQueue]:
    """Return the queues of a topic, as QueryRoute answers them. `topic`: the name as the request has it. A broker group
    without a master has no queues that can be written."""
    kinds = accepted_types(route.attributes.message_type)
    return [
        MessageQueue(topic=topic, id=number, permission=permission, broker=broker, accept_message_types=kinds)
        for data in sorted(route.queues, key=lambda one: one.broker_name)
        for broker in [_broker(data, endpoints)]
        for number, permission in enumerate(_permissions(route, data))
    ]


def _permissions(route: TopicRoute, data: QueueData) -> list[Permission]:
    """Return the permission of each queue of a broker group. Queues that can be read and written are first."""
    has_master = MASTER_ID in route.brokers[data.broker_name].storages
    reads = data.read_queue_nums if data.perm & PERM_READ else 0
    writes = data.write_queue_nums if data.perm & PERM_WRITE and has_master else 0
    count = max(data.read_queue_nums, data.write_queue_nums)
    return [_PERMISSIONS[PERM_READ * (number < reads) | PERM_WRITE * (number < writes)] for number in range(count)]


def broker_groups_of(route: TopicRoute) -> set[str]:
    """Return the names of a topic's broker groups, including groups that are away: they have messages and transactions
    of the topic, which clients name."""
    return {data.broker_name for data in route.queues} | {queue.broker_name for queue in route.all_queues}


def assignments_of(route: TopicRoute, topic: Resource, endpoints: Endpoints, *, ordered: bool) -> Sequence[Assignment]:
    """Return the queues from which a push consumer receives. Each member of a group gets all broker groups, because
    the brokers share the messages among the receives. In order mode each queue has an assignment of its own.

    Raises NoPermissionError if the topic is not readable.
    """
    assignments = []
    for data in sorted(route.queues, key=lambda one: one.broker_name):
        if not data.perm & PERM_READ or not data.read_queue_nums:
            continue
        permission = _PERMISSIONS[data.perm & (PERM_READ | PERM_WRITE)]
        for number in range(data.read_queue_nums) if ordered else (ALL_QUEUES,):
            queue = MessageQueue(topic=topic, id=number, permission=permission, broker=_broker(data, endpoints))
            assignments.append(Assignment(message_queue=queue))
    if not assignments:
        raise NoPermissionError(f"topic {route.topic!r} is not readable now; see `raymq topic describe {route.topic}`")
    return assignments


def _broker(data: QueueData, endpoints: Endpoints) -> Broker:
    return Broker(name=data.broker_name, id=MASTER_ID, endpoints=endpoints)
