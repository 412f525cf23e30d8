"""Forms that send: fields as a message."""

from __future__ import annotations

import pytest

from raymq.common.errors import InvalidArgumentError
from raymq.tools.console.backend.messages import NewMessage
from raymq.tools.console.pages.sending import message_again, new_message
from raymq.tools.console.web.changes import Form
from tests.support.console.fake_backend import fake_message


def test_all_fields_of_a_new_message() -> None:
    fields = {"body": "a\r\nb", "tags": " x ", "keys": "k1  k2", "properties": "a=1\r\n\r\n b = 2=3"}
    expected = NewMessage("t", b"a\nb", "x", ("k1", "k2"), {"a": "1", "b": "2=3"}, 300_000)
    assert new_message("t", Form({**fields, "delay": "5m"})) == expected


def test_a_message_again_keeps_its_bytes_unless_they_are_edited() -> None:
    message = fake_message("t", b"\xff\r\n", tags="x", keys=("k",), properties={"a": "1"})
    again = message_again(Form({"topic": "u", "body": "shown"}), message)
    assert again == NewMessage("u", b"\xff\r\n", "x", ("k",), {"a": "1"}, 0)
    assert message_again(Form({"topic": "u", "body": "é\r\n", "edited": "1"}), message).body == "é\n".encode()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"body": ""}, "body is empty"),
        ({"body": "x", "properties": "a"}, "NAME=VALUE"),
        ({"body": "x", "delay": "soon"}, "not a delay"),
        ({"body": "x", "delay": "1s 2s"}, "not a delay"),
        ({"body": "x", "delay": "41d"}, "40 days"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, str], error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=error):
        new_message("t", Form(fields))
