"""Tests of encoding a Ray Serve task as JSON in a message."""

from __future__ import annotations

import json

import pytest

from raymq.common.errors import InvalidArgumentError
from raymq.serve.task import Task, TaskError, decode_task


def test_a_task_can_be_decoded_from_its_message():
    task = Task.of("t1", "resize", [1, "ü", None], {"wide": True}, 12.5)
    assert decode_task(task.encode()) == task
    assert decode_task(Task.of("t1", "resize", None, None, 0.0).encode()) == Task("t1", "resize", (), {}, 0.0)


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ("abc", None, r"write args=\['abc'\]"),
        ({1}, None, "a list or a tuple"),
        (None, [1], "names to values"),
        (None, {1: 2}, "names to values"),
        ([object()], None, "the arguments of task 'resize' cannot be written as JSON"),
        ([b"bytes"], None, "cannot be written as JSON"),
        (["x" * (5 << 20)], None, "pass a reference"),
    ],
)
def test_arguments_that_cannot_be_sent_are_refused(args, kwargs, reason):
    with pytest.raises(InvalidArgumentError, match=reason):
        Task.of("t1", "resize", args, kwargs, 0.0).encode()


@pytest.mark.parametrize("name", ["", " ", None, 5])
def test_a_task_has_a_name(name):
    with pytest.raises(InvalidArgumentError, match="a task's name"):
        Task.of("t1", name, None, None, 0.0)


GOOD = {"id": "t1", "task": "resize", "args": [], "kwargs": {}, "created_at": 1.0}


@pytest.mark.parametrize(
    "body",
    [
        b"\x80\x04pickle",
        b"{",
        b"[" * 100_000,
        b"[]",
        b'"text"',
        *(
            json.dumps(GOOD | change).encode()
            for change in (
                {"id": None},
                {"id": ""},
                {"id": "a b"},
                {"id": "a\nb"},
                {"task": None},
                {"args": {}},
                {"args": "abc"},
                {"kwargs": []},
                {"created_at": "now"},
                {"created_at": True},
                {"created_at": -1},
                {"created_at": float("nan")},
                {"created_at": 10**400},
                {"id": "x" * 201},
            )
        ),
    ],
)
def test_anything_else_is_no_task(body):
    with pytest.raises(TaskError):
        decode_task(body)


def test_optional_fields_of_a_task_may_be_missing():
    assert decode_task(b'{"id": "t1", "task": "resize"}') == Task("t1", "resize", (), {}, 0.0)
