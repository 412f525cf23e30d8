"""Tests of the metrics of a program that sends and consumes. The tests read them from Ray's agents, as
Prometheus does."""

from __future__ import annotations

import os
import time

import raymq
from tests.support.metrics.scrape import Scrape, scraped

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
SENT, COMMITTED = 1000, 400
GAUGES_GONE_S = 45.0
"""Maximum number of seconds until a gauge disappears. A gauge is exported every 10 s, and dropped 20 s after its last
export; the remaining time is for a busy machine."""
QUIET_S = 60.0


def failing(message: raymq.MessageExt) -> None:
    raise RuntimeError("this message cannot be consumed")


def commit_some(consumer: raymq.PullConsumer) -> None:
    """Consume exactly COMMITTED messages, and commit them."""
    left = COMMITTED
    while left:
        left -= len(consumer.poll(left, timeout_s=20))
    consumer.commit()


def client_figures_are_there(found: Scrape, topic: str, dead: str) -> bool:
    return (
        found.sum("raymq_send_cost_time_milliseconds_count", topic=topic, invocation_status="success") == SENT
        and found.sum("raymq_delivery_latency_milliseconds_count", topic=topic, consumer_group="metrics-g") >= COMMITTED
        and found.sum("raymq_throughput_out_total", topic=topic, consumer_group="metrics-g") > 0
        and found.sum("raymq_process_time_milliseconds_count", topic=dead, invocation_status="failure") == 1
        and found.sum("raymq_await_time_milliseconds_count", topic=dead, consumer_group="metrics-dead") == 1
    )


def server_figures_are_there(found: Scrape, topic: str) -> bool:
    return (
        found.sum("raymq_messages_in_total", topic=topic) == SENT
        and found.sum("raymq_consumer_lag_messages", topic=topic, consumer_group="metrics-g") == SENT - COMMITTED
        and found.sum("raymq_send_to_dlq_messages_total", consumer_group="metrics-dead") == 1
        and found.sum("raymq_dead_letters", consumer_group="metrics-dead") == 1
    )


def test_sent_consumed_and_dead_messages_are_scraped(mq: raymq.Client, topic: str) -> None:
    dead = "metrics-dead-topic"
    mq.admin.create_topic(dead, queues=1)
    push = mq.push_consumer("metrics-dead", consume_from=FIRST, max_reconsume_times=0).subscribe(dead)
    running = push.on_message(failing).start()
    with mq.pull_consumer("metrics-g", consume_from=FIRST, auto_commit=False) as consumer, mq.producer() as producer:
        for number in range(SENT):
            producer.send_async(raymq.Message(topic, b"%d" % number))
        producer.flush()
        producer.send(raymq.Message(dead, b"dies"))
        consumer.subscribe(topic)
        commit_some(consumer)
        scraped(lambda found: client_figures_are_there(found, topic, dead), "the clients' figures")
        found = scraped(lambda found: server_figures_are_there(found, topic), "the servers' figures")
        assert found.sum("raymq_up", role="pull") >= 1
        if os.environ.get("RAYMQ_SOAK"):
            time.sleep(QUIET_S)
            assert server_figures_are_there(found := Scrape.now(), topic)
            assert client_figures_are_there(found, topic, dead)
    running.close()
    if os.environ.get("RAYMQ_SOAK"):
        of_group = {"consumer_group": "metrics-g"}
        scraped(
            lambda found: not found.values("raymq_consumer_cached_messages", **of_group),
            "the end of the consumer's gauges",
            GAUGES_GONE_S,
        )
