"""Tests of the console's forms for sending a message: the form's fields become the message's fields."""

from __future__ import annotations

import pytest

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import Message
from raymq.tools.console.pages.sending import MessageForm, message_again, new_message
from raymq.tools.console.web.changes import Form
from tests.support.console.fake_cluster import fake_message


def test_all_fields_of_a_new_message() -> None:
    fields = {"body": "a\r\nb", "tags": " x ", "keys": "k1  k2", "properties": "a=1\r\n\r\n b = 2=3"}
    expected = MessageForm("t", b"a\nb", "x", ("k1", "k2"), {"a": "1", "b": "2=3"}, 300_000)
    form = new_message("t", Form({**fields, "delay": "5m"}))
    assert form == expected
    assert form.message(1_700_000_000_000) == Message(
        "t", b"a\nb", "x", ("k1", "k2"), form.properties, deliver_at_ms=1_700_000_300_000
    )


def test_a_message_again_keeps_its_bytes_unless_they_are_edited() -> None:
    message = fake_message("t", b"\xff\r\n", tags="x", keys=("k",), properties={"a": "1"})
    again = message_again(Form({"topic": "u", "body": "shown"}), message)
    assert again == MessageForm("u", b"\xff\r\n", "x", ("k",), {"a": "1"}, 0)
    assert message_again(Form({"topic": "u", "body": "é\r\n", "edited": "1"}), message).body == "é\n".encode()


def test_a_priority_is_sent_and_a_message_again_keeps_it_unless_it_is_delayed() -> None:
    assert new_message("t", Form({"body": "x", "priority": "7"})).message(0) == Message("t", b"x", priority=7)
    for sent, kept in ((None, None), (7, 7), (12, 9)):
        message = fake_message("t", b"x", system_properties={} if sent is None else {"_SYS_MSG_PRIORITY_": str(sent)})
        assert message_again(Form({"topic": "u"}), message).priority == kept
        assert message_again(Form({"topic": "u", "delay": "5m"}), message).priority is None


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"body": ""}, "body is empty"),
        ({"body": "x", "properties": "a"}, "NAME=VALUE"),
        ({"body": "x", "delay": "soon"}, "not a delay"),
        ({"body": "x", "delay": "1s 2s"}, "not a delay"),
        ({"body": "x", "delay": "41d"}, "40 days"),
        ({"body": "x", "priority": "10"}, "The priority must be 0 to 9"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, str], error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=error):
        new_message("t", Form(fields))
