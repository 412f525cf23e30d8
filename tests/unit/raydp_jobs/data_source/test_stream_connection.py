"""Tests of the connection of a Spark 4 stream, without Spark 4: fakes replace Spark's modules and the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.common.errors import ServiceNotAvailableError
from tests.support.spark.fake_spark4 import with_fake_spark4


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the module of the stream's reader, with empty classes in place of Spark 4's classes."""
    with with_fake_spark4(monkeypatch, "stream_reader") as [stream_reader]:
        yield stream_reader


class Cluster:
    """Fake of a cluster's client that counts its closes."""

    def __init__(self) -> None:
        self.closes = 0

    def close(self) -> None:
        self.closes += 1


def reader_of(module: Any, monkeypatch: pytest.MonkeyPatch, source: Any) -> tuple[Any, list[Cluster]]:
    """Return a reader whose batches come from `source`, and the list of its connections."""
    made: list[Cluster] = []

    def connect(address: str, *, namespace: str) -> Cluster:
        made.append(Cluster())
        return made[-1]

    monkeypatch.setattr(module, "connect", connect)
    monkeypatch.setattr(module, "TopicSource", source)
    address = SimpleNamespace(user=None, address="10.0.0.1:6379", namespace="")
    settings = SimpleNamespace(address=address, parallelism=1)
    return module.TopicStreamReader(settings, {"topic": "orders"}, ["value"]), made


def test_a_source_that_cannot_be_made_leaves_no_connection(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise ServiceNotAvailableError("no NameServer answers")

    reader, made = reader_of(module, monkeypatch, fail)
    for _ in range(2):
        with pytest.raises(ServiceNotAvailableError):
            reader._topics()
    reader.stop()
    assert [client.closes for client in made] == [1, 1]


def test_a_source_that_fails_at_its_end_leaves_no_connection(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(query: str) -> None:
        raise ServiceNotAvailableError("no broker answers")

    reader, made = reader_of(module, monkeypatch, lambda *arguments, **keywords: SimpleNamespace(stop=stop))
    reader._topics()
    with pytest.raises(ServiceNotAvailableError):
        reader.stop()
    assert [client.closes for client in made] == [1]
