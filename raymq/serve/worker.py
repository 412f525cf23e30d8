"""TaskWorker runs the tasks of one replica. It has a consumer in the replicas' group, handler threads, and an event
loop for coroutines.

    thread `tasks-…`      polls while the worker has fewer tasks than `concurrency` → a queue
    threads `handler-…`   `concurrency` of them: read the task's history → STARTED → handler → end → acknowledge
    thread `loop-…`       runs coroutine handlers; a handler thread waits for each

The worker holds a task from its poll to its acknowledgement, so at most `concurrency` tasks are in memory.
raymq.serve.decisions.TaskEnd defines the order of the steps that end a task. Each step is repeated until it succeeds or
the worker stops. If the process ends, the tasks that the worker holds are delivered again. TaskRules makes all
decisions.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from copy import copy
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from raymq.common.closing import closed_on_error
from raymq.common.errors import ClientStateError, RaymqError
from raymq.common.message import MessageExt, SendResult
from raymq.common.parallel import require_thread, start_daemon
from raymq.common.retry import Backoff
from raymq.serve.decisions import HandlerResult, TaskEnd, TaskRules, TaskRun
from raymq.serve.states import StateRecord, TaskHistory
from raymq.serve.task import Task

TASK_POLL_S: Final = 0.5
"""Time in s for which a poll waits for tasks. After `stop`, the polling thread may need this time to end."""
RETRIES_WITHOUT_END: Final = 2**31 - 1
"""Value of `max_reconsume_times` (the maximum number of retries) with which the worker sends messages back to the
broker. It is practically unlimited, because TaskRules, not the broker, decide when a task is moved to the dead letters.
"""
LEAVE_MAX_S: Final = 5.0
"""Maximum time in s that a stopping worker waits until it has left its consumer group."""
CANCEL_S: Final = 1.0
"""Maximum time in s that a stopped worker waits for its cancelled coroutines to end."""

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]
T = TypeVar("T")


class TaskSource(Protocol):
    """The part of PullConsumer (raymq.client.consumer.pull.consumer) that a TaskWorker uses to receive and acknowledge
    tasks."""

    def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[MessageExt]: ...
    def acknowledge(self, messages: list[MessageExt]) -> None: ...
    def send_back(self, message: MessageExt, *, delay_level: int = 0, max_reconsume_times: int = -1) -> None: ...
    def close(self) -> None: ...


class TaskStore(Protocol):
    """The part of TaskConnection (raymq.serve.connection) that a TaskWorker uses to read and store states and to copy
    messages to dead queues."""

    def history(self, task_id: str) -> TaskHistory: ...
    def tell(self, state: StateRecord, body: bytes) -> Future[SendResult]: ...
    def copy(self, message: MessageExt, topic: str, error: str) -> None: ...


class TaskWorker:
    """Runs the tasks that one replica of a Ray Serve deployment receives. `handlers` maps task names to handlers, and
    handlers may be added later. Call `start` once; `stop` may be called any number of times."""

    def __init__(
        self,
        source: TaskSource,
        store: TaskStore,
        rules: TaskRules,
        handlers: Mapping[str, Handler],
        *,
        concurrency: int,
        poll_max: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._source, self._store, self._rules, self._handlers = source, store, rules, handlers
        self._concurrency, self._poll_max, self._clock = concurrency, min(poll_max or concurrency, concurrency), clock
        self._changed = threading.Condition()
        """Condition that guards the number of tasks that the worker holds, the counts of sent states, and the stop
        flag."""
        self._in_hand = 0
        self._counts: Counter[str] = Counter()
        self._stopping = False
        self._closed = False
        """True after the worker has begun to leave its consumer group. The group then gives the worker's tasks to other
        Ray Serve replicas."""
        self._delivered: queue.SimpleQueue[MessageExt | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop
        name = rules.settings.queue
        self._handler_threads = [
            threading.Thread(target=self._handle_all, name=f"handler-{name}-{number}", daemon=True)
            for number in range(concurrency)
        ]
        self._threads = [
            threading.Thread(target=self._take_tasks, name=f"tasks-{name}", daemon=True),
            *self._handler_threads,
        ]
        self._loop_thread = threading.Thread(target=self._run_loop, name=f"loop-{name}", daemon=True)

    def start(self) -> None:
        """Start all threads of the worker and begin to receive tasks.

        If a thread cannot be started, stops the worker, which leaves its consumer group, and raises the error:
        ClientStateError at the interpreter's exit, when Python 3.12 starts no thread, or RuntimeError.
        """
        self._loop = asyncio.new_event_loop()
        with closed_on_error(partial(self.stop, LEAVE_MAX_S), f"worker {self._rules.worker}"):
            # the thread that receives tasks starts last, so that a worker that cannot start receives none
            for thread in (self._loop_thread, *reversed(self._threads)):
                require_thread(thread, "a worker of tasks")

    @property
    def running(self) -> bool:
        """True while the worker receives tasks; False before `start` and after `stop`."""
        return not self._stopping and self._threads[0].is_alive()

    def figures(self) -> dict[str, Any]:
        """Return metrics of the worker: the number of tasks that it holds, its concurrency, and the number of task
        states that it has sent, by state."""
        with self._changed:
            return {"in_hand": self._in_hand, "concurrency": self._concurrency, "told": dict(self._counts)}

    def stop(self, timeout_s: float) -> bool:
        """Stop receiving tasks, wait up to `timeout_s` for running handlers, and leave the consumer group. Tasks of
        handlers that still run are delivered to other replicas. Returns True if all handlers have ended. Idempotent;
        never raises."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            first, self._stopping = not self._stopping, True
            self._changed.notify_all()
        for _ in self._handler_threads if first else ():
            self._delivered.put(None)
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._handler_threads)
        if first:
            self._close(ended=ended)
        return ended

    def _close(self, *, ended: bool) -> None:
        if not ended:
            logger.warning(
                "worker %s stops while handlers are running; other replicas get the handlers' tasks", self._rules.worker
            )
        self._closed = True
        closing = start_daemon(self._leave, name=f"leave-{self._rules.settings.queue}")
        if closing is None:
            self._leave()
        else:
            # If no broker answers, leaving the consumer group takes longer than LEAVE_MAX_S. The thread `closing` then
            # continues in the background.
            closing.join(LEAVE_MAX_S)
        if self._loop_thread.ident is None:
            self._loop.close()
        else:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _leave(self) -> None:
        """Commit the acknowledged tasks, and leave the consumer group."""
        try:
            self._source.close()
        # Catch every error, not only raymq's errors: at the interpreter's exit, leaving the group fails because thread
        # pools no longer work.
        except Exception as error:
            logger.warning(
                "worker %s could not leave its group; its last tasks are delivered again: %s", self._rules.worker, error
            )

    # Methods of the thread that polls for tasks

    def _take_tasks(self) -> None:
        backoff = Backoff()
        while (count := self._free()) > 0:
            try:
                messages = self._source.poll(max_messages=min(count, self._poll_max), timeout_s=TASK_POLL_S)
                backoff.reset()
            except ClientStateError:  # the consumer is closed, because the connection to raymq is being closed
                return
            # for example, a store is unavailable or a record is damaged: log the error, pause, and poll again
            except Exception as error:
                unexpected = not isinstance(error, RaymqError)
                logger.warning(
                    "worker %s cannot receive tasks now, retrying: %s", self._rules.worker, error, exc_info=unexpected
                )
                self._pause(backoff.next())
                continue
            with self._changed:
                self._in_hand += len(messages)
            for message in messages:
                # Copy the message. Otherwise a slow handler would keep the memory of the whole fetch alive.
                self._delivered.put(copy(message))

    def _free(self) -> int:
        """Wait until the worker can accept a task. Returns the number of tasks that it can accept; 0 if the worker
        stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._in_hand < self._concurrency)
            return 0 if self._stopping else self._concurrency - self._in_hand

    def _pause(self, pause_s: float) -> bool:
        """Wait for `pause_s`, or until the worker stops. Returns True if the worker stops."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, pause_s)

    # Methods of the threads that call the user's task handlers

    def _handle_all(self) -> None:
        while (message := self._delivered.get()) is not None and not self._stopping:
            try:
                self._handle(message)
            # any error here is a bug in raymq: the task stays unacknowledged, and is delivered again after this process
            # has ended
            except Exception:
                logger.exception("worker %s failed to handle a task", self._rules.worker)
            finally:
                with self._changed:
                    self._in_hand -= 1
                    self._changed.notify_all()

    def _handle(self, message: MessageExt) -> None:
        rules, attempt = self._rules, message.reconsume_times
        task = rules.receive(message.body, self._handlers, attempt, self._clock())
        if isinstance(task, TaskEnd):
            logger.warning("worker %s rejects a message: %s", self._rules.worker, task.error)
            self._end(message, task)
            return
        history = self._repeat(lambda: self._store.history(task.id), "its history")
        if history is None:
            return
        step = rules.begin(task, attempt, history, self._clock())
        if isinstance(step, TaskRun):
            self._tell_start(step.state)
            outcome = self._run(task)
            if self._closed:
                # Do not end the task here. This worker has left its group, so the group has given the task to another
                # Ray Serve replica.
                return
            step = rules.end(task, attempt, outcome, self._clock())
        self._end(message, step)

    def _tell_start(self, state: StateRecord) -> None:
        """Send the task state STARTED without waiting until it is stored. raymq uses this state only to inform users,
        and to count the Ray Serve replicas that died during an attempt of the task."""
        self._count(state)
        try:
            self._store.tell(state, state.encode())
        except RaymqError as error:
            logger.info("worker %s cannot report that task %s runs: %s", self._rules.worker, state.task_id, error)

    def _run(self, task: Task) -> HandlerResult:
        handler = self._handlers[task.name]
        try:
            result = handler(*task.args, **task.kwargs)
            if inspect.iscoroutine(result):
                result = self._wait_for(result)
        except (Exception, SystemExit, CancelledError) as error:  # an error in the user's handler: the task is retried
            logger.warning(
                "worker %s: task %s (%s) raised an exception", self._rules.worker, task.id, task.name, exc_info=True
            )
            return HandlerResult(error=_in_words(error))
        return HandlerResult(result)

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _run_loop(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        loop.run_forever()
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_S))
        loop.close()

    # Methods that end the handling of a task

    def _end(self, message: MessageExt, end: TaskEnd) -> None:
        """Execute all steps of the decision `end`, then acknowledge the message. If the worker stops before all steps
        are complete, the task is delivered again."""
        if end.state is not None:
            self._count(end.state)
        if all(self._done(step) for step in self._steps(message, end)):
            try:
                self._source.acknowledge([message])
            except ClientStateError:
                logger.info("worker %s finished a task too late; the task is delivered again", self._rules.worker)

    def _steps(self, message: MessageExt, end: TaskEnd) -> Iterator[Callable[[], object]]:
        """Yield the steps that end the handling of a task as `end` decides: copy the message, store the task's state,
        send the message back. A step may be executed again."""
        if (topic := end.copy_to) is not None:
            yield partial(self._store.copy, message, topic, end.error)
        if (state := end.state) is not None:
            yield lambda: self._store.tell(state, end.body).result()
        if (level := end.delay_level) is not None:
            yield partial(self._source.send_back, message, delay_level=level, max_reconsume_times=RETRIES_WITHOUT_END)

    def _done(self, step: Callable[[], object]) -> bool:
        """Execute one step that ends the handling of a task, and repeat it while it fails. Returns False if the worker
        stops before the step succeeds."""
        return self._repeat(lambda: (step(),), "the end of a task") is not None

    def _repeat(self, call: Callable[[], T], what: str) -> T | None:
        """Return the result of `call()`; repeat the call while it raises RaymqError. Returns None if the worker stops
        before the call succeeds. `what`: the call's name in log texts."""
        backoff = Backoff()
        while True:
            try:
                return call()
            except RaymqError as error:
                logger.warning("worker %s cannot store or read %s now, retrying: %s", self._rules.worker, what, error)
            if self._pause(backoff.next()):
                return None

    def _count(self, state: StateRecord) -> None:
        with self._changed:
            self._counts[state.state.value] += 1


def _in_words(error: BaseException) -> str:
    """Return the text of an error that a handler raised. If the error's own `__str__` fails, return only its class
    name."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the `__str__` method of the handler's error raised an error itself
        return type(error).__name__
