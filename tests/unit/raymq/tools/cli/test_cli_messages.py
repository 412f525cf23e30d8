"""Tests of `raymq consume --timeout`: when the command concludes that the topic has no more messages, and ends. The
consumer is a fake."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from raymq.common.message import ConsumeFromWhere, MessageQueue
from raymq.tools import cli
from raymq.tools.cli import messages
from tests.support.clients.fakes import connect_commands

QUEUE = MessageQueue("orders", "broker-a", 0)


class Consumer:
    """Fake consumer that gets its queue only after the second poll. The third poll returns the messages in `lines`; all
    other polls return nothing."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.polls = 0

    def subscribe(self, topic: str, tags: str) -> None:
        pass

    def assignment(self) -> list[MessageQueue]:
        return [QUEUE] if self.polls >= 2 else []

    def poll(self, max_messages: int, timeout_s: float) -> list[str]:
        self.polls += 1
        return self.lines if self.polls == 3 else []

    def commit(self) -> None:
        pass


@pytest.mark.parametrize(("lines", "polls"), [(["one", "two"], 4), ([], 3)])
def test_a_queue_that_comes_during_a_poll_has_not_been_quiet_for_that_long(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], polls: int
) -> None:
    consumer = Consumer(lines)
    connect_commands(monkeypatch, SimpleNamespace(pull_consumer=lambda group, **options: nullcontext(consumer)))
    monkeypatch.setattr(messages, "message_line", lambda message, as_json: message)
    done = CliRunner().invoke(cli.cli, ["consume", "g", "orders", "--timeout", "1"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == lines
    assert consumer.polls == polls


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [(["consume", "g", "orders", "--timeout", "1"], "pull"), (["receive", "g", "orders"], "simple")],
)
@pytest.mark.parametrize(
    ("start", "where"),
    [
        ("first", ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET),
        ("last", ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET),
        ("end", ConsumeFromWhere.CONSUME_FROM_END),
        (None, ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET),
    ],
)
def test_the_option_from_chooses_where_a_new_group_starts(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], kind: str, start: str | None, where: ConsumeFromWhere
) -> None:
    asked = []

    def consumer(group: str, *, consume_from: ConsumeFromWhere, **options: object) -> object:
        asked.append(consume_from)
        return nullcontext(Consumer([]))

    connect_commands(monkeypatch, SimpleNamespace(**{f"{kind}_consumer": consumer}))
    CliRunner().invoke(cli.cli, [*arguments, *(["--from", start] if start else [])])
    assert asked == [where]
