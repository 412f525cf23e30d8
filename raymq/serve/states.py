"""The states of a task, one message each in the result topic, and the state that follows from all of them.

    PENDING → STARTED → SUCCESS            the words are Celery's
                      → RETRY → STARTED …  it failed, and is to be tried again
                      → FAILURE            it failed too often, or cannot be run
            → REVOKED                      it was cancelled; a handler that runs already goes on

States come from several processes. So the order of their messages does not tell everything: PENDING may come after
STARTED and changes nothing then; SUCCESS stays, even if a task is delivered again; REVOKED only gives way to an end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from raymq.serve.task import Task, encode_json


class TaskState(StrEnum):
    """The state of a task."""

    PENDING = "PENDING"
    STARTED = "STARTED"
    RETRY = "RETRY"
    SUCCESS = "SUCCESS"
    FAILURE = "FAILURE"
    REVOKED = "REVOKED"


ENDS: Final = frozenset({TaskState.SUCCESS, TaskState.FAILURE, TaskState.REVOKED})
"""The states in which a task is not worked on any more."""


@dataclass(frozen=True, slots=True)
class StateRecord:
    """One state of a task. Times are in s since 1970; `attempt` counts from 0; `worker` says which replica. `result` is
    the handler's, or an error in words."""

    task_id: str
    state: TaskState
    at_s: float
    created_at_s: float | None = None
    attempt: int = 0
    result: Any = None
    worker: str = ""

    @classmethod
    def of(
        cls, task: Task, state: TaskState, now_s: float, *, attempt: int = 0, result: Any = None, worker: str = ""
    ) -> StateRecord:
        """The state of a task now."""
        return cls(task.id, state, now_s, task.created_at_s, attempt, result, worker)

    def encode(self) -> bytes:
        """The body of the state's message. InvalidArgumentError if JSON cannot say the result, or it is too long."""
        fields = {
            "id": self.task_id,
            "state": self.state.value,
            "at": self.at_s,
            "created_at": self.created_at_s,
            "attempt": self.attempt,
            "result": self.result,
            "worker": self.worker,
        }
        return encode_json(fields, "the result")


def decode_state(body: bytes) -> StateRecord | None:
    """The state of a message of the result topic; None for a message of another kind, which somebody else sent."""
    try:
        fields = json.loads(body)
        return StateRecord(
            fields["id"],
            TaskState(fields["state"]),
            fields["at"],
            fields["created_at"],
            fields["attempt"],
            fields["result"],
            fields["worker"],
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class TaskHistory:
    """The knowledge about a task: its present state (None for a task that nobody knows), and how often the attempt that
    is under way was begun."""

    latest: StateRecord | None = None
    begun: int = 0

    @classmethod
    def of(cls, records: Iterable[StateRecord]) -> TaskHistory:
        """The history that follows from a task's states, in the order in which they were stored."""
        latest: StateRecord | None = None
        begun = 0
        for record in records:
            if record.state is TaskState.STARTED:
                begun += 1
            elif record.state in (TaskState.RETRY, TaskState.FAILURE):
                begun = 0
            if latest is None or _follows(latest.state, record.state):
                latest = record
        return cls(latest, begun)

    def told(self, now_s: float, ttl_s: float) -> StateRecord | None:
        """The state to tell a program; None for one that has ended longer than `ttl_s` ago."""
        if self.latest is None or (self.latest.state in ENDS and now_s - self.latest.at_s > ttl_s):
            return None
        return self.latest


def _follows(before: TaskState, state: TaskState) -> bool:
    """True if a task goes from one state to the other."""
    if state is TaskState.PENDING or before is TaskState.SUCCESS:
        return False
    return before is not TaskState.REVOKED or state in ENDS
