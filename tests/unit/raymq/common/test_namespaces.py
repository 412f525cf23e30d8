"""Tests of names in namespaces: the golden facts 145 to 158 of spec/features.md, and properties that hold for every
name."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time

import msgspec
import pytest
from hypothesis import assume, given, strategies as st

from raymq.client.producer.producer import Producer
from raymq.common.delay import TIMER_TOPIC
from raymq.common.errors import IllegalNameError, TopicNotExistError
from raymq.common.message import Message, MessageExt, MessageQueue
from raymq.common.names import SYSTEM_TOPICS, check_topic, dlq_topic, light_queue, reply_topic, retry_topic
from raymq.common.namespaces import (
    NAMES_COMPARED_MAX,
    NO_NAMESPACE,
    Namespace,
    check_namespace,
    namespace_of,
    nearest_names,
    unwrap,
    wrap,
)
from tests.support.clients.fakes import FakeRoutes, FakeStore, topic_route

_LETTERS = "abAZ09_-|"
_NAMESPACES = st.text(_LETTERS, min_size=1, max_size=8)
_NAMES = st.one_of(
    st.text(_LETTERS + "%", min_size=1, max_size=12),
    st.sampled_from(["TBW102", "TOOLS_CONSUMER", "CID_RMQ_SYS_x", "rmq_sys_x", "c_REPLY_TOPIC", "%RETRY%g", "%DLQ%g"]),
)


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        pytest.param("orders", "ns%orders", id="145"),
        pytest.param("ns%orders", "ns%orders", id="146"),
        pytest.param("%RETRY%g", "%RETRY%ns%g", id="147"),
        pytest.param("%DLQ%g", "%DLQ%ns%g", id="148"),
        pytest.param("other%orders", "ns%other%orders", id="149"),
        pytest.param("SCHEDULE_TOPIC_XXXX", "SCHEDULE_TOPIC_XXXX", id="150-delayed"),
        pytest.param("TBW102", "TBW102", id="150-created"),
        pytest.param("rmq_sys_x", "rmq_sys_x", id="150-topic"),
        pytest.param("CID_RMQ_SYS_x", "CID_RMQ_SYS_x", id="150-group"),
        pytest.param("", "", id="150-empty"),
        pytest.param("TOOLS_CONSUMER", "ns%TOOLS_CONSUMER", id="151"),
    ],
)
def test_a_name_is_wrapped_as_rocketmq_wraps_it(name, wrapped):
    assert wrap("ns", name) == wrapped
    assert wrap("", name) == name


@pytest.mark.parametrize(
    ("name", "unwrapped", "namespace"),
    [
        pytest.param("ns%orders", "orders", "ns", id="152"),
        pytest.param("%RETRY%ns%g", "%RETRY%g", "ns", id="153"),
        pytest.param("%DLQ%ns%g", "%DLQ%g", "ns", id="154"),
        pytest.param("a%b%c", "b%c", "a", id="155"),
        pytest.param("%orders", "%orders", "", id="156"),
        pytest.param("ns%", "", "ns", id="157"),
    ],
)
def test_a_name_is_unwrapped_as_rocketmq_unwraps_it(name, unwrapped, namespace):
    assert (unwrap(name), namespace_of(name)) == (unwrapped, namespace)


def test_only_the_namespace_asked_for_is_taken_off():
    # golden fact 158 (spec/features.md §12): a name of another namespace is not changed
    assert unwrap("ns%orders", "n") == "ns%orders"
    assert unwrap("ns%orders", "ns") == "orders"
    assert unwrap("%RETRY%ns%g", "n") == "%RETRY%ns%g"
    assert unwrap("ns%orders", "") == "ns%orders"


@pytest.mark.parametrize("topic", [*sorted(SYSTEM_TOPICS), reply_topic("raymq")])
def test_system_names_are_in_no_namespace(topic):
    assert (wrap("ns", topic), unwrap(topic), namespace_of(topic)) == (topic, topic, "")


def test_a_light_queue_keeps_its_prefix_in_front():
    wrapped = wrap("ns", light_queue("alice"))
    assert wrapped == light_queue("ns%alice")
    assert unwrap(wrapped, "ns") == light_queue("alice")


@given(_NAMESPACES, _NAMES)
def test_a_wrapped_name_is_legal_is_wrapped_once_and_gives_the_name_back(namespace, name):
    assume(namespace_of(name) != namespace)
    wrapped = wrap(check_namespace(namespace), name)
    assert check_topic(wrapped) == wrapped
    assert wrap(namespace, wrapped) == wrapped
    assert unwrap(wrapped, namespace) == name


@given(_NAMESPACES, _NAMES)
def test_topics_of_a_group_are_wrapped_with_the_group(namespace, group):
    assume(not group.startswith("%"))
    for topic_of in (retry_topic, dlq_topic):
        assert wrap(namespace, topic_of(group)) == topic_of(wrap(namespace, group))


@given(_NAMESPACES, _NAMESPACES, _NAMES)
def test_two_namespaces_never_share_a_name_that_is_not_the_servers(one, other, name):
    assume(one != other and namespace_of(name) not in (one, other))
    wrapped = wrap(one, name)
    assume(wrapped != name)
    assert wrapped != wrap(other, name)
    assert unwrap(wrapped, other) == wrapped


@pytest.mark.parametrize(
    "namespace", ["", " ", None, 5, "a%b", "%", "a b", "a.b", "é", "a\n", "rmq_sys_a", "CID_RMQ_SYS_"]
)
def test_an_ambiguous_namespace_is_refused(namespace):
    with pytest.raises(IllegalNameError, match="namespace"):
        check_namespace(namespace)


@pytest.mark.parametrize(
    ("name", "known", "nearest"),
    [
        ("ordrs", ["orders", "payments"], ("orders",)),
        ("ORDERS", ["orders"], ("orders",)),
        ("orders", ["orders"], ()),
        ("order", ["orders", "Orders", "orders2", "border"], ("orders", "Orders", "border")),
        ("ordrs", ["team-a%orders", "%RETRY%orders", "%DLQ%orders", "SCHEDULE_TOPIC_XXXX"], ()),
        ("team-a%ordrs", ["orders", "team-b%orders", "team-a%orders"], ("team-a%orders",)),
        ("team-a%x", ["team-a%orders"], ()),
        ("", ["orders"], ()),
        ("x" * 100_000, ["orders"], ()),
    ],
)
def test_the_nearest_names_are_those_of_one_namespace(name, known, nearest):
    assert nearest_names(name, known) == nearest


def test_only_a_bounded_number_of_names_is_compared():
    known = [f"topic-{number}" for number in range(NAMES_COMPARED_MAX)]
    assert nearest_names("ordrs", [*known, "orders"]) == ()
    assert nearest_names("ordrs", [*known[1:], "orders"]) == ("orders",)


MESSAGE = MessageExt(
    "%RETRY%ns%g", b"?", "A", ("k",), {}, 0, "broker-a", 3, 7, 0, 0, 0, "", "", "ID", "", 2, 0,
    {
        "RETRY_TOPIC": "ns%orders", "REAL_TOPIC": "other%x", "UNIQ_KEY": "ns%k",
        "INNER_MULTI_DISPATCH": "%LMQ%ns%alice,%LMQ%ns%bob",
    },
)  # fmt: skip


def test_a_client_s_names_queues_and_messages_go_through_its_namespace() -> None:
    names = Namespace("ns")
    assert (names.wrap("orders"), names.wrap("ns%orders"), names.unwrap("ns%orders")) == ("ns%orders",) * 2 + (
        "orders",
    )
    stored, shown = MessageQueue("ns%orders", "broker-a", 1), MessageQueue("orders", "broker-a", 1)
    assert names.queue(shown) == names.queue(stored) == stored
    assert names.shown_queues([stored, MessageQueue("other%x", "b", 0)]) == [shown, MessageQueue("other%x", "b", 0)]
    assert (names.has("ns%orders"), names.has("other%orders"), names.has("orders")) == (True, False, False)
    assert pickle.loads(pickle.dumps(names)).name == "ns"


def test_messages_show_the_names_of_their_namespace_and_are_else_the_same() -> None:
    [shown, again] = Namespace("ns").shown_messages([MESSAGE, MESSAGE])
    assert shown.topic == "%RETRY%g"
    assert dict(shown.system_properties) == {
        "RETRY_TOPIC": "orders",
        "REAL_TOPIC": "other%x",
        "INNER_MULTI_DISPATCH": "%LMQ%alice,%LMQ%bob",
        "UNIQ_KEY": "ns%k",
    }
    assert shown.light_queues == ("alice", "bob")
    assert (shown.body, shown.tags, shown.keys, shown.queue_offset) == (b"?", "A", ("k",), 7)
    assert shown == again == copy.copy(shown) == pickle.loads(pickle.dumps(shown))


def test_without_a_namespace_nothing_changes() -> None:
    messages = [MESSAGE]
    assert NO_NAMESPACE.shown_messages(messages) is messages
    assert NO_NAMESPACE.unwrap("ns%orders") == NO_NAMESPACE.wrap("ns%orders") == "ns%orders"
    assert NO_NAMESPACE.has("ns%orders")


@pytest.mark.parametrize(
    "message",
    [
        Message("orders", b"x", light_queues=["alice"]),
        Message("orders", b"x", delay_level=3),
        Message("orders", b"x", deliver_at_ms=0),
        Message("orders", b"x", keys=["k"]),
    ],
    ids=["light", "delayed", "timed", "keys"],
)
def test_a_producer_stores_under_the_names_of_its_namespace(message: Message) -> None:
    store = FakeStore()
    with producer_within("ns", store) as producer:
        if message.deliver_at_ms is not None:
            message = msgspec.structs.replace(message, deliver_at_ms=time.time_ns() // 1_000_000 + 60_000)
        results = [producer.send(message), *producer.send_batch([message] * 3)]
        with pytest.raises(TopicNotExistError) as caught:
            producer.send(Message("nowhere", b"x"), timeout_s=0.1)
    assert caught.value.topic == "nowhere"
    assert {result.queue.topic for result in results} <= {"orders", "SCHEDULE_TOPIC_XXXX", TIMER_TOPIC}
    stored = store.messages()
    assert len(stored) == 4
    for one in stored:
        assert one.system_properties.get("REAL_TOPIC", one.topic) == "ns%orders"
        if message.light_queues:
            assert one.system_properties["INNER_MULTI_DISPATCH"] == "%LMQ%ns%alice"
    assert message.topic == "orders"


def producer_within(namespace: str, store: FakeStore) -> Producer:
    return Producer(
        "g",
        routes=FakeRoutes(dataclasses.replace(topic_route(a=1), topic=f"{namespace}%orders")),
        storage={store.name: store}.__getitem__,  # type: ignore[arg-type]  # a double
        born_host=("127.0.0.1", 0),
        names=Namespace(namespace),
    )
