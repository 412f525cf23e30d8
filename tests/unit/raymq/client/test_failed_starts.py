"""Tests that a client, and an object that a client makes, leave nothing open if they cannot be started. The servers and
Ray are fakes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import raymq
from raymq.client import client as module
from raymq.common.closing import closed_on_error
from raymq.common.errors import (
    ClientStateError,
    ClusterNotFoundError,
    InvalidArgumentError,
    ListenerError,
    ServiceNotAvailableError,
)
from raymq.data import shared_client
from raymq.data.shared_client import driver_client
from tests.support.clients.fakes import topic_route


class StartError(Exception):
    """The error of a start in these tests."""


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each close adds the name of the closed object."""
    names: list[str] = []
    monkeypatch.setattr(module, "find_credentials", lambda: None)
    monkeypatch.setattr(module, "attach_ray", lambda address: True)
    monkeypatch.setattr(shared_client, "attach_ray", lambda address: True)
    monkeypatch.setattr(ray, "shutdown", lambda: names.append("Ray"))
    return names


def fail(*arguments: Any, **keywords: Any) -> Any:
    raise StartError


def test_the_error_of_the_block_is_raised_and_the_error_of_the_close_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def close() -> None:
        raise ServiceNotAvailableError("no broker")

    with pytest.raises(StartError), closed_on_error(close, "the consumer"):
        raise StartError
    assert [record.getMessage() for record in caplog.records] == [
        "closing the consumer after an error failed: no broker"
    ]
    with closed_on_error(fail, "the consumer"):
        pass


@pytest.mark.parametrize(
    ("nameservers", "error"), [(list, ClusterNotFoundError), (fail, StartError)], ids=["none", "no answer"]
)
def test_a_cluster_without_raymq_leaves_no_connection_to_ray(
    monkeypatch: pytest.MonkeyPatch, closed: list[str], nameservers: Any, error: type[Exception]
) -> None:
    monkeypatch.setattr(module, "running_nameservers", nameservers)
    with pytest.raises(error):
        raymq.connect()
    assert closed == ["Ray"]


def test_a_client_that_cannot_be_made_leaves_no_connection_to_ray(
    monkeypatch: pytest.MonkeyPatch, closed: list[str]
) -> None:
    monkeypatch.setattr(module, "running_nameservers", lambda: ["nameserver-0"])
    monkeypatch.setattr(module, "Client", fail)
    with pytest.raises(StartError):
        raymq.connect()
    assert closed == ["Ray"]


def test_a_failing_progress_callback_leaves_no_embedded_raymq(
    monkeypatch: pytest.MonkeyPatch, closed: list[str], tmp_path: Path
) -> None:
    cluster = SimpleNamespace(start=lambda report: None, stop=lambda: closed.append("raymq"))
    monkeypatch.setattr(module, "EmbeddedCluster", lambda settings: cluster)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartError):
        raymq.connect(embedded=True, data_dir=tmp_path, progress=fail)
    assert closed == ["raymq"]


def test_a_dataset_that_cannot_connect_leaves_no_connection_to_ray(
    monkeypatch: pytest.MonkeyPatch, closed: list[str]
) -> None:
    monkeypatch.setattr(shared_client, "connect", fail)
    with pytest.raises(StartError), driver_client(None):
        pytest.fail("unreachable")
    assert closed == ["Ray"]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[raymq.Client]:
    """Yield a client of a cluster without servers."""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node-1"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(module, "running_nameservers", list)
    client = module.Client(lambda: None)
    unused = lambda *arguments: None  # noqa: E731
    client.heartbeats = SimpleNamespace(  # type: ignore[assignment]  # no broker gets heartbeats
        set_producer=unused, set_consumer=unused, remove=unused, close=unused, client_id="me"
    )
    yield client
    client.close()


def test_a_transaction_producer_that_is_refused_leaves_no_producer(client: raymq.Client) -> None:
    async def check(message: raymq.MessageExt) -> None: ...

    for wrong in (None, check):
        with pytest.raises(InvalidArgumentError, match="check="):
            client.transaction_producer("payments", check=wrong)  # type: ignore[arg-type]  # refused
    assert client._open == {}


@pytest.mark.parametrize(
    ("make", "owner", "wrong", "meant"),
    [
        ("producer", "a producer", "timeout_s", "'send_timeout_s'"),
        ("async_producer", "a producer", "max_message_size", "'max_message_size_bytes'"),
        ("pull_consumer", "a pull consumer", "autocommit", "'auto_commit'"),
        ("simple_consumer", "a simple consumer", "order", "'ordered'"),
        ("push_consumer", "a push consumer", "thread", "'threads'"),
        ("push_consumer", "a push consumer", "xyzzy", "choose from its options: allocat"),
    ],
)
def test_an_unknown_option_names_its_owner_and_similar_options(
    client: raymq.Client, make: str, owner: str, wrong: str, meant: str
) -> None:
    with pytest.raises(TypeError, match=f"^{owner} has no option '{wrong}'; ") as caught:
        getattr(client, make)("g", **{wrong: 1})
    assert meant in str(caught.value)
    assert client._open == {}


@pytest.mark.parametrize("make", ["async_pull_consumer", "async_simple_consumer"])
def test_an_async_consumer_without_an_event_loop_leaves_no_consumer(client: raymq.Client, make: str) -> None:
    with pytest.raises(ClientStateError, match="event loop"):
        getattr(client, make)("billing")
    assert client._open == {}


def test_a_push_consumer_raises_the_reason_of_its_start_and_not_of_its_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from raymq.client.consumer.push import consumer as push
    from raymq.client.consumer.push.subscription import PushSubscription

    caplog.set_level(logging.WARNING)
    routes = SimpleNamespace(brokers=lambda: ["broker-a"], wait=lambda topic, timeout_s: topic_route(a=1))
    ended: list[PushSubscription] = []

    def stop(timeout_s: float, printer: Any) -> str:
        return "its listener does not answer"

    instance = SimpleNamespace(stop=stop, ask_listener=lambda method, timeout_s: "Traceback: no module shop")
    monkeypatch.setattr(push.PushConsumer, "_start_listener", lambda *arguments, **keywords: instance)
    monkeypatch.setattr(push, "check_expressions", lambda group, member, expressions: None)
    monkeypatch.setattr(push, "check_modes", lambda group, mode, brokers: None)
    consumer = push.PushConsumer(
        "billing",
        routes=routes,  # type: ignore[arg-type]  # a fake
        start=SimpleNamespace(),  # type: ignore[arg-type]  # unused
        options={},
        track=lambda subscription: subscription,
        on_close=ended.append,
    )
    consumer.subscribe("orders").on_message(print)
    with pytest.raises(ListenerError, match="no module shop"):
        consumer.start()
    assert len(ended) == 1
    [text] = [record.getMessage() for record in caplog.records]
    assert "its listener does not answer" in text
