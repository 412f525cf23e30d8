"""The states of a task. Each state is a message in the result topic; a task's current state is computed from all of its
stored states.

    PENDING → STARTED → SUCCESS            the names are Celery's
                      → RETRY → STARTED …  the task failed, and will be tried again
                      → FAILURE            the task failed too often, or cannot be run
            → REVOKED                      the task was cancelled; a handler that already runs continues

Several processes send states, so the order of the messages may differ from the order of the states. PENDING after
STARTED changes nothing. SUCCESS stays, even if the task is delivered again. Only SUCCESS or FAILURE replaces REVOKED.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from raymq.serve.task import Task, encode_json


class TaskState(StrEnum):
    """The state of a task, with Celery's name for it."""

    PENDING = "PENDING"
    STARTED = "STARTED"
    RETRY = "RETRY"
    SUCCESS = "SUCCESS"
    FAILURE = "FAILURE"
    REVOKED = "REVOKED"


ENDS: Final = frozenset({TaskState.SUCCESS, TaskState.FAILURE, TaskState.REVOKED})
"""The final states, in which a task has ended."""


@dataclass(frozen=True, slots=True)
class StateRecord:
    """One stored state of a task. Times are in s since 1970. `attempt` is the number of the attempt, from 0. `worker`
    is the name of the replica. `result` is the handler's result, or the text of an error."""

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
        """Create the record of a task's state at time `now_s`."""
        return cls(task.id, state, now_s, task.created_at_s, attempt, result, worker)

    def encode(self) -> bytes:
        """Encode the task's state as the body of a message. Raises InvalidArgumentError if the result is not
        serializable as JSON or is too long."""
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
    """Decode the state in a message of the result topic. Returns None if the message is not a state."""
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
    """The latest state of a task (None for an unknown task), and the number of times that its current attempt was
    started."""

    latest: StateRecord | None = None
    begun: int = 0

    @classmethod
    def of(cls, records: Iterable[StateRecord]) -> TaskHistory:
        """Compute the history of a task from its states, in the order in which they were stored."""
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
        """Return the task state to show to a program. Returns None if the task is unknown or ended more than `ttl_s`
        ago."""
        if self.latest is None or (self.latest.state in ENDS and now_s - self.latest.at_s > ttl_s):
            return None
        return self.latest


def _follows(before: TaskState, state: TaskState) -> bool:
    """True if `state`, which was stored after `before`, replaces `before` as the task's current state."""
    if state is TaskState.PENDING or before is TaskState.SUCCESS:
        return False
    return before is not TaskState.REVOKED or state in ENDS
