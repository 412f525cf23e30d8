"""Tests of OpenTelemetry: a send and the listener call for its message are in one trace, although they run in different
processes."""

from __future__ import annotations

import json

import raymq
from tests.support.clusters.page_example import run_program

PROGRAM = """
import json, time
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import raymq

TOPIC = "spans-of-a-program"
DONE = "spans-seen-by-listeners"
PAID = "spans-of-transactions"


class Listener:
    # A provider of the listener's own process, set when it is loaded there.
    def __setstate__(self, state):
        trace.set_tracer_provider(TracerProvider())
        self.producer = None

    def __getstate__(self):
        return {"none": None}

    def __call__(self, message):
        if message.reconsume_times == 0:
            raise ValueError("comes again")
        if self.producer is None:
            self.producer = raymq.connect().producer("done")
        context = trace.get_current_span().get_span_context()
        self.producer.send(raymq.Message(DONE, b"%032x" % context.trace_id))


exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET

with raymq.connect() as mq:
    for topic in TOPIC, DONE, PAID:
        mq.admin.create_topic(topic, queues=1)
    with mq.producer("spans") as producer, provider.get_tracer("program").start_as_current_span("root") as root:
        producer.send(raymq.Message(TOPIC, b"x"))
        with mq.transaction_producer("payments", check=lambda message: None) as payments:
            with payments.transaction(raymq.Message(PAID, b"x", properties={"mine": "1"})):
                pass
    with mq.pull_consumer("paid", consume_from=FIRST) as consumer:
        consumer.subscribe(PAID)
        until_s = time.monotonic() + 90
        while not (paid := consumer.poll()) and time.monotonic() < until_s:
            pass
    with mq.push_consumer("spans", consume_from=FIRST).subscribe(TOPIC).on_message(Listener()).start():
        with mq.pull_consumer("collect", consume_from=FIRST) as consumer:
            consumer.subscribe(DONE)
            until_s = time.monotonic() + 90
            while not (seen := consumer.poll()) and time.monotonic() < until_s:
                pass

spans = [(span.name, f"{span.context.trace_id:032x}", len(span.links)) for span in exporter.get_finished_spans()]
print(json.dumps({
    "root": f"{root.get_span_context().trace_id:032x}",
    "listener": [message.body.decode() for message in seen],
    "next": [message.properties.get("traceparent", "").split("-")[1:2] for message in seen],
    "spans": spans,
    "paid": [(sorted(message.properties), message.properties.get("traceparent", "").split("-")[1]) for message in paid],
}))
"""


def test_a_send_and_its_listener_call_after_a_retry_share_a_trace(mq: raymq.Client) -> None:
    found = json.loads(run_program(PROGRAM))
    root = found["root"]
    assert found["listener"] == [root]
    # A message that a listener sends belongs to the same trace as the message that the listener received.
    assert found["next"] == [[root]]
    spans = {name: (trace_id, links) for name, trace_id, links in found["spans"]}
    assert spans["send spans-of-a-program"] == (root, 0)
    assert spans["receive spans-seen-by-listeners"][1] == 1
    assert spans["send spans-of-transactions"] == (root, 0)
    assert found["paid"] == [[["mine", "traceparent"], root]]
