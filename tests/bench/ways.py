"""The kinds of producing and consuming calls. Each is a function that can be called repeatedly, to measure the cost of
metrics or tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import raymq
from tests.bench.cluster import joined_consumer, new_topic
from tests.bench.consuming.consume import drain_columns, drain_objects
from tests.bench.produce import send_async_each, send_tables

BODY = b"x" * 1024
PREPARED = 60_000
"""Number of messages that a consumer reads in one measured call."""
_names = count()


def ways(client: raymq.Client) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """Yield each kind of producing and consuming call of a client: its name, its number of messages, and a function
    that makes the call."""
    topic = new_topic(client, f"cost-{next(_names)}")
    with client.producer("bench") as producer:
        message = raymq.Message(topic, BODY)
        yield "send, one by one", 500, lambda: [producer.send(message) for _ in range(500)] and None
        yield "send_async", 5000, lambda: send_async_each(producer, topic, BODY, 5000)
        yield "send_table(5000)", 20_000, lambda: send_tables(producer, topic, BODY, 20_000)
        full = new_topic(client, f"cost-{next(_names)}")
        send_tables(producer, full, BODY, PREPARED)
    for name, drain in (("poll", drain_objects), ("poll_table", drain_columns)):
        with joined_consumer(client, f"{full}-{name}", full) as consumer:

            def again(consumer: raymq.PullConsumer = consumer, drain: Callable[..., None] = drain) -> None:
                for queue in consumer.assignment():
                    consumer.seek_to_begin(queue)
                drain(consumer, PREPARED)

            yield name, PREPARED, again
