"""Tests of computing a task's state from all states that were reported for the task."""

from __future__ import annotations

import pytest

from raymq.serve.states import StateRecord, TaskHistory, TaskState, decode_state


def history(words: str) -> TaskHistory:
    return TaskHistory.of(StateRecord("t1", TaskState(word), float(at)) for at, word in enumerate(words.split()))


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("PENDING", "PENDING"),
        ("PENDING STARTED", "STARTED"),
        ("STARTED PENDING", "STARTED"),
        ("PENDING STARTED RETRY", "RETRY"),
        ("PENDING STARTED RETRY STARTED SUCCESS", "SUCCESS"),
        ("PENDING STARTED SUCCESS STARTED", "SUCCESS"),
        ("PENDING STARTED SUCCESS REVOKED", "SUCCESS"),
        ("STARTED FAILURE", "FAILURE"),
        ("STARTED FAILURE STARTED", "STARTED"),
        ("PENDING REVOKED", "REVOKED"),
        ("REVOKED PENDING", "REVOKED"),
        ("STARTED REVOKED RETRY", "REVOKED"),
        ("STARTED REVOKED STARTED", "REVOKED"),
        ("STARTED REVOKED SUCCESS", "SUCCESS"),
        ("STARTED REVOKED FAILURE", "FAILURE"),
    ],
)
def test_the_state_follows_from_all_stored_states(words, state):
    latest = history(words).latest
    assert latest is not None
    assert latest.state == state


def test_a_task_without_states_is_unknown():
    assert history("").latest is None
    assert history("").told(0.0, 10.0) is None


@pytest.mark.parametrize(
    ("words", "begun"),
    [
        ("PENDING", 0),
        ("STARTED STARTED", 2),
        ("STARTED RETRY STARTED", 1),
        ("STARTED RETRY", 0),
        ("STARTED FAILURE STARTED", 1),
    ],
)
def test_the_beginnings_of_the_attempt_under_way_are_counted(words, begun):
    assert history(words).begun == begun


def test_the_end_of_a_task_is_kept_for_a_while_and_its_wait_for_ever():
    assert history("STARTED SUCCESS").told(11.0, 10.0) is not None
    assert history("STARTED SUCCESS").told(11.1, 10.0) is None
    assert history("PENDING").told(1e9, 10.0) is not None


def test_a_state_equals_the_reported_one():
    state = StateRecord("t1", TaskState.SUCCESS, 2.0, 1.0, 3, {"a": [1]}, "w")
    assert decode_state(state.encode()) == state


@pytest.mark.parametrize("body", [b"\x80", b"[]", b"{}", b'{"id": "t1", "state": "LOST"}', b"5"])
def test_messages_of_others_are_no_states(body):
    assert decode_state(body) is None
