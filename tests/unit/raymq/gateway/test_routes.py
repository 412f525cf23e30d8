"""Tests of the queues and assignments that clients get, of names in namespaces, filters, and receipt handles."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from raymq.client.consumer.simple.received_message import parse_handle
from raymq.common.errors import FilterExpressionError, IllegalNameError, NoPermissionError
from raymq.common.protocol.attributes import TopicAttributes, TopicMessageType
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from raymq.gateway.convert.names import group_of, handle_of, namespace_of, subscription_of, topic_of
from raymq.gateway.convert.routes import (
    ADDRESSES_MAX,
    HOST_CHARS_MAX,
    assignments_of,
    check_endpoints,
    endpoints_of,
    queues_of,
)
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.wire.enums import AddressScheme, Code, FilterType, MessageType, Permission
from raymq.gateway.wire.messages import Address, Endpoints, FilterExpression, Resource

TOPIC = Resource(name="orders", resource_namespace="team-a")
HERE = endpoints_of("10.0.0.1", 8081)


def route_of(*queues: tuple[int, int, int], kind: TopicMessageType = TopicMessageType.MIXED) -> TopicRoute:
    """Return a route with a broker group for each triple of read queues, write queues and permission. A group with a
    negative number of write queues has no master."""
    data, brokers = [], {}
    for letter, (reads, writes, perm) in zip("abc", queues, strict=False):
        name = f"broker-{letter}"
        data.append(QueueData(name, reads, abs(writes), perm))
        brokers[name] = BrokerData("raymq", name, {0 if writes >= 0 else 1: f"storage-{name}-0"})
    return TopicRoute("team-a%orders", brokers, tuple(data), attributes=TopicAttributes(kind))


def permissions(route: TopicRoute) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for queue in queues_of(route, TOPIC, HERE):
        assert queue.id == len(found.setdefault(queue.broker.name, []))
        assert (queue.broker.id, queue.broker.endpoints, queue.topic) == (0, HERE, TOPIC)
        found[queue.broker.name].append(queue.permission)
    return found


def test_queues_that_can_be_read_and_written_are_first() -> None:
    both, read, write, none = Permission.READ_WRITE, Permission.READ, Permission.WRITE, Permission.NONE
    assert permissions(route_of((2, 2, 6), (3, 1, 6), (1, 2, 6))) == {
        "broker-a": [both, both],
        "broker-b": [both, read, read],
        "broker-c": [both, write],
    }
    assert permissions(route_of((1, 1, 4), (1, 1, 2), (1, 1, 0))) == {
        "broker-a": [read],
        "broker-b": [write],
        "broker-c": [none],
    }
    assert permissions(route_of((2, -2, 6))) == {"broker-a": [read, read]}


def test_a_client_learns_which_types_a_topic_accepts() -> None:
    four = [MessageType.NORMAL, MessageType.FIFO, MessageType.DELAY, MessageType.TRANSACTION]
    for kind, types in (
        *((kind, [MessageType[kind.name]]) for kind in set(TopicMessageType) - {"MIXED", "UNSPECIFIED"}),
        (TopicMessageType.MIXED, four),
        (TopicMessageType.UNSPECIFIED, four),
    ):
        [queue] = queues_of(route_of((1, 1, 6), kind=kind), TOPIC, HERE)
        assert list(queue.accept_message_types) == types


def test_a_group_has_one_assignment_of_each_broker_group_and_in_order_mode_of_each_queue() -> None:
    route = route_of((2, 1, 6), (3, 3, 2), (1, 1, 4))
    shared = [one.message_queue for one in assignments_of(route, TOPIC, HERE, ordered=False)]
    assert [(one.broker.name, one.id, one.permission) for one in shared] == [
        ("broker-a", -1, Permission.READ_WRITE),
        ("broker-c", -1, Permission.READ),
    ]
    ordered = [one.message_queue for one in assignments_of(route, TOPIC, HERE, ordered=True)]
    assert [(one.broker.name, one.id) for one in ordered] == [("broker-a", 0), ("broker-a", 1), ("broker-c", 0)]
    with pytest.raises(NoPermissionError, match="not readable"):
        assignments_of(route_of((1, 1, 2)), TOPIC, HERE, ordered=False)


@pytest.mark.parametrize(
    ("host", "scheme"),
    [("10.0.0.1", AddressScheme.IPv4), ("::1", AddressScheme.IPv6), ("gateway.example", AddressScheme.DOMAIN_NAME)],
)
def test_endpoints_name_the_kind_of_their_host(host: str, scheme: AddressScheme) -> None:
    assert endpoints_of(host, 8081) == Endpoints(scheme=scheme, addresses=[Address(host=host, port=8081)])
    check_endpoints(endpoints_of(host, 8081))


@pytest.mark.parametrize(
    "endpoints",
    [
        Endpoints(),
        endpoints_of("10.0.0.1", 0),
        endpoints_of("10.0.0.1", 65536),
        endpoints_of("", 1),
        Endpoints(scheme=AddressScheme.DOMAIN_NAME, addresses=[Address(host="a", port=1), Address(host="b", port=1)]),
        endpoints_of("h" * (HOST_CHARS_MAX + 1), 1),
        Endpoints(scheme=AddressScheme.IPv4, addresses=[Address(host="10.0.0.1", port=1)] * (ADDRESSES_MAX + 1)),
    ],
    ids=range(7),
)
def test_illegal_endpoints_are_refused(endpoints: Endpoints) -> None:
    with pytest.raises(CallRefusedError) as caught:
        check_endpoints(endpoints)
    assert caught.value.status == Code.ILLEGAL_ACCESS_POINT


def test_the_namespace_is_in_the_resource_or_in_the_header() -> None:
    bare = Resource(name="orders")
    assert topic_of(namespace_of(TOPIC, "team-b"), TOPIC) == "team-a%orders"
    assert topic_of(namespace_of(bare, "team-b"), bare) == "team-b%orders"
    assert topic_of(namespace_of(bare), bare) == "orders"
    assert group_of(namespace_of(TOPIC), Resource(name="billing")) == "team-a%billing"


@pytest.mark.parametrize("name", ["", " ", "a b", "TBW102", "rmq_sys_timer", "x" * 128])
def test_an_illegal_topic_is_refused(name: str) -> None:
    with pytest.raises(IllegalNameError):
        topic_of(namespace_of(TOPIC), Resource(name=name))


@pytest.mark.parametrize("name", ["", "a b", "x" * 121])
def test_an_illegal_group_or_namespace_is_refused(name: str) -> None:
    with pytest.raises(IllegalNameError):
        group_of(namespace_of(TOPIC), Resource(name=name))
    with pytest.raises(IllegalNameError):
        namespace_of(Resource(resource_namespace="a%b"))


def test_filters_of_both_languages() -> None:
    def wanted(expression: str, kind: int = FilterType.TAG) -> str:
        return subscription_of("orders", FilterExpression(type=kind, expression=expression)).description

    assert wanted("b || a") == "a || b"
    assert (
        wanted("") == wanted("*") == wanted(" * ") == wanted("*", FilterType.SQL) == wanted("", FilterType.SQL) == "*"
    )
    assert wanted("a", FilterType.FILTER_TYPE_UNSPECIFIED) == "a"
    assert wanted("n > 5", FilterType.SQL) == "SQL92: n > 5"
    with pytest.raises(FilterExpressionError):
        wanted("n >", FilterType.SQL)
    for expression, kind in (("||", FilterType.TAG), ("a", 9)):
        with pytest.raises(CallRefusedError) as caught:
            wanted(expression, kind)
        assert caught.value.status == Code.ILLEGAL_FILTER_EXPRESSION


HANDLE = "5 1795400000000 60000 0 0 broker-a 3 7"


def test_a_handle_may_have_the_ninth_field_of_rocketmq() -> None:
    assert handle_of("billing", "orders", HANDLE) == HANDLE
    assert handle_of("billing", "orders", f"{HANDLE} 123456") == HANDLE
    assert parse_handle("billing", "orders", HANDLE)[1] == 7


def test_the_error_for_a_long_text_that_is_no_handle_is_short() -> None:
    with pytest.raises(CallRefusedError) as caught:
        handle_of("billing", "orders", "x " * 10_000)
    assert len(str(caught.value)) < 500


@given(st.text(max_size=60) | st.lists(st.integers() | st.sampled_from(["broker-a", "", "x"]), max_size=10).map(str))
def test_a_text_that_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(CallRefusedError) as caught:
        handle_of("billing", "orders", text)
    assert caught.value.status == Code.INVALID_RECEIPT_HANDLE
