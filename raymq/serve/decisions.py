"""TaskRules decide what is done with a task that was delivered: run it, end it, retry it, or put it aside.

    delivered ──→ receive: no task, or no handler ──→ FAILURE, unprocessable queue
              └─→ begin: cancelled, or done already ──→ nothing more
                       └ STARTED, the handler runs ──→ end: SUCCESS
                                                          └ RETRY, sent back for later
                                                          └ FAILURE, failed queue, dead letters

No threads, no clock, no calls: times come in, in s since 1970. What is decided may be done twice, never left out: the
message is acknowledged only after everything else.
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
"""The delay level of the longest pause between two attempts, 1 min, unless the first one is longer."""
DEAD: Final = -1
"""The delay level that stands for the dead letters."""
ERROR_CHARACTERS_MAX: Final = 2000


@dataclass(frozen=True, slots=True)
class Run:
    """Send the state, and run the task's handler."""

    task: Task
    state: StateRecord


@dataclass(frozen=True, slots=True)
class End:
    """The steps at a task's end: copy the message, send the state, send the message back, acknowledge it. Each step is
    optional.

    `body` is the state's message. `copy_to` is the topic that gets a copy of the message, with `error` as its reason.
    `delay_level`: the delay level of the next delivery; DEAD for the dead letters; None for neither.
    """

    state: StateRecord | None = None
    body: bytes = b""
    copy_to: str | None = None
    delay_level: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class HandlerResult:
    """The end of a handler's call: its result, or `error` in words if it raised."""

    result: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TaskRules:
    """The decisions for the tasks of one queue; `worker` names the replica."""

    settings: TaskSettings
    worker: str

    def receive(self, body: bytes, handlers: Container[str], attempt: int, now_s: float) -> Task | End:
        """The task of a message, if there is a handler for it."""
        try:
            task = decode_task(body)
        except TaskError as error:
            return self._unprocessable(None, f"this message is no task: {error}")
        if task.name not in handlers:
            reason = f"no handler is registered for task {task.name!r}"
            return self._unprocessable(self._state(task, TaskState.FAILURE, attempt, now_s, reason), reason)
        return task

    def begin(self, task: Task, attempt: int, history: TaskHistory, now_s: float) -> Run | End:
        """Decide if a task is run, after what is known of it. Attempts count from 0."""
        known = history.latest.state if history.latest is not None else None
        if known in (TaskState.SUCCESS, TaskState.REVOKED):
            return End()
        if history.begun >= self.settings.options.replica_deaths_max:
            error = f"{history.begun} replicas began this attempt and none ended it: they died, or lost the task"
            return self._failed(task, attempt, now_s, error)
        return Run(task, self._state(task, TaskState.STARTED, attempt, now_s))

    def end(self, task: Task, attempt: int, outcome: HandlerResult, now_s: float) -> End:
        """Decide what follows from the end of a handler's call."""
        if outcome.error is not None:
            return self._failed(task, attempt, now_s, outcome.error)
        state = self._state(task, TaskState.SUCCESS, attempt, now_s, outcome.result)
        try:
            return End(state, state.encode())
        except InvalidArgumentError as error:  # another attempt would not help
            return self._dead(task, attempt, now_s, str(error))

    def _failed(self, task: Task, attempt: int, now_s: float, error: str) -> End:
        most = self.settings.max_retries
        if most is not None and attempt >= most:
            return self._dead(task, attempt, now_s, error)
        error = _shortened(error)
        state = self._state(task, TaskState.RETRY, attempt, now_s, error)
        return End(state, state.encode(), delay_level=self.retry_level(attempt), error=error)

    def _dead(self, task: Task, attempt: int, now_s: float, error: str) -> End:
        error = _shortened(error)
        state = self._state(task, TaskState.FAILURE, attempt, now_s, error)
        return End(state, state.encode(), self.settings.failed_queue, DEAD, error)

    def _unprocessable(self, state: StateRecord | None, error: str) -> End:
        """Put a message aside: into the queue for these, or else among the dead letters."""
        aside, body = self.settings.unprocessable_queue, b"" if state is None else state.encode()
        return End(state, body, aside, DEAD if aside is None else None, _shortened(error))

    def retry_level(self, attempt: int) -> int:
        """The delay level before the attempt after this one."""
        first = self.settings.options.first_retry_level
        return min(first + attempt, max(first, RETRY_LEVEL_MAX))

    def _state(self, task: Task, state: TaskState, attempt: int, now_s: float, result: Any = None) -> StateRecord:
        return StateRecord.of(task, state, now_s, attempt=attempt, result=result, worker=self.worker)


def _shortened(error: str) -> str:
    return error if len(error) <= ERROR_CHARACTERS_MAX else error[:ERROR_CHARACTERS_MAX] + "…"
