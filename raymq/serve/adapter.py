"""RaymqTaskProcessorAdapter: the TaskProcessorAdapter that Ray Serve calls. Its tasks are messages in raymq.

    Serve: adapter(config) → initialize(concurrency) → register_task_handle … → start_consumer → … → stop_consumer
    programs: instantiate_adapter_from_config(config) → enqueue_task_sync, get_task_status_sync, cancel_task_sync …

Task states have Celery's names. As in Celery, an unknown task is PENDING. Ray Serve wraps errors in RuntimeErrors
before users receive them.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from ray.serve.schema import TaskProcessorAdapter, TaskProcessorConfig, TaskResult

from raymq.common.errors import ClientStateError, InvalidArgumentError, RaymqError
from raymq.common.numbers import TIME_S, NumberRange, bounded, checked, seconds
from raymq.common.parallel import start_daemon
from raymq.serve.config import TaskSettings
from raymq.serve.connection import TaskConnection
from raymq.serve.decisions import TaskRules
from raymq.serve.states import ENDS, StateRecord, TaskState
from raymq.serve.task import Task, is_task_id
from raymq.serve.task_messages import task_priority
from raymq.serve.worker import Handler, TaskWorker

CONCURRENCY: Final = 5
"""Ray Serve's default concurrency. A program that only sends tasks, and consumes none, uses this value."""
_CONCURRENCY_RANGE: Final = NumberRange(1, 10_000)
REPLICA_STOP_TIMEOUT_S: Final = 10.0
OPTIONS: Final = ("delay_s", "deliver_at_ms", "sharding_key", "priority")

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RaymqTaskProcessorAdapter(TaskProcessorAdapter):  # type: ignore[misc]  # Ray has no types
    """Sends and runs tasks of Ray Serve as messages in raymq. Thread-safe after `initialize`.

    A task runs at least once. If the replica that runs it dies before the task's end is stored, another replica runs
    the task again. The replicas are the members of a consumer group. Pass the adapter to a TaskProcessorConfig as the
    class, or as "raymq.serve.RaymqTaskProcessorAdapter". Raises ConfigError if the config is inconsistent, and
    IllegalNameError if a topic or group name is illegal.
    """

    def __init__(self, config: TaskProcessorConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = TaskSettings.of(config)
        self._handlers: dict[str, Handler] = {}
        self._concurrency = CONCURRENCY
        self._lock = threading.Lock()
        """Lock that guards `_connection` and `_worker`: this adapter's connection to raymq, and its task
        worker."""
        self._connection: TaskConnection | None = None
        self._worker: TaskWorker | None = None

    @checked
    @bounded(consumer_concurrency=_CONCURRENCY_RANGE)
    def initialize(self, consumer_concurrency: int = CONCURRENCY) -> None:
        """Connect to raymq, and create the task queue's topics and group if they do not exist. `consumer_concurrency`:
        the maximum number of tasks that run at the same time in this process. Raises ClusterNotFoundError if no raymq
        cluster is running."""
        self._concurrency = consumer_concurrency
        with self._lock:
            if self._connection is None:
                self._connection = connection = _apart(partial(TaskConnection.open, self._settings))
                # The finalizer closes the connection when the adapter is deleted. It need not run at the process's
                # exit, because the client then closes itself.
                weakref.finalize(self, _close_later, connection).atexit = False

    def register_task_handle(self, func: Handler, name: str | None = None) -> None:
        """Register a function or coroutine function as the handler of tasks named `name` (default: the function's
        name). Raises InvalidArgumentError if another handler is already registered under this name."""
        task_name = name or func.__name__
        if self._handlers.setdefault(task_name, func) != func:
            raise InvalidArgumentError(
                f"a handler is already registered for task {task_name!r}; register this handler under another name"
            )

    # Methods that programs call to send tasks and to query them

    def enqueue_task_sync(self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any) -> TaskResult:
        """Send a task, which a replica will run. Its arguments must be serializable as JSON. The task is stored durably
        when the call returns. If the call raises an error after sending, the task may or may not be stored.

        Options: `delay_s` or `deliver_at_ms` (ms since 1970): the time before which the task does not run, at most 40
        days ahead. `sharding_key`: tasks with the same key are stored in one queue. `priority`: 0 to 9, by default 0,
        the lowest, in a queue with priorities (RaymqAdapterConfig), whose tasks have no other option. Raises
        InvalidArgumentError for other options, and for arguments that are not serializable as JSON. Raises
        ServiceNotAvailableError, RequestTimeoutError or SendUnknownError if the store does not confirm the task.
        """
        now_s = time.time()
        deliver_at_ms, sharding_key = _destination(now_s, options)
        priority = task_priority(
            options.get("priority"),
            has_priorities=self._settings.options.priorities,
            is_placed=deliver_at_ms is not None or sharding_key is not None,
        )
        task = Task.of(uuid.uuid4().hex, task_name, args, kwargs, now_s)
        state = StateRecord.of(task, TaskState.PENDING, now_s)
        self._connected().send(task, state, deliver_at_ms=deliver_at_ms, sharding_key=sharding_key, priority=priority)
        return _result(task.id, state)

    def get_task_status_sync(self, task_id: str) -> TaskResult:
        """Return the state of a task. `result` is the handler's result for SUCCESS, and the text of the error for RETRY
        and FAILURE. If the task is unknown, or ended more than `result_ttl_s` ago, the state is PENDING without a
        creation time."""
        history = self._connected().history(_task_id(task_id))
        return _result(task_id, history.told(time.time(), self._settings.options.result_ttl_s))

    def cancel_task_sync(self, task_id: str) -> TaskResult:
        """Cancel a task: no handler starts or retries it after this call. If a handler already runs the task, it
        continues, and its result counts. A task that has already ended is not changed. Returns the resulting state of
        the task."""
        connection = self._connected()
        latest = connection.history(_task_id(task_id)).latest
        if latest is None or latest.state not in ENDS:
            created_at_s = None if latest is None else latest.created_at_s
            attempt = 0 if latest is None else latest.attempt
            latest = StateRecord(task_id, TaskState.REVOKED, time.time(), created_at_s, attempt)
            connection.tell(latest, latest.encode()).result()
        return _result(task_id, latest)

    def get_metrics_sync(self) -> dict[str, Any]:
        """Return metrics of the task queue: lag in tasks and in ms, retries that wait, dead letters. If this process
        has a worker, the result also has the worker's metrics: the tasks in the worker, its concurrency, and the number
        of task states that it has sent."""
        summary, worker = self._connected().summary(), self._worker
        return {
            "queue": self._settings.queue,
            "group": self._settings.group,
            "lag": summary.lag,
            "lag_ms": summary.lag_ms,
            "retry_lag": summary.retry_lag,
            "dead_letters": summary.dead_letters,
            "worker": None if worker is None else worker.figures(),
        }

    def health_check_sync(self) -> list[dict[str, Any]]:
        """Return a list with one map from this process's name to {"ok": "pong"}, or to {"error": reason} if raymq does
        not answer or the consumer has stopped. Never raises."""
        connection = self._connection
        if connection is None:
            return [{self._settings.group: {"error": "initialize() was not called"}}]
        try:
            connection.summary()
        except RaymqError as error:
            return [{connection.name: {"error": str(error)}}]
        if self._worker is not None and not self._worker.running:
            return [{connection.name: {"error": "the consumer no longer accepts tasks"}}]
        return [{connection.name: {"ok": "pong"}}]

    # Methods that a Ray Serve replica calls

    def start_consumer(self, **kwargs: Any) -> None:
        """Start to receive tasks from the queue and to run them with the registered handlers. Does nothing while the
        consumer runs. The consumer can be started again after `stop_consumer`. Raises InvalidArgumentError for any
        argument, because the method has none. Raises ClientStateError if the interpreter is exiting, and Python 3.12
        starts no thread."""
        if kwargs:
            raise InvalidArgumentError(f"start_consumer has no arguments {', '.join(sorted(kwargs))}")
        connection = self._connected()
        with self._lock:
            if self._worker is not None:
                return
            rules = TaskRules(self._settings, connection.name)
            source = _apart(connection.consumer)
            worker = TaskWorker(
                source,
                connection,
                rules,
                self._handlers,
                concurrency=self._concurrency,
                poll_max=self._settings.options.poll_max,
            )
            _apart(worker.start)
            self._worker = worker
        atexit.register(self.stop_consumer)

    @checked
    @bounded(timeout=TIME_S)
    def stop_consumer(self, timeout: float = REPLICA_STOP_TIMEOUT_S) -> None:
        """Stop receiving tasks, wait up to `timeout` s for running handlers, and leave the consumer group, which takes
        a few seconds more at most. The tasks of handlers that still run are delivered to other replicas. Idempotent;
        never raises."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            atexit.unregister(self.stop_consumer)
            _apart(partial(worker.stop, timeout))

    def close(self) -> None:
        """Stop the consumer and close the connection to raymq. The adapter may be initialized again. Idempotent.
        Calling `close` is optional: the connection is also closed when the adapter is garbage-collected or the process
        ends."""
        self.stop_consumer()
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            _apart(connection.close)

    # Async variants of the methods that programs call

    async def enqueue_task_async(
        self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any
    ) -> TaskResult:
        """Call enqueue_task_sync in a thread, without blocking the event loop."""
        return await asyncio.to_thread(self.enqueue_task_sync, task_name, args, kwargs, **options)

    async def get_task_status_async(self, task_id: str) -> TaskResult:
        """Call get_task_status_sync in a thread, without blocking the event loop."""
        return await asyncio.to_thread(self.get_task_status_sync, task_id)

    async def cancel_task_async(self, task_id: str) -> TaskResult:
        """Call cancel_task_sync in a thread, without blocking the event loop."""
        return await asyncio.to_thread(self.cancel_task_sync, task_id)

    async def get_metrics_async(self) -> dict[str, Any]:
        """Call get_metrics_sync in a thread, without blocking the event loop."""
        return await asyncio.to_thread(self.get_metrics_sync)

    async def health_check_async(self) -> list[dict[str, Any]]:
        """Call health_check_sync in a thread, without blocking the event loop."""
        return await asyncio.to_thread(self.health_check_sync)

    def _connected(self) -> TaskConnection:
        connection = self._connection
        if connection is None:
            raise ClientStateError(
                "this adapter is not connected: call initialize() first, or use instantiate_adapter_from_config"
            )
        return connection


def _destination(now_s: float, options: dict[str, Any]) -> tuple[int | None, str | None]:
    """Return the delivery time in ms since 1970 and the sharding key from the options of a task; each is None if the
    option is not given. Raises InvalidArgumentError for unknown or contradictory options."""
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise InvalidArgumentError(f"a task has no option {', '.join(unknown)}; its options are {', '.join(OPTIONS)}")
    delay_s, deliver_at_ms = options.get("delay_s"), options.get("deliver_at_ms")
    if delay_s is not None:
        if deliver_at_ms is not None:
            raise InvalidArgumentError("delay_s and deliver_at_ms exclude each other: pass only one of them")
        deliver_at_ms = round((now_s + seconds("delay_s", delay_s)) * 1000)
    return deliver_at_ms, options.get("sharding_key")


def _task_id(task_id: object) -> str:
    if not is_task_id(task_id):
        raise InvalidArgumentError(f"{task_id!r} is not the id of a task")
    return task_id


def _result(task_id: str, state: StateRecord | None) -> TaskResult:
    if state is None:
        return TaskResult(id=task_id, status=TaskState.PENDING.value, result=None)
    return TaskResult(id=task_id, status=state.state.value, created_at=state.created_at_s, result=state.result)


def _apart(call: Callable[[], T]) -> T:
    """Run `call` and return its result. If an event loop runs in this thread, `call` runs in a separate thread. `call`
    waits for Ray, and Ray warns about blocking calls in an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    ended: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            ended.append(call())
        # keep any error of this helper thread for the thread that waits for the result, which raises it again
        except BaseException as error:
            failed.append(error)

    thread = start_daemon(run, name="raymq-serve")
    if thread is None:
        return call()
    thread.join()
    if failed:
        raise failed[0]
    return ended[0]


def _close_later(connection: TaskConnection) -> None:
    """Close the connection of a garbage-collected adapter in a separate thread. The garbage collector may run in any
    thread, at a point where blocking is not allowed."""
    # At the interpreter's exit no thread starts, and the client's exit handler closes the connection.
    start_daemon(_close, connection, name="raymq-serve-close")


def _close(connection: TaskConnection) -> None:
    try:
        connection.close()
    except RaymqError as error:
        logger.warning("%s: closing the connection failed: %s", connection.name, error)
