"""Tests of `raymq send` with a fake producer: the lines that it reads, its exit codes, and its report of lines that
cannot be sent."""

from __future__ import annotations

import json
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from raymq.common.errors import ServiceNotAvailableError, TopicNotExistError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES, Message, MessageQueue, SendResult, SendStatus
from raymq.tools import cli
from tests.support.clients.fakes import connect_commands

LONG = MAX_MESSAGE_SIZE_BYTES


class Producer:
    """Fake producer that stores every body, except the bodies in `failing`. Topic `nowhere` does not exist."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.priorities: list[int | None] = []
        self.failing: set[bytes] = set()

    def send_async(self, message: Message, sharding_key: str | None = None) -> Future[SendResult]:
        if message.topic == "nowhere":
            raise TopicNotExistError(message.topic)
        done: Future[SendResult] = Future()
        if message.body in self.failing:
            done.set_exception(ServiceNotAvailableError("the disk is full"))
        else:
            self.bodies.append(message.body)
            self.priorities.append(message.priority)
            queue = MessageQueue(message.topic, "broker-a", 0)
            done.set_result(SendResult(SendStatus.SEND_OK, "ID", "OFFSET-ID", queue, len(self.bodies) - 1))
        return done


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> Producer:
    made = Producer()
    connect_commands(monkeypatch, SimpleNamespace(producer=lambda group: nullcontext(made)))
    return made


def send(*arguments: str, typed: bytes = b"", code: int = 0) -> Result:
    done = CliRunner().invoke(cli.cli, ["send", *arguments], input=typed)
    assert done.exit_code == code, (done.output, done.exception)
    return done


@pytest.mark.usefixtures("producer")
@pytest.mark.parametrize(
    "arguments",
    [
        ("caf\udce9", "1"),
        ("orders", "1", "--key", "ok", "--key", "\udce9"),
        ("orders", "1", "--tags", "\udce9"),
        ("orders", "1", "--property", "a=\udce9"),
        ("orders", "1", "--address", "\udce9:1"),
        ("orders", "1", "--namespace", "\udce9"),
    ],
)
def test_an_argument_that_is_not_utf_8_is_wrong_usage_in_one_sentence(arguments: tuple[str, ...]) -> None:
    done = send(*arguments, code=2)
    assert "is not UTF-8" in done.stderr
    assert "\\udce9" in done.stderr
    assert "Traceback" not in done.output


def test_every_command_refuses_text_that_is_not_utf_8() -> None:
    for words in (["topic", "create"], ["group", "describe"], ["dlq", "list"], ["kv", "list"], ["config", "get"]):
        done = CliRunner().invoke(cli.cli, [*words, "\udce9"])
        assert (done.exit_code, "is not UTF-8" in done.stderr) == (2, True), words


def test_a_line_ends_with_lf_or_crlf_and_a_body_of_any_bytes_is_sent(producer: Producer) -> None:
    send("orders", "caf\udce9")
    assert producer.bodies.pop() == b"caf\xe9"
    send("orders", typed=b"one\r\ntwo\n\r\n\nthree\rfour\ncaf\xe9\nlast")
    assert producer.bodies == [b"one", b"two", b"three\rfour", b"caf\xe9", b"last"]


def test_all_lines_get_the_priority_of_the_option(producer: Producer) -> None:
    send("orders", "1")
    send("orders", "--priority", "0", typed=b"a\nb\n")
    assert producer.priorities == [None, 0, 0]
    send("orders", "1", "--priority", "10", code=2)
    assert "a priority or a delay" in str(
        send("orders", "1", "--priority", "9", "--delay-level", "1", code=1).exception
    )


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_line_may_be_as_long_as_a_message(producer: Producer, end: bytes) -> None:
    send("orders", typed=b"x" * LONG + end)
    assert list(map(len, producer.bodies)) == [LONG]


@pytest.mark.parametrize("more", [1, 2, 3, 5000])
def test_a_line_that_is_too_long_says_which_line_and_how_many_were_stored(producer: Producer, more: int) -> None:
    done = send("orders", "--json", typed=b"one\n\ntwo\n" + b"x" * (LONG + more) + b"\nnever\n", code=1)
    assert "line 4 was not stored, 2 lines were: the line has more than 4194304 bytes" in done.stderr
    assert [row["offset"] for row in json.loads(done.stdout)["sent"]] == [0, 1]
    assert producer.bodies == [b"one", b"two"]


def test_the_first_line_that_a_store_refuses_is_named_and_the_stored_lines_are_printed(producer: Producer) -> None:
    producer.failing = {b"two", b"four"}
    done = send("orders", "--json", typed=b"one\ntwo\nthree\nfour\n", code=1)
    assert "line 2 was not stored, 2 lines were: the disk is full" in done.stderr
    assert len(json.loads(done.stdout)["sent"]) == 2


@pytest.mark.usefixtures("producer")
def test_an_unknown_topic_is_an_error_of_the_topic_for_a_body_and_for_lines() -> None:
    assert isinstance(send("nowhere", "1", code=1).exception, TopicNotExistError)
    assert isinstance(send("nowhere", typed=b"1\n2\n", code=1).exception, TopicNotExistError)


@pytest.mark.usefixtures("producer")
def test_a_property_without_a_value_is_wrong_usage() -> None:
    assert "property 'colour' must be NAME=VALUE" in send("orders", "1", "--property", "colour", code=2).stderr
