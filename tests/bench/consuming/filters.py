"""Benchmark of filters that pass 1 in 1,000 messages, compared with reading all messages and filtering in the
client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Final

import pyarrow as pa

import raymq
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients
from tests.bench.cluster import FROM_FIRST, new_topic
from tests.bench.figures import Figure, Goal
from tests.bench.produce import rate

ONE_IN: Final = 1000
ALL: Final = "all, filtered in the client"
BODY: Final = b"x" * 1024
TABLE_ROWS: Final = 10_000

_groups = count()


class ElsewhereClients(StorageClients):
    """Storage clients that read over TCP, as if on another node. `fetched_bytes` counts the bytes of fetched
    records."""

    def __init__(self) -> None:
        super().__init__("elsewhere")
        self.fetched_bytes = 0

    def get(self, name: str) -> StorageClient:
        client = super().get(name)
        if "fetch" not in vars(client):
            vars(client)["fetch"] = self._counting(client.fetch)
        return client

    def _counting(self, fetch: Callable[..., list[FetchResult]]) -> Callable[..., list[FetchResult]]:
        def counting(
            requests: Sequence[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float
        ) -> list[FetchResult]:
            results = fetch(requests, max_bytes, wait_s, timeout_s)
            self.fetched_bytes += sum(len(result.records) for result in results)
            return results

        return counting


def filters(client: raymq.Client, *, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the number of messages per second that a filter checks, for `scale` × 1,000,000 messages of 1 KiB in 4
    queues.

    The filter is measured with reads over a lane (direct socket connection) and with direct reads of the store's files.
    Another measurement is the number of bytes sent over the lane.
    """
    total = max(5, int(scale * 100)) * TABLE_ROWS
    topic = new_topic(client, "filters")
    _send(client, topic, total)
    sql, predicate = raymq.sql(f"price > {ONE_IN - 2}"), raymq.predicate(_is_dear)
    moved = Figure("filter", "bytes of records over a lane, raymq.sql", "bytes", False)
    with raymq.connect() as remote:
        remote.storages = elsewhere = ElsewhereClients()
        for where, here in (("over a lane", remote), ("in place", client)):
            for name, expression, goals in (
                ("raymq.sql", sql, [Goal(">=", 5.0, ALL)]),
                ("raymq.predicate", predicate, []),
            ):
                figure = Figure("filter", f"{name}, 1 in {ONE_IN:,}, {where}", "msg/s", True, goals)
                for _ in range(rounds):
                    bytes_of: list[int] = []

                    def filtered(here: Any = here, expression: Any = expression) -> None:
                        before = elsewhere.fetched_bytes
                        _read_filtered(here, topic, expression, total // ONE_IN)
                        bytes_of.append(elsewhere.fetched_bytes - before)

                    def everything(here: Any = here) -> None:
                        before = elsewhere.fetched_bytes
                        _read_all(here, topic, total)
                        bytes_of.append(elsewhere.fetched_bytes - before)

                    figure.add_round(lambda: rate(filtered, total), {ALL: lambda: rate(everything, total)})
                    if here is remote and expression is sql:
                        moved.add_round(lambda: float(bytes_of[0]), {ALL: lambda: float(bytes_of[1])})
                yield figure
    yield moved


def _is_dear(message: raymq.MessageExt) -> bool:
    return float(message.properties["price"]) > ONE_IN - 2


def _send(client: raymq.Client, topic: str, total: int) -> None:
    prices = [[("price", str(price)), ("region", "eu")] for price in range(ONE_IN)] * (TABLE_ROWS // ONE_IN)
    table = pa.table({"body": [BODY] * TABLE_ROWS, "properties": pa.array(prices, pa.map_(pa.string(), pa.string()))})
    with client.producer("bench") as producer:
        for _ in range(total // TABLE_ROWS):
            producer.send_table(topic, table)


def _consumer(client: raymq.Client, topic: str, expression: Any) -> Any:
    """Return a consumer to which all queues are assigned directly, from their first messages. So the benchmark need not
    wait until a consumer group has formed."""
    consumer = client.pull_consumer(f"filters-{next(_groups)}", consume_from=FROM_FIRST, auto_commit=False)
    consumer.assign(consumer.fetch_message_queues(topic), expression)
    return consumer


def _read_filtered(client: raymq.Client, topic: str, expression: Any, wanted: int) -> None:
    with _consumer(client, topic, expression) as consumer:
        _until(wanted, lambda: len(consumer.poll(5000)))


def _read_all(client: raymq.Client, topic: str, total: int) -> None:
    dear = 0
    with _consumer(client, topic, "*") as consumer:

        def poll() -> int:
            nonlocal dear
            messages = consumer.poll(5000)
            dear += sum(map(_is_dear, messages))
            return len(messages)

        _until(total, poll)
    assert dear == total // ONE_IN


def _until(wanted: int, poll: Callable[[], int]) -> None:
    found, until_s = 0, time.monotonic() + 300
    while found < wanted:
        found += poll()
        if time.monotonic() > until_s:
            raise TimeoutError(f"{found} of {wanted} messages came within 5 minutes")
    assert found == wanted
