"""Names in namespaces: the golden facts 145 to 158 of spec/features.md, and what holds for every name."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, strategies as st

from raymq.errors import IllegalNameError
from raymq.names import SYSTEM_TOPICS, check_topic, dlq_topic, light_queue, reply_topic, retry_topic
from raymq.namespaces import check_namespace, namespace_of, unwrap, wrap

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
    assert unwrap("ns%orders", "n") == "ns%orders"  # 158
    assert unwrap("ns%orders", "ns") == "orders"
    assert unwrap("%RETRY%ns%g", "n") == "%RETRY%ns%g"
    assert unwrap("ns%orders", "") == "ns%orders"


@pytest.mark.parametrize("topic", [*sorted(SYSTEM_TOPICS), reply_topic("raymq")])
def test_what_belongs_to_the_server_is_in_no_namespace(topic):
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
def test_topics_of_a_group_are_those_of_the_wrapped_group(namespace, group):
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
def test_a_namespace_that_names_could_not_be_told_from_is_refused(namespace):
    with pytest.raises(IllegalNameError, match="namespace"):
        check_namespace(namespace)
