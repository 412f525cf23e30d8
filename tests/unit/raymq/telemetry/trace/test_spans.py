"""Tests of OpenTelemetry spans: their parents, and the message properties that carry them. Without a program that
requests spans, no spans are created."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from raymq.client.consumer.push.consume_pool import ConsumePool
from raymq.client.consumer.push.consume_request import ConsumeRequest
from raymq.client.producer.observers import SendSpans
from raymq.common.errors import MessageIllegalError, TopicNotExistError
from raymq.common.message import Message, MessageExt
from raymq.records.kernels.byte_column import ByteColumn
from raymq.records.kernels.message_columns import MessageColumns
from raymq.telemetry.trace.spans import SpanHook, Spans
from tests.support.clients.fakes import WAIT_S, FakeStore
from tests.support.clients.producers import producers_of_fakes

MESSAGE = MessageExt("orders", b"?", "A", ("k",), {}, 0, "broker-a", 3, 7, 0, 0, 0, "", "", "ID", "", 2, 0, {})
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = int("0af7651916cd43dd8448eb211c80319c", 16)


class Seen:
    """Test tracer that collects the finished spans."""

    def __init__(self, **how: Any) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(**how)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = Spans(provider.get_tracer("raymq"))

    def ended(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def only(self) -> ReadableSpan:
        [span] = self.ended()
        return span


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def make() -> Iterator[Any]:
    with producers_of_fakes() as make:
        yield make


def properties_of(store: FakeStore) -> list[dict[str, str]]:
    """Return the user properties of all messages that a store received."""
    return [dict(message.properties) for message in store.messages()]


@pytest.mark.parametrize("way", ["send", "send_async", "send_oneway"])
def test_a_send_is_a_span_whose_context_goes_along(make: Any, seen: Seen, way: str) -> None:
    store = FakeStore()
    producer = make(store, observers=[SendSpans("group", seen.spans)])
    # Send three times, because a producer without spans uses a faster path from its second send on. A producer with
    # spans must not use that path.
    for _ in range(3):
        done = getattr(producer, way)(Message("orders", b"body", "A", ("k",), {"mine": "1"}))
        if way == "send_async":
            done.result(WAIT_S)
    producer.flush()
    spans = seen.ended()
    assert [span.name for span in spans] == ["send orders"] * 3
    assert {span.kind for span in spans} == {SpanKind.PRODUCER}
    attributes = dict(spans[0].attributes or {})
    assert attributes["messaging.system"] == "rocketmq"
    assert attributes["messaging.destination.name"] == "orders"
    assert attributes["messaging.message.body.size"] == 4
    assert attributes["messaging.rocketmq.message.tag"] == "A"
    assert attributes["messaging.message.id"]
    sent = properties_of(store)
    assert [one["mine"] for one in sent] == ["1"] * 3
    contexts = [span.get_span_context() for span in spans]
    assert [one["traceparent"].rpartition("-")[0] for one in sent] == [
        f"00-{context.trace_id:032x}-{context.span_id:016x}" for context in contexts if context is not None
    ]


@pytest.mark.parametrize("count", [3, 500])
def test_a_batch_is_one_span(make: Any, seen: Seen, count: int) -> None:
    store = FakeStore()
    producer = make(store, observers=[SendSpans("group", seen.spans)])
    producer.send_batch([Message("orders", b"%d" % i, keys=[f"k{i}"]) for i in range(count)])
    span = seen.only()
    assert (span.kind, dict(span.attributes or {})["messaging.batch.message_count"]) == (SpanKind.CLIENT, count)
    sent = store.messages()
    assert len({message.properties["traceparent"] for message in sent}) == 1
    assert [message.keys for message in sent] == [(f"k{i}",) for i in range(count)]


def test_columns_without_properties_get_the_context_too(seen: Seen) -> None:
    columns = MessageColumns("orders", ByteColumn.of([b"a", b"b"]))
    messages, span = seen.spans.send_begins("g", columns)
    assert span is not None
    assert all("traceparent" in message.properties for message in messages)


def test_a_send_that_fails_is_a_span_with_an_error(make: Any, seen: Seen) -> None:
    producer = make(FakeStore(script=[MessageIllegalError("no")]), observers=[SendSpans("group", seen.spans)])
    with pytest.raises(MessageIllegalError):
        producer.send(Message("orders", b"x"))
    span = seen.only()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "no")
    assert dict(span.attributes or {})["error.type"] == "MessageIllegalError"


def test_a_send_that_cannot_be_handed_over_leaves_no_span_open(make: Any, seen: Seen) -> None:
    producer = make(FakeStore(), observers=[SendSpans("group", seen.spans)])
    with pytest.raises(TopicNotExistError):
        producer.send(Message("nowhere", b"x"), timeout_s=0.1)
    assert seen.only().status.status_code is StatusCode.ERROR


def test_a_message_with_a_context_of_its_own_keeps_it(make: Any, seen: Seen) -> None:
    store = FakeStore()
    make(store, observers=[SendSpans("group", seen.spans)]).send(
        Message("orders", b"x", properties={"traceparent": PARENT})
    )
    assert properties_of(store) == [{"traceparent": PARENT}]


def test_a_span_that_is_not_sampled_puts_nothing_on_messages(make: Any) -> None:
    seen, store = Seen(sampler=ALWAYS_OFF), FakeStore()
    producer = make(store, observers=[SendSpans("group", seen.spans)])
    for _ in range(3):
        producer.send(Message("orders", b"x"))
    assert properties_of(store) == [{}] * 3
    assert seen.ended() == []


def test_a_send_continues_the_context_of_a_gateways_client(make: Any, seen: Seen) -> None:
    store = FakeStore()
    producer = make(store, observers=[SendSpans("group", seen.spans)])
    producer.send(Message("orders", b"x", properties={"TRACE_CONTEXT": PARENT}))
    span = seen.only()
    assert span.parent is not None
    assert (span.parent.trace_id, f"{span.parent.span_id:016x}") == (TRACE_ID, "b7ad6b7169203331")
    [stored] = properties_of(store)
    # the client's consumers get its own context, and raymq's consumers continue the send
    assert stored["TRACE_CONTEXT"] == PARENT
    assert stored["traceparent"].split("-")[1:3] == [f"{TRACE_ID:032x}", f"{span.context.span_id:016x}"]


def test_a_send_of_several_messages_is_linked_to_the_contexts_of_a_gateways_clients(make: Any, seen: Seen) -> None:
    producer = make(FakeStore(), observers=[SendSpans("group", seen.spans)])
    contexts = ({"TRACE_CONTEXT": PARENT}, {}, {"TRACE_CONTEXT": "00-trace"})
    producer.send_batch([Message("orders", b"x", properties=one) for one in contexts])
    span = seen.only()
    assert span.parent is None
    assert [f"{link.context.span_id:016x}" for link in span.links] == ["b7ad6b7169203331"]


@pytest.mark.parametrize("name", ["traceparent", "TRACE_CONTEXT"])
def test_a_listener_call_is_the_child_of_its_message(seen: Seen, name: str) -> None:
    inside = []

    def listener(message: MessageExt) -> None:
        inside.append(get_current_span().get_span_context().trace_id)

    consume(seen, listener, replace(MESSAGE, properties={name: PARENT}))
    span = seen.only()
    assert (span.name, span.kind) == ("process orders", SpanKind.CONSUMER)
    assert span.parent is not None
    assert (span.parent.trace_id, f"{span.parent.span_id:016x}") == (TRACE_ID, "b7ad6b7169203331")
    assert inside == [TRACE_ID]
    attributes = dict(span.attributes or {})
    assert attributes["messaging.consumer.group.name"] == "g"
    assert attributes["messaging.destination.partition.id"] == "broker-a:3"
    assert (attributes["raymq.queue_offset"], attributes["raymq.reconsume_times"]) == (7, 2)


def test_a_call_with_several_messages_is_linked_to_each_context_once(seen: Seen) -> None:
    other = PARENT.replace("b7ad6b7169203331", "b7ad6b7169203332")
    properties = [{"traceparent": PARENT}, {"traceparent": other}, {"traceparent": PARENT}, {}, {"traceparent": "?"}]
    consume(seen, lambda messages: None, [replace(MESSAGE, properties=one) for one in properties])
    span = seen.only()
    assert span.parent is None
    assert [f"{link.context.span_id:016x}" for link in span.links] == ["b7ad6b7169203331", "b7ad6b7169203332"]


def test_a_listener_that_raises_is_a_span_with_an_error(seen: Seen) -> None:
    def listener(message: MessageExt) -> None:
        raise ValueError("not today")

    consume(seen, listener, MESSAGE)
    assert seen.only().status.description == "ValueError: not today"


def test_a_poll_is_a_span_with_links(seen: Seen) -> None:
    seen.spans.received("g", "orders", [replace(MESSAGE, properties={"traceparent": PARENT}), MESSAGE], 1_000)
    span = seen.only()
    assert (span.name, span.kind, span.start_time) == ("receive orders", SpanKind.CLIENT, 1_000)
    assert [link.context.trace_id for link in span.links] == [TRACE_ID]


def consume(seen: Seen, listener: Any, call: Any) -> None:
    """Call a listener as a Listener actor calls it."""
    pool = ConsumePool(listener, threads=1, timeout_s=WAIT_S, group="g", hooks=[SpanHook(seen.spans)])
    request = ConsumeRequest([call], [0], None, topic="orders", of_lists=isinstance(call, list))
    pool.submit(request)
    assert request.done.wait(WAIT_S)


@pytest.mark.parametrize(("level", "names"), [("DEBUG", ["settle bills", "settle orders"]), ("INFO", [])])
def test_a_commit_is_a_span_for_each_topic_where_that_is_wanted(
    seen: Seen, caplog: pytest.LogCaptureFixture, level: str, names: list[str]
) -> None:
    caplog.set_level(level, "raymq.trace")
    seen.spans.settled("g", ["bills", "orders"], 1_000)
    assert [(span.name, span.start_time) for span in seen.ended()] == [(name, 1_000) for name in names]
    assert {(span.attributes or {}).get("messaging.consumer.group.name") for span in seen.ended()} <= {"g"}


def test_a_process_that_sets_no_provider_has_no_spans() -> None:
    program = """
import sys
from raymq.telemetry.trace.spans import spans_if_set
assert spans_if_set() is None
assert "opentelemetry" not in sys.modules
import opentelemetry.trace
assert spans_if_set() is None
from opentelemetry.sdk.trace import TracerProvider
opentelemetry.trace.set_tracer_provider(TracerProvider())
assert spans_if_set() is not None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
