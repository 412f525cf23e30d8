"""Tests of the receives of a gateway over gRPC, in one process: messages are leased, settled by their handles, and
given back if the client leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.common.errors import BodyUnreadableError, NoPermissionError, ServiceNotAvailableError
from raymq.common.message import MessageExt, MessageQueue
from raymq.gateway.convert.times import duration, millis
from raymq.gateway.service import answers, cluster as gateway_cluster, polling_receive
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code, FilterType
from tests.component.gateway.test_gateway_calls import ORDERS, Gateway
from tests.support.clients.fakes import topic_route
from tests.support.clients.producers import Clock, producers_of_fakes
from tests.support.gateway.fake_group_calls import FakeGroupCalls
from tests.support.gateway.gateway_client import ANSWER_S, METADATA, GatewayClient

BILLING = wire.Resource(name="billing")


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with producers_of_fakes() as make:
        gateway = Gateway(make)
        gateway.route = topic_route(a=1, b=1)
        gateway.calls["billing"] = FakeGroupCalls("billing")
        yield gateway


def receive_request(broker: str = "a", wait_ms: int = 0, **more: Any) -> wire.ReceiveMessageRequest:
    queue = wire.MessageQueue(topic=ORDERS, broker=wire.Broker(name=broker))
    fields = {"batch_size": 32, "invisible_duration": duration(30_000), **more}
    return wire.ReceiveMessageRequest(
        group=BILLING, message_queue=queue, long_polling_timeout=duration(wait_ms), **fields
    )


async def receive(client: GatewayClient, request: wire.ReceiveMessageRequest) -> tuple[int, list[wire.Message]]:
    """Receive messages. The answer has a status first, and the time of the delivery last."""
    stream = client.method("ReceiveMessage")(request, metadata=METADATA, timeout=ANSWER_S)
    status, *messages, last = [answer async for answer in stream]
    assert status.WhichOneof("content") == "status"
    assert last.WhichOneof("content") == "delivery_timestamp"
    return status.status.code, [answer.message for answer in messages]


def bodies(messages: list[wire.Message]) -> list[bytes]:
    return [message.body for message in messages]


async def ack(client: GatewayClient, *handles: str) -> tuple[int, list[int]]:
    entries = [wire.AckMessageEntry(message_id="01A", receipt_handle=handle) for handle in handles]
    answer = await client.call("AckMessage", wire.AckMessageRequest(group=BILLING, topic=ORDERS, entries=entries))
    assert [entry.receipt_handle for entry in answer.entries] == list(handles)
    return answer.status.code, [entry.status.code for entry in answer.entries]


def change_request(handle: str, invisible_ms: int) -> wire.ChangeInvisibleDurationRequest:
    return wire.ChangeInvisibleDurationRequest(
        group=BILLING, topic=ORDERS, receipt_handle=handle, invisible_duration=duration(invisible_ms)
    )


def test_messages_are_received_and_settled_by_their_handles(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]
    for number in range(3):
        calls.put("a", b"%d" % number)

    async def scenario(client: GatewayClient) -> None:
        code, messages = await receive(client, receive_request())
        assert (code, bodies(messages)) == (Code.OK, [b"0", b"1", b"2"])
        system = messages[0].system_properties
        assert (messages[0].topic, system.delivery_attempt, millis(system.invisible_duration)) == (ORDERS, 1, 30_000)
        first, second, third = (message.system_properties.receipt_handle for message in messages)
        assert await ack(client, first) == (Code.OK, [Code.OK])
        assert await ack(client, first) == (Code.OK, [Code.OK]), "a late ack is harmless"
        answer = await client.call("ChangeInvisibleDuration", change_request(second, 0))
        assert answer.status.code == Code.OK
        assert answer.receipt_handle != second
        forward = wire.ForwardMessageToDeadLetterQueueRequest(
            group=BILLING, topic=ORDERS, receipt_handle=third, delivery_attempt=3
        )
        for _ in range(2):
            answer = await client.call("ForwardMessageToDeadLetterQueue", forward)
            assert answer.status.code == Code.OK
        assert calls.letters == [(third, 3)]
        code, messages = await receive(client, receive_request())
        assert (code, bodies(messages)) == (Code.OK, [b"1"])
        assert messages[0].system_properties.delivery_attempt == 2
        assert await receive(client, receive_request()) == (Code.MESSAGE_NOT_FOUND, [])

    gateway.run(scenario)
    assert calls.is_closed


def test_entries_with_wrong_handles_do_not_stop_the_others(gateway: Gateway) -> None:
    gateway.calls["billing"].put("a", b"0")

    async def scenario(client: GatewayClient) -> None:
        _, [message] = await receive(client, receive_request())
        handle = message.system_properties.receipt_handle
        elsewhere = handle.replace(" a ", " z ")
        code, entries = await ack(client, "rubbish", handle, elsewhere, f"{handle} 77")
        bad = Code.INVALID_RECEIPT_HANDLE
        assert (code, entries) == (Code.MULTIPLE_RESULTS, [bad, Code.OK, bad, Code.OK])
        assert await ack(client, "rubbish") == (bad, [bad])
        empty = wire.AckMessageRequest(group=BILLING, topic=ORDERS)
        assert (await client.call("AckMessage", empty)).status.code == Code.BAD_REQUEST
        for wrong in ("rubbish", elsewhere, handle):
            answer = await client.call("ChangeInvisibleDuration", change_request(wrong, 1000))
            assert (answer.status.code, answer.receipt_handle) == (bad, wrong)
        answer = await client.call("ChangeInvisibleDuration", change_request(handle, 13 * 3_600_000))
        assert answer.status.code == Code.ILLEGAL_INVISIBLE_TIME
        forward = wire.ForwardMessageToDeadLetterQueueRequest(group=BILLING, topic=ORDERS, receipt_handle=elsewhere)
        assert (await client.call("ForwardMessageToDeadLetterQueue", forward)).status.code == bad

    gateway.run(scenario)


def test_a_message_at_another_broker_group_is_received_at_once(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]

    async def scenario(client: GatewayClient) -> None:
        calls.put("b", b"there")
        code, messages = await receive(client, receive_request("a", wait_ms=20_000))
        assert (code, bodies(messages)) == (Code.OK, [b"there"])
        assert [(name, wait_s) for name, wait_s, _ in calls.receives] == [("a", 0.0), ("b", 0.0)]
        calls.receives.clear()
        _, [*messages] = await receive(client, receive_request("b", attempt_id="at"))
        assert messages == []
        assert [(name, attempt) for name, _, attempt in calls.receives] == [("b", "at"), ("a", "at")]

    gateway.run(scenario)


def test_a_receive_waits_at_all_broker_groups_at_the_same_time(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]

    async def scenario(client: GatewayClient) -> None:
        waiting = asyncio.ensure_future(receive(client, receive_request("a", wait_ms=20_000)))
        await calls.wait_for_receives(4)
        assert [(name, wait_s > 1) for name, wait_s, _ in calls.receives] == [
            *(("a", False), ("b", False), ("a", True), ("b", True))
        ]
        calls.put("b", b"0")
        assert bodies((await waiting)[1]) == [b"0"]
        assert len(calls.receives) == 4, "no broker group was asked again"
        await calls.wait_until_nobody_waits()
        calls.put("a", b"1")
        _, [message] = await receive(client, receive_request("a"))
        assert message.system_properties.delivery_attempt == 1

    gateway.run(scenario)


def test_of_two_broker_groups_with_messages_at_the_same_time_one_gives_its_messages_back(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]

    async def scenario(client: GatewayClient) -> None:
        waiting = asyncio.ensure_future(receive(client, receive_request("a", wait_ms=20_000)))
        await calls.wait_for_receives(4)
        calls.put("a", b"0")
        calls.put("b", b"1")
        code, [first] = await waiting
        assert code == Code.OK
        await calls.wait_until_returned(1)
        _, [second] = await receive(client, receive_request("a", wait_ms=20_000))
        assert {first.body, second.body} == {b"0", b"1"}
        assert [one.system_properties.delivery_attempt for one in (first, second)] == [1, 1]

    gateway.run(scenario)


def test_a_receive_that_waits_gets_a_message_although_another_broker_group_is_away(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]
    calls.failures["a"] = ServiceNotAvailableError("away")

    async def scenario(client: GatewayClient) -> None:
        waiting = asyncio.ensure_future(receive(client, receive_request("a", wait_ms=20_000)))
        await calls.wait_for_receives(5)
        calls.put("b", b"0")
        assert bodies((await waiting)[1]) == [b"0"]
        calls.failures["a"] = NoPermissionError("nobody may read the topic")
        assert await receive(client, receive_request("a", wait_ms=100)) == (Code.FORBIDDEN, [])

    gateway.run(scenario)


def test_a_push_consumer_waits_at_the_broker_group_that_it_names(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]

    async def scenario(client: GatewayClient) -> None:
        waiting = asyncio.ensure_future(receive(client, receive_request("b", wait_ms=20_000, auto_renew=True)))
        await calls.wait_for_receives(1)
        calls.put("a", b"0")
        calls.put("b", b"1")
        assert bodies((await waiting)[1]) == [b"1"]
        assert [name for name, *_ in calls.receives] == ["b"]
        assert bodies((await receive(client, receive_request("z", auto_renew=True)))[1]) == [b"0"]

    gateway.run(scenario)


def test_a_waiting_receive_gets_the_first_message_and_excluded_messages_do_not_end_it(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]
    gateway.route = topic_route(a=1)

    async def scenario(client: GatewayClient) -> None:
        wanted = wire.FilterExpression(type=FilterType.TAG, expression="paid")
        request = receive_request(wait_ms=20_000, filter_expression=wanted, attempt_id="at")
        waiting = asyncio.ensure_future(receive(client, request))
        await calls.wait_for_receives(1)
        calls.put("a", b"lost", tags="lost")
        await calls.wait_for_receives(2)
        calls.put("a", b"paid", tags="paid")
        assert bodies((await waiting)[1]) == [b"paid"]
        # only the first call has the client's id: with it, a later call would get leases that were already read
        assert [attempt for *_, attempt in calls.receives] == ["at", *[""] * (len(calls.receives) - 1)]

    gateway.run(scenario)


def test_a_client_that_leaves_gets_no_message_and_the_next_client_has_it_as_the_first_attempt(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]
    gateway.route = topic_route(a=1)

    async def scenario(client: GatewayClient) -> None:
        leaving = client.method("ReceiveMessage")(receive_request(wait_ms=20_000), metadata=METADATA, timeout=ANSWER_S)
        await calls.wait_for_receives(1)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving.read()
        # the gateway notes after a while that the client has gone; a message for its receive is given back
        calls.put("a", b"0")
        code, messages = await receive(client, receive_request(wait_ms=20_000))
        assert (code, bodies(messages)) == (Code.OK, [b"0"])
        assert messages[0].system_properties.delivery_attempt == 1

    gateway.run(scenario)


def test_messages_that_were_not_written_are_given_back(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]
    for _ in range(40):
        calls.put("a", b"x" * 1_000_000)

    async def scenario(client: GatewayClient) -> None:
        request = receive_request(batch_size=40)
        stream = client.method("ReceiveMessage")(request, metadata=METADATA, timeout=ANSWER_S)
        await stream.read()
        first = await stream.read()
        assert first.message.body
        stream.cancel()
        await calls.wait_until_returned(1)
        assert {counted for _, counted in calls.returned} == {False}
        assert 0 not in {offset for offset, _ in calls.returned}

    gateway.run(scenario)


def test_a_push_consumer_needs_no_invisible_time(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]
    calls.put("a", b"0")

    async def scenario(client: GatewayClient) -> None:
        request = receive_request(auto_renew=True, batch_size=100)
        request.ClearField("invisible_duration")
        _, [message] = await receive(client, request)
        assert millis(message.system_properties.invisible_duration) == 60_000

    gateway.run(scenario)


def test_a_broker_that_does_not_answer_does_not_hide_the_messages_of_another(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]
    calls.failures["a"] = ServiceNotAvailableError("away")

    async def scenario(client: GatewayClient) -> None:
        assert await receive(client, receive_request()) == (Code.HA_NOT_AVAILABLE, [])
        calls.put("b", b"0")
        code, messages = await receive(client, receive_request())
        assert (code, bodies(messages)) == (Code.OK, [b"0"])

    gateway.run(scenario)


def test_a_broker_that_never_answers_does_not_hide_the_messages_of_another(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling_receive, "LOOK_S", 0.01)
    calls = gateway.calls["billing"]
    calls.silent.add("a")

    async def scenario(client: GatewayClient) -> None:
        calls.put("b", b"0")
        assert bodies((await receive(client, receive_request()))[1]) == [b"0"]
        waiting = asyncio.ensure_future(receive(client, receive_request(wait_ms=20_000)))
        await calls.wait_for_receives(6)
        calls.put("b", b"1")
        assert bodies((await waiting)[1]) == [b"1"]

    gateway.run(scenario)


async def one_of_each_broker(client: GatewayClient, calls: FakeGroupCalls) -> list[str]:
    """Return the handles of a message of each broker."""
    handles = []
    for broker in ("a", "b"):
        calls.put(broker, broker.encode())
        _, [message] = await receive(client, receive_request(broker))
        handles.append(message.system_properties.receipt_handle)
    return handles


def test_a_broker_that_is_away_fails_the_acknowledgements_of_its_own_messages_only(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]

    async def scenario(client: GatewayClient) -> None:
        handles = await one_of_each_broker(client, calls)
        calls.failures["a"] = ServiceNotAvailableError("away")
        answer = await ack(client, *handles, "rubbish", handles[0].replace(" a ", " z "))
        bad = Code.INVALID_RECEIPT_HANDLE
        assert answer == (Code.MULTIPLE_RESULTS, [Code.HA_NOT_AVAILABLE, Code.OK, bad, bad])
        assert calls.settled() == 1
        del calls.failures["a"]
        assert await ack(client, *handles) == (Code.OK, [Code.OK, Code.OK])
        assert calls.settled() == 2

    gateway.run(scenario)


def test_a_call_that_settles_messages_is_answered_before_the_deadline_of_its_client(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = gateway.calls["billing"]

    async def scenario(client: GatewayClient) -> None:
        first, second = await one_of_each_broker(client, calls)
        calls.silent.add("a")
        monkeypatch.setattr(answers, "ANSWER_MARGIN_S", ANSWER_S - 0.5)
        assert await ack(client, first, second) == (Code.MULTIPLE_RESULTS, [Code.PROXY_TIMEOUT, Code.OK])
        changed = await client.call("ChangeInvisibleDuration", change_request(first, 1000))
        assert (changed.status.code, changed.receipt_handle) == (Code.PROXY_TIMEOUT, first)
        forward = wire.ForwardMessageToDeadLetterQueueRequest(group=BILLING, topic=ORDERS, receipt_handle=first)
        forwarded = await client.call("ForwardMessageToDeadLetterQueue", forward)
        assert forwarded.status.code == Code.PROXY_TIMEOUT
        assert calls.letters == []

    gateway.run(scenario)


def test_a_message_whose_body_cannot_be_read_is_delivered_again_later(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]
    error = BodyUnreadableError("orders@a:0", 0, 7, "the checksum differs", record_damaged=True)
    calls.put("a", b"", message=MessageExt.damaged(error, MessageQueue("orders", "a", 0)))
    calls.put("a", b"1")

    async def scenario(client: GatewayClient) -> None:
        code, messages = await receive(client, receive_request())
        assert (code, bodies(messages)) == (Code.OK, [b"1"])
        await calls.wait_until_returned(1)
        assert calls.returned == [(0, True)]

    gateway.run(scenario)


def test_the_messages_of_a_push_consumer_are_renewed_until_they_are_settled_or_the_client_has_gone(
    gateway: Gateway,
) -> None:
    calls, clock = gateway.calls["billing"], Clock()
    gateway.more = {"clock": clock}
    for number in range(3):
        calls.put("a", b"%d" % number)

    async def passes(client: GatewayClient, time_s: float, *, beats: bool = True) -> list[int]:
        """Return the messages that the gateway renews after some time."""
        clock.now_s += time_s
        calls.extended.clear()
        if beats:
            await client.call("Heartbeat", wire.HeartbeatRequest(group=BILLING))
        await client.service.tick()
        return sorted(calls.extended)

    async def scenario(client: GatewayClient) -> None:
        _, messages = await receive(client, receive_request(auto_renew=True))
        first, second, _ = (message.system_properties.receipt_handle for message in messages)
        assert await passes(client, 20) == []
        assert await passes(client, 10) == [0, 1, 2], "half of the lease is over"
        await ack(client, first)
        calls.failures["a"] = ServiceNotAvailableError("away")
        assert await passes(client, 30) == []
        del calls.failures["a"]
        assert await passes(client, 1) == [1, 2], "the failed renewal is repeated"
        answer = await client.call("ChangeInvisibleDuration", change_request(second, 1_000))
        assert answer.status.code == Code.OK
        assert await passes(client, 30) == [2]
        assert await passes(client, 61, beats=False) == [], "the client has gone"
        await calls.wait_until_returned(1)
        assert calls.returned == [(2, True)]
        assert await passes(client, 30) == []
        _, [again] = await receive(client, receive_request())
        assert again.system_properties.delivery_attempt == 2

    gateway.run(scenario)


def test_the_messages_of_a_push_consumer_that_ends_are_delivered_to_another_one(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]
    for number in range(2):
        calls.put("a", b"%d" % number)

    async def scenario(client: GatewayClient) -> None:
        await client.call("Heartbeat", wire.HeartbeatRequest(group=BILLING))
        _, [first, _] = await receive(client, receive_request(auto_renew=True))
        await ack(client, first.system_properties.receipt_handle)
        end = wire.NotifyClientTerminationRequest(group=BILLING)
        assert (await client.call("NotifyClientTermination", end)).status.code == Code.OK
        await calls.wait_until_returned(1)
        assert calls.returned == [(1, True)]
        assert len(client.service.clients) == 0

    gateway.run(scenario)


@pytest.mark.parametrize("ends", ["client", "gateway"])
def test_a_receive_that_waits_is_answered_at_once_when_its_client_or_the_gateway_ends(
    gateway: Gateway, ends: str
) -> None:
    calls = gateway.calls["billing"]
    gateway.route = topic_route(a=1)

    async def scenario(client: GatewayClient) -> None:
        calls.answers.clear()
        waiting = [asyncio.ensure_future(receive(client, receive_request(wait_ms=20_000))) for _ in range(2)]
        await calls.wait_for_receives(2)
        if ends == "client":
            other = (("x-mq-client-id", "client-2"),)
            end = wire.NotifyClientTerminationRequest(group=BILLING)
            await client.call("NotifyClientTermination", end, other)
            assert not any(one.done() for one in waiting)
            await client.call("NotifyClientTermination", end)
        else:
            client.service.end_receives()
        assert await asyncio.gather(*waiting) == [(Code.MESSAGE_NOT_FOUND, [])] * 2
        calls.answers.set()
        # a message that arrives for such a receive is for another client, as its first attempt
        calls.put("a", b"0")
        _, [message] = await receive(client, receive_request(wait_ms=20_000))
        assert message.system_properties.delivery_attempt == 1

    gateway.run(scenario)


class SlowReturns(FakeGroupCalls):
    """Calls of a group whose broker takes its time to take messages back."""

    async def change_invisible(
        self, messages: Sequence[ReceivedMessage], invisible_ms: int, *, counted: bool = True
    ) -> list[ReceivedMessage]:
        await asyncio.sleep(0.1)
        return await super().change_invisible(messages, invisible_ms, counted=counted)


def test_a_gateway_that_stops_first_gives_back_the_messages_that_no_client_has_got(gateway: Gateway) -> None:
    calls = gateway.calls["billing"] = SlowReturns("billing")
    for _ in range(40):
        calls.put("a", b"x" * 1_000_000)

    async def scenario(client: GatewayClient) -> None:
        request = receive_request(batch_size=40)
        stream = client.method("ReceiveMessage")(request, metadata=METADATA, timeout=ANSWER_S)
        await stream.read()
        stream.cancel()

    gateway.run(scenario)
    assert calls.returned
    assert {counted for _, counted in calls.returned} == {False}


def test_a_gateway_does_not_wait_for_ever_for_its_calls(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway_cluster, "FINISH_S", 0.1)
    caplog.set_level("INFO", gateway_cluster.__name__)

    async def scenario(client: GatewayClient) -> None:
        client.service._cluster.later(asyncio.Event().wait())

    gateway.run(scenario)
    assert "some calls had not ended 0.1 s after the gateway's server" in caplog.text


WRONG = [
    (receive_request(batch_size=0), Code.BAD_REQUEST),
    (receive_request(invisible_duration=duration(99)), Code.ILLEGAL_INVISIBLE_TIME),
    (receive_request(invisible_duration=duration(12 * 3_600_000 + 1)), Code.ILLEGAL_INVISIBLE_TIME),
    (
        receive_request(filter_expression=wire.FilterExpression(type=2, expression="n>")),
        Code.ILLEGAL_FILTER_EXPRESSION,
    ),
    (wire.ReceiveMessageRequest(message_queue=receive_request().message_queue), Code.ILLEGAL_CONSUMER_GROUP),
    (wire.ReceiveMessageRequest(group=BILLING, batch_size=1), Code.ILLEGAL_TOPIC),
]


@pytest.mark.parametrize(("request_", "code"), WRONG, ids=range(6))
def test_a_wrong_receive_is_answered_with_its_status(
    gateway: Gateway, request_: wire.ReceiveMessageRequest, code: Code
) -> None:
    async def scenario(client: GatewayClient) -> None:
        assert await receive(client, request_) == (code, [])
        assert gateway.calls["billing"].receives == []

    gateway.run(scenario)


def test_the_number_of_waiting_receives_is_bounded(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_cluster, "RECEIVES_MAX", 1)
    calls = gateway.calls["billing"]
    gateway.route = topic_route(a=1)

    async def scenario(client: GatewayClient) -> None:
        waiting = asyncio.ensure_future(receive(client, receive_request(wait_ms=20_000)))
        await calls.wait_for_receives(1)
        assert await receive(client, receive_request()) == (Code.TOO_MANY_REQUESTS, [])
        calls.put("a", b"0")
        assert bodies((await waiting)[1]) == [b"0"]

    gateway.run(scenario)


def test_a_thousand_receives_wait_without_threads(gateway: Gateway) -> None:
    calls = gateway.calls["billing"]
    gateway.route = topic_route(a=1)

    async def scenario(client: GatewayClient) -> None:
        await receive(client, receive_request())
        threads = threading.active_count()
        requests = [receive_request(wait_ms=20_000, batch_size=1) for _ in range(1000)]
        waiting = [asyncio.ensure_future(receive(client, one)) for one in requests]
        await calls.wait_for_receives(len(waiting))
        assert threading.active_count() <= threads + gateway_cluster.CLUSTER_CALLS_MAX
        for number in range(len(waiting)):
            calls.put("a", b"%d" % number)
        answers = await asyncio.gather(*waiting)
        assert {code for code, _ in answers} == {Code.OK}
        assert sorted(body for _, messages in answers for body in bodies(messages)) == sorted(
            b"%d" % number for number in range(len(waiting))
        )

    gateway.run(scenario)


def test_the_calls_of_the_group_that_was_used_least_recently_are_closed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_cluster, "GROUPS_OPEN_MAX", 1)

    async def scenario(client: GatewayClient) -> None:
        await receive(client, receive_request())
        other = receive_request()
        other.group.name = "reports"
        await receive(client, other)
        assert set(gateway.calls) == {"billing", "reports"}

    gateway.run(scenario)
    assert gateway.calls["billing"].is_closed


def test_an_answer_of_a_receive_without_a_client_id_has_a_status(gateway: Gateway) -> None:
    async def scenario(client: GatewayClient) -> None:
        stream = client.method("ReceiveMessage")(receive_request(), timeout=ANSWER_S)
        first = await stream.read()
        assert first.status.code == Code.CLIENT_ID_REQUIRED
        assert (await stream.read()).HasField("delivery_timestamp")
        assert await stream.read() is grpc.aio.EOF

    gateway.run(scenario)
