"""Tests of a worker's decisions about a task: when the task is delivered, and when the task has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raymq.serve import RaymqAdapterConfig
from raymq.serve.config import TaskSettings
from raymq.serve.decisions import DEAD, ERROR_CHARACTERS_MAX, HandlerResult, TaskEnd, TaskRules, TaskRun
from raymq.serve.states import StateRecord, TaskHistory, TaskState, decode_state
from raymq.serve.task import Task

TASK = Task("t1", "resize", (), {}, 5.0)
UNKNOWN = TaskHistory()


def rules(max_retries: int | None = 3, *, dead_queues: bool = True, **options: Any) -> TaskRules:
    config = SimpleNamespace(
        queue_name="jobs",
        adapter_config=RaymqAdapterConfig(**options),
        max_retries=max_retries,
        failed_task_queue_name="failed" if dead_queues else None,
        unprocessable_task_queue_name="odd" if dead_queues else None,
    )
    return TaskRules(TaskSettings.of(config), "w")


def known(*states: TaskState) -> TaskHistory:
    return TaskHistory.of(StateRecord("t1", state, 1.0) for state in states)


def told(end: TaskEnd) -> tuple[str, Any]:
    """Return the task state and the result that the worker will report after the decision `end`."""
    assert end.state is not None
    assert decode_state(end.body) == end.state
    assert (end.state.task_id, end.state.created_at_s, end.state.at_s, end.state.worker) == ("t1", 5.0, 9.0, "w")
    return end.state.state.value, end.state.result


# Tests of the decisions when the broker delivers a task to a worker


def test_a_task_with_a_handler_is_run_and_reported_as_started():
    assert rules().receive(TASK.encode(), {"resize"}, 0, 9.0) == TASK
    run = rules().begin(TASK, 2, UNKNOWN, 9.0)
    assert isinstance(run, TaskRun)
    assert run.state == StateRecord("t1", TaskState.STARTED, 9.0, 5.0, 2, None, "w")


def test_a_message_that_is_no_task_is_put_aside():
    end = rules().receive(b"{", {"resize"}, 0, 9.0)
    assert isinstance(end, TaskEnd)
    assert (end.state, end.copy_to, end.delay_level) == (None, "odd", None)
    assert "the body is not JSON" in end.error


def test_a_task_without_a_handler_is_put_aside_and_has_failed():
    end = rules().receive(TASK.encode(), {"crop"}, 0, 9.0)
    assert isinstance(end, TaskEnd)
    assert told(end) == ("FAILURE", "no handler is registered for task 'resize'")
    assert (end.copy_to, end.delay_level) == ("odd", None)


@pytest.mark.parametrize("body", [b"{", TASK.encode()])
def test_without_a_queue_for_them_they_are_dead_letters(body):
    end = rules(dead_queues=False).receive(body, {}, 0, 9.0)
    assert isinstance(end, TaskEnd)
    assert (end.copy_to, end.delay_level) == (None, DEAD)


@pytest.mark.parametrize("state", [TaskState.SUCCESS, TaskState.REVOKED])
def test_a_task_that_succeeded_or_was_cancelled_does_not_run(state):
    assert rules().begin(TASK, 0, known(TaskState.STARTED, state), 9.0) == TaskEnd()


@pytest.mark.parametrize("state", [TaskState.PENDING, TaskState.STARTED, TaskState.RETRY, TaskState.FAILURE])
def test_a_task_that_did_not_end_runs_again_and_so_does_a_dead_letter_that_was_brought_back(state):
    assert isinstance(rules().begin(TASK, 0, known(state), 9.0), TaskRun)


def test_an_attempt_that_replicas_die_of_has_failed():
    died = [TaskState.STARTED] * 2
    assert isinstance(rules(replica_deaths_max=3).begin(TASK, 0, known(*died), 9.0), TaskRun)
    end = rules(replica_deaths_max=2).begin(TASK, 0, known(*died), 9.0)
    assert isinstance(end, TaskEnd)
    assert told(end)[0] == "RETRY"
    assert end.delay_level == 1
    end = rules(0, replica_deaths_max=2).begin(TASK, 0, known(*died), 9.0)
    assert isinstance(end, TaskEnd)
    assert (told(end)[0], end.delay_level) == ("FAILURE", DEAD)


# Tests of decisions after a task's handler has returned a result or failed


def test_a_result_is_reported():
    end = rules().end(TASK, 1, HandlerResult({"size": [1, 2]}), 9.0)
    assert told(end) == ("SUCCESS", {"size": [1, 2]})
    assert (end.copy_to, end.delay_level) == (None, None)


def test_an_error_is_tried_again_after_longer_and_longer_pauses():
    ends = [rules(None).end(TASK, attempt, HandlerResult(error="E: no"), 9.0) for attempt in range(8)]
    assert {told(end) for end in ends} == {("RETRY", "E: no")}
    assert [end.delay_level for end in ends] == [1, 2, 3, 4, 5, 5, 5, 5]
    late = rules(None, first_retry_level=9)
    assert [late.end(TASK, attempt, HandlerResult(error="E"), 9.0).delay_level for attempt in range(3)] == [9, 9, 9]


def test_own_intervals_leave_the_time_of_a_retry_to_the_group():
    own = rules(None, retry_intervals_s=(0.5, 60.0))
    assert [own.end(TASK, attempt, HandlerResult(error="E"), 9.0).delay_level for attempt in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("most", [0, 3])
def test_after_the_last_retry_a_task_is_dead(most):
    end = rules(most).end(TASK, most, HandlerResult(error="E: no"), 9.0)
    assert told(end) == ("FAILURE", "E: no")
    assert (end.copy_to, end.delay_level, end.error) == ("failed", DEAD, "E: no")
    assert rules(most, dead_queues=False).end(TASK, most, HandlerResult(error="E"), 9.0).copy_to is None


@pytest.mark.parametrize(
    ("result", "reason"), [(object(), "cannot be written as JSON"), ("x" * (5 << 20), "pass a reference")]
)
def test_a_result_that_cannot_be_stored_is_a_final_failure(result, reason):
    end = rules().end(TASK, 0, HandlerResult(result), 9.0)
    state, error = told(end)
    assert (state, end.delay_level, end.copy_to) == ("FAILURE", DEAD, "failed")
    assert reason in error


def test_long_errors_are_cut():
    end = rules().end(TASK, 0, HandlerResult(error="x" * 10_000), 9.0)
    assert len(told(end)[1]) == ERROR_CHARACTERS_MAX + 1
