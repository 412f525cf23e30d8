"""Benchmark of request and reply, compared with single sends of the same producer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import raymq
from raymq.common.message import MessageExt
from raymq.tools.bench.latencies import percentile
from tests.bench.cluster import new_topic
from tests.bench.figures import Figure, Goal
from tests.bench.machine import latencies_us

BODY = b"x" * 100
TIMEOUT_S = 30.0
_names = count()


def echo(message: MessageExt) -> object:
    """Message listener that replies to each request with the request's body."""
    import raymq

    return raymq.reply(message.body)


def requests(client: raymq.Client, *, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the time from a request to its reply: of stored requests, and of requests that are not stored. The listener
    that replies runs in another process."""
    topic = new_topic(client, f"requests-{next(_names)}")
    number = max(100, int(scale * 2000))
    message = raymq.Message(topic, BODY)
    figures = [
        Figure("requests", f"request and reply, p{percent}", "us", False, [Goal("<=", 3.0, "send")] * (percent == 50))
        for percent in (50, 99)
    ]
    figures += [
        Figure(
            "requests",
            f"request that is not stored, p{percent}",
            "us",
            False,
            [Goal("<=", 2.0, "send")] * (percent == 50),
        )
        for percent in (50, 99)
    ]
    plain = new_topic(client, f"sends-{next(_names)}")
    lone = raymq.Message(plain, BODY)
    consumer = client.push_consumer(f"{topic}-group", request_threads=4).subscribe(topic)
    with consumer.on_message(echo).start(), client.producer("bench") as producer:
        producer.request(message, timeout_s=TIMEOUT_S)
        for _ in range(rounds):
            asked = latencies_us(lambda: producer.request(message, timeout_s=TIMEOUT_S), number)
            sent = latencies_us(lambda: producer.send(lone), number)
            direct = latencies_us(lambda: producer.request(message, timeout_s=TIMEOUT_S, durable=False), number)
            for figure, percent, times in zip(figures, (50, 99) * 2, (asked, asked, direct, direct), strict=True):
                figure.add_round(
                    lambda percent=percent, times=times: percentile(times, percent),
                    {"send": lambda percent=percent: percentile(sent, percent)},
                )
    yield from figures
