"""TaskRules decide what a replica does with a delivered task: run it, end it, retry it, or move it to a dead queue.

    delivered ──→ receive: no task, or no handler ──→ FAILURE, unprocessable queue
              └─→ begin: cancelled, or done already ──→ nothing more
                       └ STARTED, the handler runs ──→ end: SUCCESS
                                                          └ RETRY, sent back for later
                                                          └ FAILURE, failed queue, dead letters

The rules use no threads, no clock and no calls to raymq. The caller passes times in s since 1970. A step may be
executed twice but is never left out, because the message is acknowledged after all other steps.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Final

from raymq.common.errors import InvalidArgumentError
from raymq.serve.config import TaskSettings
from raymq.serve.states import StateRecord, TaskHistory, TaskState
from raymq.serve.task import Task, TaskError, decode_task

RETRY_LEVEL_MAX: Final = 5
"""Delay level of the longest pause between two attempts to run a task: 1 min. If the pause before the second attempt
has a higher level, all pauses have that level."""
DEAD: Final = -1
"""Value that is used instead of a delay level to move a message to the dead-letter topic."""
ERROR_CHARACTERS_MAX: Final = 2000


@dataclass(frozen=True, slots=True)
class TaskRun:
    """A decision to run a task: send the task's state `state` to the result topic, then call the task's
    handler."""

    task: Task
    state: StateRecord


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """A decision to end the handling of a task's message, in these steps: copy the message to another topic, send the
    task's state to the result topic, send the message back to the broker, acknowledge the message. All steps except the
    last are optional.

    `body` is the encoded state. `copy_to` is the topic that gets a copy of the message, with `error` as the reason.
    `delay_level`: the delay level of the next delivery; DEAD moves the message to the dead letters; None if the message
    is not sent back.
    """

    state: StateRecord | None = None
    body: bytes = b""
    copy_to: str | None = None
    delay_level: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class HandlerResult:
    """The outcome of a call of a task's handler: the `result`, or the text of the error that the handler
    raised."""

    result: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TaskRules:
    """Makes the decisions about the tasks of one task queue. `worker` is the name of the replica."""

    settings: TaskSettings
    worker: str

    def receive(self, body: bytes, handlers: Container[str], attempt: int, now_s: float) -> Task | TaskEnd:
        """Decode the task in a message. If the message is not a task, or the task has no handler, returns a TaskEnd
        that moves the message to the unprocessable queue."""
        try:
            task = decode_task(body)
        except TaskError as error:
            return self._unprocessable(None, f"the message is not a task: {error}")
        if task.name not in handlers:
            reason = f"no handler is registered for task {task.name!r}"
            return self._unprocessable(self._state(task, TaskState.FAILURE, attempt, now_s, reason), reason)
        return task

    def begin(self, task: Task, attempt: int, history: TaskHistory, now_s: float) -> TaskRun | TaskEnd:
        """Decide, from a task's history, whether to run the task. `attempt` is the number of the attempt, from
        0."""
        known = history.latest.state if history.latest is not None else None
        if known in (TaskState.SUCCESS, TaskState.REVOKED):
            return TaskEnd()
        if history.begun >= self.settings.options.replica_deaths_max:
            error = (
                f"{history.begun} replicas began this attempt, and none of them finished the task: the replicas "
                "died, or lost the task"
            )
            return self._failed(task, attempt, now_s, error)
        return TaskRun(task, self._state(task, TaskState.STARTED, attempt, now_s))

    def end(self, task: Task, attempt: int, outcome: HandlerResult, now_s: float) -> TaskEnd:
        """Decide, from the outcome of the handler's call, whether a task ends or is retried."""
        if outcome.error is not None:
            return self._failed(task, attempt, now_s, outcome.error)
        state = self._state(task, TaskState.SUCCESS, attempt, now_s, outcome.result)
        try:
            return TaskEnd(state, state.encode())
        # the handler's result cannot be stored, so another attempt would not help
        except InvalidArgumentError as error:
            return self._dead(task, attempt, now_s, str(error))

    def _failed(self, task: Task, attempt: int, now_s: float, error: str) -> TaskEnd:
        most = self.settings.max_retries
        if most is not None and attempt >= most:
            return self._dead(task, attempt, now_s, error)
        error = _shortened(error)
        state = self._state(task, TaskState.RETRY, attempt, now_s, error)
        return TaskEnd(state, state.encode(), delay_level=self.retry_level(attempt), error=error)

    def _dead(self, task: Task, attempt: int, now_s: float, error: str) -> TaskEnd:
        error = _shortened(error)
        state = self._state(task, TaskState.FAILURE, attempt, now_s, error)
        return TaskEnd(state, state.encode(), self.settings.failed_queue, DEAD, error)

    def _unprocessable(self, state: StateRecord | None, error: str) -> TaskEnd:
        """Return the decision to move a message to the unprocessable queue if one is configured, or else to the dead
        letters."""
        aside, body = self.settings.unprocessable_queue, b"" if state is None else state.encode()
        return TaskEnd(state, body, aside, DEAD if aside is None else None, _shortened(error))

    def retry_level(self, attempt: int) -> int:
        """Return the delay level with which a task is retried after attempt number `attempt`. 0 means the group's retry
        intervals."""
        if self.settings.options.retry_intervals_s:
            return 0
        first = self.settings.options.first_retry_level
        return min(first + attempt, max(first, RETRY_LEVEL_MAX))

    def _state(self, task: Task, state: TaskState, attempt: int, now_s: float, result: Any = None) -> StateRecord:
        return StateRecord.of(task, state, now_s, attempt=attempt, result=result, worker=self.worker)


def _shortened(error: str) -> str:
    return error if len(error) <= ERROR_CHARACTERS_MAX else error[:ERROR_CHARACTERS_MAX] + "…"
