"""Tests of the replies that listeners return: which reply messages are sent, and which metrics count them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

import raymq
from raymq.client.request.replier import ListenerReplier
from raymq.common.errors import CreateReplyMessageError, MessageIllegalError, SendUnknownError
from raymq.common.message import RESERVED_PROPERTIES, Message, MessageExt, MessageQueue
from raymq.common.names import check_user_topic, is_system_topic
from raymq.common.protocol.request_reply import Reply, ReplyStatistics, reply_message, reply_queue, request_message
from tests.support.clients.fakes import FakeStore, topic_route
from tests.support.clients.producers import producers_of_fakes

CLIENT = "10.0.0.1@17@ab12"


def consumed(**asked: str) -> MessageExt:
    """Return a message as a listener receives it, with the given system properties."""
    return MessageExt("orders", b"?", None, (), {}, 0, "broker-b", 0, 7, 0, 0, 0, "", "", "ID", "", 0, 0, asked)


def request() -> MessageExt:
    sent = request_message(Message("orders", b"?", properties={"user": "u"}), "c-1", CLIENT, "c", 3000)
    assert sent.properties["user"] == "u"
    return consumed(**{name: value for name, value in sent.properties.items() if name != "user"})


def test_golden_162_the_reply_goes_to_the_reply_topic_of_the_requests_broker_group():
    message, queue = reply_message(request(), Reply(b"!", ("k",), {"by": "me"}))
    assert message.topic == "c_REPLY_TOPIC"
    assert queue == reply_queue("c", "broker-b", CLIENT) == MessageQueue("c_REPLY_TOPIC", "broker-b", queue.queue_id)
    assert message.tags == CLIENT
    assert message.properties == {
        "by": "me",
        "CORRELATION_ID": "c-1",
        "REPLY_TO_CLIENT": CLIENT,
        "TTL": "3000",
        "MSG_TYPE": "reply",
    }


def test_a_request_keeps_all_fields_of_its_message():
    message = Message("orders", b"?", "A", ["k"], {"user": "u"}, 7, 3, None, False, ["l1", "l2"])
    asked = request_message(message, "c-1", CLIENT, "c", 3000)
    for name in set(message.__struct_fields__) - {"properties"}:
        assert getattr(asked, name) == getattr(message, name)


def reply_of_producer(body: bytes, *, keys: Any = (), properties: Any = None) -> Reply:
    """Reply to a request with `Producer.reply`, and return the stored reply."""
    store = FakeStore("storage-broker-b-0")
    with producers_of_fakes() as make:
        producer = make(store)
        queue = reply_queue("c", "broker-b", CLIENT)
        producer.test_routes.routes[queue.topic] = topic_route(queue.topic, **{"broker-b": 8})
        producer._requests = lambda: SimpleNamespace(check_present=lambda request: None)
        producer.reply(request(), body, keys=keys, properties=properties)
    [stored] = store.messages()
    assert (stored.tags, stored.system_properties["CORRELATION_ID"]) == (CLIENT, "c-1")
    return Reply(stored.body, stored.keys, stored.properties)


WAYS = [raymq.reply, Reply, reply_of_producer]


@pytest.mark.parametrize("make", WAYS)
@pytest.mark.parametrize("name", sorted(RESERVED_PROPERTIES))
def test_each_way_to_reply_refuses_reserved_properties(make, name: str):
    with pytest.raises(MessageIllegalError, match="is reserved"):
        make(b"!", properties={"by": "me", name: "true"})


@pytest.mark.parametrize("make", WAYS)
@pytest.mark.parametrize(
    "fields",
    [
        {"body": b""},
        {"body": "text"},
        {"keys": ["a b"]},
        {"keys": 3},
        {"properties": {"p": " "}},
        {"properties": {"p": "a\x02b"}},
        {"properties": {"p": 3}},
        {"properties": "p"},
    ],
    ids=repr,
)
def test_each_way_to_reply_refuses_what_a_message_cannot_have(make, fields: dict[str, Any]):
    with pytest.raises(MessageIllegalError):
        make(**{"body": b"!", **fields})


@pytest.mark.parametrize("make", WAYS)
def test_each_way_to_reply_takes_the_same_values(make):
    for keys, expected in (("k", ("k",)), (["k", "l"], ("k", "l")), ((), ())):
        properties = {"by": "me"}
        made = make(bytearray(b"!"), keys=keys, properties=properties)
        properties["TAGS"] = "later"
        assert (made.body, made.keys, made.properties) == (b"!", expected, {"by": "me"})
        assert pickle.loads(pickle.dumps(made)) == made
    assert make(b"!").properties == {}


@pytest.mark.parametrize("missing", ["CLUSTER", "CORRELATION_ID", "REPLY_TO_CLIENT", "TTL"])
def test_golden_162_a_message_that_lacks_a_property_is_no_request(missing: str):
    asked = {**request().system_properties}
    del asked[missing]
    with pytest.raises(CreateReplyMessageError, match=f"lacks {missing}") as caught:
        reply_message(consumed(**asked), Reply(b"!"))
    assert caught.value.code == 10007


def test_the_reply_topic_is_the_servers():
    assert is_system_topic("c_REPLY_TOPIC")
    with pytest.raises(raymq.IllegalNameError):
        check_user_topic("c_REPLY_TOPIC")


def test_replies_are_sent_and_counted():
    sent: list[tuple[bytes, float]] = []
    replier = ListenerReplier(
        lambda message, queue, timeout_s: sent.append((message.body, timeout_s)), lambda message: len(sent) == 2
    )
    assert replier.answer([request()], raymq.reply(b"1")) == ""
    assert replier.answer([request(), consumed(), request()], [raymq.reply(b"2"), raymq.reply(b"3"), None]) == ""
    assert sent == [(b"1", 3.0), (b"2", 3.0)]
    assert replier.statistics() == ReplyStatistics(sent=2, gone=1, no_request=1)


def test_a_reply_that_the_store_does_not_take_in_time_is_given_up():
    def refuse(*args):
        raise SendUnknownError("q", 1, 3.0, "away")

    replier = ListenerReplier(refuse, lambda message: False)
    assert replier.answer([request()], raymq.reply(b"1")) == ""
    assert replier.statistics() == ReplyStatistics(unsent=1)


def test_answers_of_the_wrong_number_or_type_are_refused():
    replier = ListenerReplier(lambda *args: None, lambda message: False)
    assert "1 answer(s) for 2 messages" in replier.answer([request(), request()], raymq.reply(b"1"))
    assert "a list with int" in replier.answer([request()], [3])
    assert replier.statistics() == ReplyStatistics()


def test_a_reply_that_is_not_legal_is_refused_where_it_is_made():
    with pytest.raises(raymq.MessageIllegalError):
        raymq.reply(b"")
    with pytest.raises(raymq.MessageIllegalError):
        raymq.reply(b"x", properties={"TAGS": "mine"})
