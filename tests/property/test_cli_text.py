"""Tests of the command line's output of texts from outside, such as message properties, which may contain any
characters."""

from __future__ import annotations

import json
import sys
import unicodedata
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings, strategies as st

from raymq.client.admin.dead_letters import DeadLetter, Replayed
from raymq.common.message import MessageExt
from raymq.tools import cli
from raymq.tools.cli.terminal.output import error_text, json_text, out, printable, table
from tests.support.cases import examples
from tests.support.clients.fakes import connect_commands

MARKUP = st.sampled_from(
    ["[bold]", "[/bold]", "[/]", "[link=http://evil]", "[red", "]", "\\[", ":smile:", "[@click=x()]", "[[", "\x1b[31m"]
)
HOSTILE = st.sampled_from(
    ["\x1b]0;title\x07", "\x9b2J", "\r", "\n", "\x00", "\u202e", "\u2066", "\u2028", "\x7f", "\ud800"]
)
TEXT = st.lists(st.one_of(MARKUP, HOSTILE, st.text(max_size=8), st.characters()), max_size=12).map("".join)
STORED = TEXT.filter(lambda text: "\ud800" not in text).map(
    lambda text: "".join(c for c in text if unicodedata.category(c) != "Cs")
)
KINDS = {"Cc", "Cf", "Cs", "Zl", "Zp"}
JOINERS = {"\u200c", "\u200d"}


def unsafe(text: str) -> list[str]:
    return [c for c in text if unicodedata.category(c) in KINDS and c not in JOINERS]


@settings(deadline=None)
@given(TEXT)
@example("\x1b[2J")
def test_printed_text_has_no_control_character_and_is_otherwise_unchanged(text: str) -> None:
    shown = printable(text)
    assert unsafe(shown) == []
    if not unsafe(text):
        assert shown == text


@settings(deadline=None)
@given(TEXT)
def test_json_has_no_control_character_and_decodes_to_the_same_text(text: str) -> None:
    line = json_text({text: [text]})
    assert unsafe(line) == []
    assert json.loads(line) == {text: [text]}


@settings(deadline=None)
@given(TEXT)
def test_every_further_line_of_an_error_is_indented(text: str) -> None:
    first, *others = error_text(text).split("\n")
    assert unsafe(first) == []
    assert all(line.startswith("  ") and unsafe(line) == [] for line in others)


@settings(deadline=None)
@given(st.lists(STORED, min_size=1, max_size=4))
def test_a_cell_of_a_table_is_literal(texts: list[str]) -> None:
    wide = max(200, 12 * sum(map(len, texts)))
    # Replace the attribute behind the property `width`, because the property cannot become unset again.
    with out.capture() as captured, mock.patch.object(out, "_width", wide):
        table(["text"], [[text] for text in texts])
    shown = [line.strip("│").strip() for line in captured.get().splitlines() if line.startswith("│")]
    assert shown == [printable(text).strip() for text in texts]


def message(text: str) -> MessageExt:
    return MessageExt(
        topic="orders",
        body=text.encode(),
        broker_name="broker-a",
        queue_id=0,
        queue_offset=7,
        physical_offset=100,
        message_id=text,
        offset_message_id="0" * 32,
        born_timestamp_ms=0,
        store_timestamp_ms=0,
        born_host="127.0.0.1:1",
        store_host="127.0.0.1:2",
        reconsume_times=17,
        sys_flag=0,
        tags=text,
        keys=(text,),
        properties={text: text},
        flag=0,
        system_properties={},
    )


class Admin:
    """Fake admin client whose queries return one message with a given text, also as a dead letter."""

    def __init__(self, text: str) -> None:
        self.text = text

    def query_by_key(self, topic: str, key: str, max_messages: int, begin_ms: int, end_ms: int) -> list[MessageExt]:
        return [message(self.text)]

    def query_by_id(self, topic: str, message_id: str) -> list[MessageExt]:
        return [message(self.text)]

    def dead_letters(self, group: str) -> Admin:
        return self

    def letters(self, **how: Any) -> list[DeadLetter]:
        return [DeadLetter(message(self.text), self.text, False)]

    def replay(self, **how: Any) -> list[Replayed]:
        return [Replayed(self.letters()[0], self.text)]


def strings(value: Any) -> list[str]:
    """Return all strings inside a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for one in inner for text in strings(one)]


COMMANDS = [
    ("query", "orders", "--key", "k"),
    ("query", "orders", "--id", "i"),
    ("dlq", "list", "billing"),
    ("dlq", "replay", "billing"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@given(text=STORED)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_command_prints_hostile_messages_as_they_are(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], text: str
) -> None:
    connect_commands(monkeypatch, SimpleNamespace(admin=Admin(text)))
    monkeypatch.setattr(out, "_width", 20_000)
    result = CliRunner().invoke(cli.cli, list(command))
    assert not result.exception or isinstance(result.exception, SystemExit), repr(result.exception)
    assert unsafe(result.output.replace("\n", "")) == []
    assert printable(text).strip() in result.output
    as_json = CliRunner().invoke(cli.cli, [*command, "--json"]).output
    assert unsafe(as_json.replace("\n", "")) == []
    assert text in strings(json.loads(as_json.splitlines()[0]))


@pytest.mark.parametrize(
    "arguments", [["send", "orders", "--\x1b[2J"], ["\x9b2J"], ["send", "orders", "--delay-level", "\r"]]
)
def test_wrong_usage_is_shown_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["raymq", *arguments])
    # Make monkeypatch restore sys.stdout after the test, because the console script replaces it.
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(out, "_width", 200)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert "Usage: " in errors
    assert unsafe(errors.replace("\n", "")) == []
