"""Tests of the shell commands that the console offers for copying. Such a command sends the same message again, and
makes the shell run nothing else."""

from __future__ import annotations

import subprocess

from hypothesis import given, settings, strategies as st

from raymq.tools.console.messages.fields import COMMAND_BODY_MAX_BYTES, query_command, send_command
from tests.support.console.fake_cluster import fake_message


def words_in_a_shell(command: str) -> list[str]:
    """Return the words into which a shell splits a command."""
    answer = subprocess.run(["/bin/sh", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True, timeout=60)
    return answer.stdout.decode().split("\0")[:-1]


def test_the_command_has_the_whole_message() -> None:
    message = fake_message("orders", b'{"id": 7}', tags="paid", keys=("o-7", "c'1"), properties={"b": "$(x)", "a": "`"})
    assert words_in_a_shell(send_command(message) or "") == [
        *("raymq", "send", "--tags", "paid", "--key", "o-7", "--key", "c'1"),
        *("--property", "a=`", "--property", "b=$(x)", "--", "orders", '{"id": 7}'),
    ]
    assert words_in_a_shell(query_command(message)) == ["raymq", "query", "orders", "--offset", "broker-a:0:0"]


@settings(max_examples=25)
@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=20))
def test_any_text_is_one_word_or_there_is_no_command(body: str, tags: str) -> None:
    command = send_command(fake_message("t", body.encode(errors="replace"), tags=tags, keys=()))
    if command is not None:
        assert words_in_a_shell(command) == [
            *("raymq", "send", "--tags", tags, "--", "t"),
            body.encode(errors="replace").decode(),
        ]
    assert (command is None) == (not (body.encode(errors="replace").decode() + tags).isprintable())


def test_a_body_that_a_terminal_would_act_on_has_no_command() -> None:
    for body in (b"\x1b[201~rm -rf /\n", b"a\nb", b"\xff", b"x" * (COMMAND_BODY_MAX_BYTES + 1)):
        assert send_command(fake_message("t", body, tags=None, keys=())) is None
    assert send_command(fake_message("t", b"x", keys=(), properties={"a": "\u202e"})) is None
