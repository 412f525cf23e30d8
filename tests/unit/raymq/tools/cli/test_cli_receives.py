"""Tests that `raymq receive` acknowledges messages only after it has printed them. The consumer is a fake."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raymq.tools import cli
from tests.support.clients.fakes import connect_commands


class Consumer:
    """Fake simple consumer that receives two messages, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def subscribe(self, topic: str, expression: object) -> None:
        self.calls.append(("subscribe", topic, str(expression)))

    def receive(self, max_messages: int, invisible_s: float, *, wait_s: float) -> list[object]:
        self.calls.append(("receive", max_messages, invisible_s, wait_s))
        return [message(offset) for offset in (7, 8)]

    def ack(self, messages: list[Any]) -> int:
        self.calls.append(("ack", [message.queue_offset for message in messages]))
        return len(messages)

    def ack_handles(self, topic: str, handles: tuple[str, ...]) -> int:
        self.calls.append(("ack_handles", topic, *handles))
        return 1


def message(offset: int) -> object:
    return SimpleNamespace(
        topic="frames", broker_name="broker-a", queue_id=0, queue_offset=offset, tags=None, keys=(), properties={},
        message_id="", offset_message_id="", born_timestamp_ms=0, store_timestamp_ms=0, body=b"frame", body_error=None,
        attempt=2, priority=None, handle=f"handle-{offset}",
    )  # fmt: skip


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> Consumer:
    made = Consumer()
    connect_commands(monkeypatch, SimpleNamespace(simple_consumer=lambda group, **options: nullcontext(made)))
    return made


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.cli, ["receive", "g", "frames", *words])


def test_receive_acknowledges_printed_messages(consumer: Consumer) -> None:
    done = run("--max", "5", "--invisible", "30", "--timeout", "1")
    assert done.exit_code == 0, done.output
    assert "broker-a:0" in done.stdout
    assert "handle-7" not in done.stdout
    assert consumer.calls == [("subscribe", "frames", "*"), ("receive", 5, 30.0, 1.0), ("ack", [7, 8])]


def test_kept_messages_have_handles_and_are_not_acknowledged(consumer: Consumer) -> None:
    done = run("--keep")
    assert "handle-7" in done.stdout
    assert [call[0] for call in consumer.calls] == ["subscribe", "receive"]


def test_receive_acknowledges_by_handles_without_a_receive(consumer: Consumer) -> None:
    done = run("--ack", "handle-7", "--ack", "handle-8")
    assert "acknowledged 1 of 2" in done.output
    assert consumer.calls == [("ack_handles", "frames", "handle-7", "handle-8")]


@pytest.mark.parametrize("words", [("--tags", "a", "--sql", "a = 1"), ("--keep", "--ack", "h")])
def test_options_that_exclude_each_other_are_refused(consumer: Consumer, words: tuple[str, ...]) -> None:
    assert run(*words).exit_code == 2
    assert consumer.calls == []
