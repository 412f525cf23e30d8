"""Tests of message tracing: a traced client records the history of its messages as RocketMQ does, and `Admin.trace`
combines the records of one message."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import raymq
from raymq.client.admin.trace import MessageTrace
from raymq.common.errors import InvalidArgumentError, TopicNotExistError
from raymq.common.names import TRACE_TOPIC
from raymq.telemetry.trace.records import ContextCode, TracedType, decode_records
from tests.support.clusters.cluster import user_environment
from tests.support.clusters.commands import run_here
from tests.support.clusters.page_example import assert_prints_what_it_says
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


@pytest.fixture
def traced(mq: raymq.Client) -> Iterator[raymq.Client]:
    with raymq.connect(trace=True) as client:
        yield client


def life(mq: raymq.Client, message_id: str, *, attempts: int = 0) -> MessageTrace:
    """Wait until the trace of a message is stored. Returns the trace."""

    def look() -> MessageTrace | None:
        try:
            found = mq.admin.trace(message_id)
        except InvalidArgumentError:
            return None
        ended = [one for one in found.life.attempts if one.code is not None]
        return found if len(ended) >= attempts else None

    found = eventually(look, f"the trace of {message_id}")
    assert found is not None
    return found


def test_the_example_of_the_page_prints_the_documented_output(mq: raymq.Client) -> None:
    assert_prints_what_it_says("trace.md")


def test_sends_of_every_kind_are_traced(mq: raymq.Client, traced: raymq.Client, topic: str) -> None:
    with traced.producer("shop") as producer:
        alone = [producer.send(raymq.Message(topic, b"%d" % i, "paid", [f"o-{i}"])) for i in range(3)]
        together = producer.send_batch([raymq.Message(topic, b"batch-%d" % i) for i in range(5)])
        futures = [producer.send_async(raymq.Message(topic, b"async")) for _ in range(5)]
        later = producer.send(raymq.Message(topic, b"later", delay_level=18))
        sent = [*alone, *together, *(future.result() for future in futures), later]
    found = {one.message_id: life(mq, one.message_id).life for one in sent}
    for result in sent:
        [pub] = found[result.message_id].sends
        assert (pub.group, pub.topic, pub.offset_message_id) == ("shop", topic, result.offset_message_id)
    [pub] = found[alone[1].message_id].sends
    assert (pub.tags, pub.keys, pub.body_length, pub.success) == ("paid", "o-1", 1, True)
    assert found[later.message_id].sends[0].message_type is TracedType.DELAY
    # A trace message has the keys of the user's message that it describes, so a query by key finds the trace message.
    # RocketMQ does the same.
    texts = [message.body.decode() for message in mq.admin.query_by_key(TRACE_TOPIC, "o-2")]
    assert alone[2].message_id in {record.message_id for text in texts for record in decode_records(text).records}
    # The statistics count only the user's messages, because trace messages are not traced.
    assert traced.trace_statistics().sent == len(sent)


def test_a_table_is_traced_row_by_row(mq: raymq.Client, traced: raymq.Client, topic: str) -> None:
    pa = pytest.importorskip("pyarrow")
    with traced.producer("shop") as producer:
        producer.send_table(topic, pa.table({"body": [b"a", b"b"], "keys": ["row-1", "row-2"]}))
    eventually(lambda: traced.trace_statistics().sent == 2, "two records")
    [message] = mq.admin.query_by_key(topic, "row-2")
    [pub] = life(mq, message.message_id).life.sends
    assert (pub.keys, pub.body_length) == ("row-2", 1)


def test_a_listener_that_fails_at_first_is_seen_to(mq: raymq.Client, traced: raymq.Client, topic: str) -> None:
    def listener(message: raymq.MessageExt) -> raymq.ConsumeStatus | None:
        if message.reconsume_times == 0:
            raise ValueError("not yet")
        return raymq.ConsumeLater(-1) if message.body == b"dead" else None  # type: ignore[return-value]

    with traced.producer("shop") as producer:
        good, dead = (producer.send(raymq.Message(topic, body)) for body in (b"good", b"dead"))
    group = f"g-{topic}"
    consumer = traced.push_consumer(group, consume_from=FIRST).subscribe(topic).on_message(listener)
    with consumer.start():
        found = {result.message_id: life(mq, result.message_id, attempts=2) for result in (good, dead)}
        states = eventually(
            lambda: (
                tracks
                if (tracks := [mq.admin.trace(one.message_id).tracks[0].state.value for one in (good, dead)])
                == ["consumed", "dead"]
                else None
            ),
            "the states of both",
        )
    assert states == ["consumed", "dead"]
    codes = {name: [one.code for one in trace.life.attempts] for name, trace in found.items()}
    assert codes[good.message_id] == [ContextCode.EXCEPTION, ContextCode.SUCCESS]
    assert codes[dead.message_id] == [ContextCode.EXCEPTION, ContextCode.FAILED]
    assert [one.retry_times for one in found[good.message_id].life.attempts] == [0, 1]
    assert {one.group for one in found[good.message_id].life.attempts} == {group}
    events = [event.event for event in found[good.message_id].events()]
    assert sorted(events) == ["delivered", "delivered", "sent", "stored"]


def test_the_trace_has_a_listeners_last_call_after_its_stop(mq: raymq.Client, traced: raymq.Client, topic: str) -> None:
    with traced.producer("shop") as producer:
        sent = producer.send(raymq.Message(topic, b"x"))
    group = f"g-{topic}"
    subscription = (
        traced.push_consumer(group, consume_from=FIRST).subscribe(topic).on_messages(lambda messages: None).start()
    )
    eventually(lambda: subscription.status()[0].consumed == 1, "the message to be consumed")
    subscription.stop()
    [attempt] = life(mq, sent.message_id, attempts=1).life.attempts
    assert attempt.code is ContextCode.SUCCESS


def test_polls_transactions_and_recalls_are_traced(mq: raymq.Client, traced: raymq.Client, topic: str) -> None:
    with traced.transaction_producer("payments", check=lambda message: None) as producer:
        with producer.transaction(raymq.Message(topic, b"paid")) as done:
            pass
        undone = producer.transaction(raymq.Message(topic, b"not paid"))
        undone.rollback()
    with traced.producer("shop") as producer:
        later = producer.send(raymq.Message(topic, b"later", deliver_at_ms=time.time_ns() // 1_000_000 + 3_600_000))
        assert later.recall_handle is not None
        producer.recall(topic, later.recall_handle)
    with traced.pull_consumer(f"g-{topic}", consume_from=FIRST) as consumer:
        consumer.subscribe(topic)
        polled = eventually(lambda: consumer.poll(timeout_s=1.0), "the message")
    assert b"paid" in [message.body for message in polled]
    found = life(mq, done.transaction_id, attempts=1).life
    assert [pub.message_type for pub in found.sends] == [TracedType.HALF]
    assert [end.state for end in found.transactions] == ["COMMIT_MESSAGE"]
    [recall] = eventually(lambda: life(mq, later.message_id).life.recalls, "the recall")
    assert recall.success
    assert [end.state for end in life(mq, undone.transaction_id).life.transactions] == ["ROLLBACK_MESSAGE"]


def test_the_command_shows_a_life(mq: raymq.Client, traced: raymq.Client, topic: str) -> None:
    with traced.producer("shop") as producer:
        sent = producer.send(raymq.Message(topic, b"x"))
    life(mq, sent.message_id)
    address = ["--address", ray.get_runtime_context().gcs_address]
    shown = subprocess.run(
        [str(Path(sys.executable).with_name("raymq")), "trace", sent.message_id, *address],
        env={**user_environment(), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "shop" in shown.stdout
    found = json.loads(run_here("trace", sent.message_id, "--json", *address).stdout)
    assert [event["event"] for event in found["events"]] == ["sent", "stored"]
    by_offset = json.loads(run_here("trace", sent.offset_message_id, "--topic", topic, "--json", *address).stdout)
    assert by_offset["message_id"] == sent.message_id
    refused = run_here("trace", "0" * 32, *address)
    assert refused.returncode == 1
    assert "no record of message" in refused.stderr


def test_without_a_trace_the_history_comes_from_the_stores(mq: raymq.Client, topic: str) -> None:
    with mq.producer("quiet") as producer:
        sent = producer.send(raymq.Message(topic, b"x"))
    found = mq.admin.trace(sent.message_id, topic=topic)
    assert not found.life
    assert [event.event for event in found.events()] == ["stored"]
    assert mq.trace_statistics().sent == 0
    with pytest.raises(InvalidArgumentError, match="pass its topic"):
        mq.admin.trace(sent.message_id)
    with pytest.raises(InvalidArgumentError, match="neither in topic"):
        mq.admin.trace("0" * 32, topic=topic)


def test_a_trace_topic_of_ones_own_must_exist(mq: raymq.Client, topic: str) -> None:
    with pytest.raises(TopicNotExistError):
        raymq.connect(trace="no-such-topic")
    with raymq.connect(trace=topic) as client, client.producer("shop") as producer:
        sent = producer.send(raymq.Message(topic, b"to the trace topic itself"))
    assert mq.admin.query_by_id(topic, sent.message_id)
    assert [message.body for message in mq.admin.query_by_key(topic, sent.message_id)] == [b"to the trace topic itself"]
