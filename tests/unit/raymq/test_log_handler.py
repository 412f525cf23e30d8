"""Tests of the logging handler that sends log records as messages: content of the messages, records that are not sent,
full buffers, failures and closing. The tests use no cluster."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from raymq import log_handler
from raymq.client import client as client_module
from raymq.common.errors import ClientStateError, InvalidArgumentError, ServiceNotAvailableError
from raymq.log_handler import RaymqHandler
from tests.support.history.waiting import eventually


class Producer:
    """Fake producer that keeps its messages. `hold` blocks the caller of a send, and `error` is the error that each
    send raises."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.error: Exception | None = None
        self.refusal: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self.closed = False

    def send_async(self, message: Any) -> Future[Any]:
        assert self.go_on.wait(60)
        if self.refusal is not None:
            raise self.refusal
        self.messages.append(message)
        future: Future[Any] = Future()
        if self.error is None:
            future.set_result(None)
        else:
            future.set_exception(self.error)
        return future

    def close(self) -> None:
        self.closed = True


class Client:
    def __init__(self) -> None:
        self.made = Producer()
        self.closed = False

    def producer(self, group: str) -> Producer:
        assert group == "logs"
        return self.made

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("shop.payments")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    yield logger
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True


def add(logger: logging.Logger, client: Client, **options: Any) -> RaymqHandler:
    handler = RaymqHandler("logs", client=client, **options)  # type: ignore[arg-type]  # a fake
    logger.addHandler(handler)
    return handler


def test_a_record_becomes_a_message(logger, client):
    handler = add(logger, client)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.debug("not logged")
    logger.warning("%s is late by %d s", "o-17", 5)
    handler.flush()
    [message] = client.made.messages
    assert (message.topic, message.body, message.tags) == ("logs", b"WARNING o-17 is late by 5 s", "WARNING")
    assert (message.properties["logger"], message.properties["level"]) == ("shop.payments", "WARNING")
    assert handler.statistics().sent == 1


def test_the_text_is_that_of_the_moment(logger, client):
    client.made.go_on.clear()
    handler, rows = add(logger, client), ["a"]
    logger.info("%s", rows)
    rows.append("b")
    client.made.go_on.set()
    handler.flush()
    assert client.made.messages[0].body == b"['a']"


@pytest.mark.parametrize("name", ["raymq", "raymq.client.producer.senders.sender", "ray", "ray.data"])
def test_log_records_of_raymq_and_ray_are_not_sent(client, name):
    own = logging.getLogger(name)
    handler = add(own, client)
    try:
        own.error("the broker is away")
        logging.getLogger("rays").addHandler(handler)
        logging.getLogger("rays").error("of another")
        handler.flush()
        assert [message.body for message in client.made.messages] == [b"of another"]
    finally:
        own.removeHandler(handler)
        logging.getLogger("rays").removeHandler(handler)
        handler.close()


def test_a_full_buffer_drops_records_and_logs_the_number(logger, client):
    client.made.go_on.clear()
    handler = add(logger, client, capacity=3)
    logger.info("first")
    eventually(lambda: not handler._buffer, "the thread holds the first one")
    for number in range(5):
        logger.info("%d", number)
    assert handler.statistics().dropped == 2
    client.made.go_on.set()
    handler.flush()
    bodies = [message.body.decode() for message in client.made.messages]
    assert bodies == ["first", "2 log records were dropped: the buffer of 3 was full", "0", "1", "2"]


@pytest.mark.parametrize("way", ["error", "refusal"])
def test_a_cluster_that_is_away_does_no_harm(logger, client, way):
    setattr(client.made, way, ServiceNotAvailableError("no broker"))
    handler = add(logger, client)
    logger.error("x")
    handler.flush()
    found = handler.statistics()
    assert (found.sent, found.failed, found.waiting, found.last_error) == (0, 1, 0, "no broker")


def test_a_record_that_cannot_be_formatted_is_reported_as_logging_does(logger, client, capsys):
    handler = add(logger, client)
    for text, argument in (("%d", "no number"), ("next", None)):
        arguments = () if argument is None else (argument,)
        handler.handle(logging.LogRecord("shop.payments", logging.INFO, "here.py", 1, text, arguments, None))
    handler.flush()
    assert [message.body for message in client.made.messages] == [b"next"]
    assert "--- Logging error ---" in capsys.readouterr().err


def test_closing_sends_the_rest_and_leaves_the_client_open(logger, client):
    handler = add(logger, client)
    for number in range(2_000):
        logger.info("%d", number)
    handler.close()
    handler.close()
    assert [int(message.body) for message in client.made.messages] == list(range(2_000))
    assert (client.made.closed, client.closed) == (True, False)
    logger.info("too late")
    assert handler.statistics().dropped == 1


def test_closing_waits_no_longer_than_it_may(logger, client):
    client.made.go_on.clear()
    handler = add(logger, client, flush_timeout_s=0.05)
    logger.info("x")
    handler.flush()
    handler.close()
    assert handler.statistics().waiting == 1
    client.made.go_on.set()
    handler._thread.join(60)
    assert handler.statistics().sent == 1


@pytest.mark.parametrize("options", [{"capacity": 0}, {"flush_timeout_s": -1}])
def test_invalid_options_are_refused(client, options):
    with pytest.raises(InvalidArgumentError):
        RaymqHandler("logs", client=client, **options)


@pytest.mark.parametrize("own", [True, False], ids=["own client", "given client"])
@pytest.mark.parametrize("step", ["producer", "thread"])
def test_a_handler_that_cannot_start_leaves_nothing_open(client, monkeypatch, step, own):
    def fail(*arguments, **keywords):
        raise ClientStateError("Python starts no thread while the program exits")

    monkeypatch.setattr(client_module, "connect", lambda address: client)
    if step == "producer":
        monkeypatch.setattr(client, "producer", fail)
    else:
        monkeypatch.setattr(log_handler, "require_daemon", fail)
    with pytest.raises(ClientStateError, match="no thread"):
        RaymqHandler("logs", client=None if own else client)
    assert (client.closed, client.made.closed) == (own, step == "thread")
