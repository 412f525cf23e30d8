"""Task: a call of a handler. A task is stored as JSON in a message, with the handler's name, args and kwargs. JSON is
used instead of pickle, so that a message from an unknown sender cannot run code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES

ID_CHARACTERS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Task:
    """One task: the call of the handler `name` with `args` and `kwargs`. `created_at_s` is a time in s since
    1970."""

    id: str
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    created_at_s: float

    @classmethod
    def of(cls, task_id: str, name: str, args: Any, kwargs: Any, now_s: float) -> Task:
        """Create a task from the arguments of a program: `args` is a list, a tuple or None, `kwargs` is a mapping or
        None. Raises InvalidArgumentError for other types."""
        if not isinstance(name, str) or not name.strip():
            raise InvalidArgumentError(f"a task's name must be a text, not {name!r}")
        if args is not None and not isinstance(args, (list, tuple)):
            raise InvalidArgumentError(f"args must be a list or a tuple, not {args!r}; write args=[{args!r}]")
        if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
            raise InvalidArgumentError(f"kwargs must map names to values, not {kwargs!r}")
        return cls(task_id, name, tuple(args or ()), dict(kwargs or {}), now_s)

    def encode(self) -> bytes:
        """Encode the task as the body of a message. Raises InvalidArgumentError if the arguments are not serializable
        as JSON or are too long."""
        fields = {
            "id": self.id,
            "task": self.name,
            "args": self.args,
            "kwargs": self.kwargs,
            "created_at": self.created_at_s,
        }
        return encode_json(fields, f"the arguments of task {self.name!r}")


class TaskError(InvalidArgumentError):
    """Raised if a message does not contain a task."""


def decode_task(body: bytes) -> Task:
    """Decode the task in a message. Raises TaskError if the message does not contain a task."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise TaskError("the body is not a JSON object")
    task_id, name, created_at_s = fields.get("id"), fields.get("task"), fields.get("created_at", 0.0)
    args, kwargs = fields.get("args", []), fields.get("kwargs", {})
    if not is_task_id(task_id):
        raise TaskError(
            f"the task's id is {str(task_id)[:100]!r}, not a text of up to {ID_CHARACTERS_MAX} characters without "
            "spaces"
        )
    if not isinstance(name, str):
        raise TaskError(f"the field task is {name!r}, not the name of a handler")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise TaskError("the field args must be a list, and the field kwargs an object")
    if isinstance(created_at_s, bool) or not isinstance(created_at_s, (int, float)) or not 0 <= created_at_s < 2**53:
        raise TaskError("the field created_at is not a time in s since 1970")
    return Task(task_id, name, tuple(args), kwargs, float(created_at_s))


def is_task_id(value: object) -> TypeGuard[str]:
    """True if `value` is a text that is allowed as a task's id and as a message's key."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= ID_CHARACTERS_MAX
        and " " not in value
        and bool(value.strip())
        and value.isprintable()
    )


def encode_json(fields: Mapping[str, Any], what: str) -> bytes:
    """Encode a JSON object as the body of a message. `what`: the object's name in error texts. Raises
    InvalidArgumentError if the object is not serializable as JSON, or exceeds the maximum message size."""
    try:
        body = json.dumps(fields, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{what} cannot be written as JSON: {error}") from None
    if len(body) > MAX_MESSAGE_SIZE_BYTES:
        raise InvalidArgumentError(
            f"{what} take {len(body)} bytes as JSON, but a message may have at most {MAX_MESSAGE_SIZE_BYTES}: "
            "pass a reference to the data"
        )
    return body
