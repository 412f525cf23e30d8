"""Tests of the message fields that the console's lists and exported files show."""

from __future__ import annotations

from urllib.parse import parse_qs

from raymq.tools.console.messages.fields import HIDDEN_BODY, MESSAGE_COLUMNS, file_row, row_of, tail_row
from tests.support.console.fake_cluster import fake_message


def test_a_row_has_harmless_texts_and_the_address_of_its_message() -> None:
    message = fake_message("a%|b", b"\x1b[2J", tags="\u202ex", keys=("k1", "k\x7f"), queue_offset=7, broker_name="b&x")
    row = row_of(message, with_body=True)
    assert (row.tags, row.keys, row.body) == ("\\u202ex", "k1 k\\x7f", "1b 5b 32 4a")
    assert parse_qs(row.address) == {"topic": ["a%|b"], "offset": ["b&x:0:7"]}


def test_a_hidden_body_is_nowhere() -> None:
    message = fake_message(body=b"secret")
    assert row_of(message, with_body=False).body == HIDDEN_BODY
    assert "secret" not in str(tail_row(message, with_body=False))
    assert "secret" not in str(file_row(message, with_body=False))


def test_a_file_has_every_column_and_a_body_of_bytes_in_base64() -> None:
    row = file_row(fake_message(body=b"\xff\x00", keys=("a", "b")), with_body=True)
    assert tuple(row) == MESSAGE_COLUMNS
    assert (row["body"], row["body_base64"], row["keys"]) == ("", "/wA=", ["a", "b"])
    assert file_row(fake_message(body="é".encode()), with_body=True)["body"] == "é"
