"""Calls in other threads: several calls at a time, or one call that no signal handler interrupts.

Both kinds of call also work while the interpreter shuts down. A `ThreadPoolExecutor` refuses work after the main thread
has finished, even before the functions registered with `atexit` run. Daemon threads then make the pool's calls, so that
no event loop stands still. In Python 3.12, no thread can be started then, either. But if such a function closes a
client, the client still has to commit offsets. So if no thread can be started, the calling thread makes the calls
itself.

Python runs signal handlers only in the main thread, between two bytecodes. An exception of a handler (ctrl-C raises
KeyboardInterrupt) appears in the interrupted code. `aside` makes a call in a helper thread while the main thread waits.
So the handler's exception ends the wait, never the call. `contained` calls a function of the program in a thread of
raymq, and keeps the function's exception from that thread.
"""

from __future__ import annotations

import logging
import os
import threading
from _thread import allocate_lock, get_ident, start_new_thread
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from itertools import takewhile
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from raymq.common.errors import ClientStateError

Item = TypeVar("Item")
Result = TypeVar("Result")


HELPER_IDLE_S: Final = 10.0
"""Seconds after which an unused helper thread ends, if another helper thread is idle."""
SIGNAL_LOOK_S: Final = 1.0
"""Maximum delay of a signal handler, in seconds. A signal that arrives just before the main thread blocks does not wake
it, so the main thread wakes at this interval."""

logger = logging.getLogger(__name__)


class _HelperCall:
    """A call that a helper thread makes, and its result. The lock `ended` is held until the call has ended."""

    __slots__ = ("arguments", "ended", "error", "function", "keywords", "result")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        self.function, self.arguments, self.keywords = function, arguments, keywords
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = allocate_lock()
        self.ended.acquire()

    def make(self) -> None:
        try:
            self.result = self.function(*self.arguments, **self.keywords)
        # catch every error of the called function: the thread that waits for this call raises it
        except BaseException as error:
            self.error = error
        self.ended.release()


class _Helper:
    """A helper thread that makes calls for the main thread. Between calls the helper is in the list `_idle`."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[_HelperCall] = SimpleQueue()
        threading.Thread(target=self._run, name="raymq-aside", daemon=True).start()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            # No other helper thread is idle. Start one, so that the main thread's next call of `aside` finds an idle
            # helper.
            if not _idle:
                try:
                    _idle.append(_Helper())
                # the process cannot start another helper thread now; this helper thread can still make its own call
                except RuntimeError as error:
                    logger.debug("no further helper thread can be started now: %s", error)
            call.make()
            del call
            _idle.append(self)

    def _next(self) -> _HelperCall | None:
        """Return the next call for this helper thread. Returns None if the helper was idle for so long that its thread
        should end."""
        while True:
            try:
                return self.calls.get(timeout=HELPER_IDLE_S)
            except Empty:
                pass
            if len(_idle) == 1 and self in _idle:
                continue
            try:
                _idle.remove(self)
            # the main thread has just taken this helper from the list of idle helpers; its call may still arrive, or
            # may never arrive because of a signal
            except ValueError:
                with suppress(Empty):
                    return self.calls.get(timeout=HELPER_IDLE_S)
            return None


def _start_helper(call: _HelperCall) -> None:
    """Make a call in a new helper thread. This function runs in a bare thread, which the main thread starts with a
    single C call.

    `threading.Thread.start` takes several steps. An interrupt between the steps would leave locks of the `threading`
    module held, or a thread that dies before it runs.
    """
    try:
        _Helper().calls.put(call)
    # The process cannot start a thread. The waiting main thread must get the error, or it would wait forever.
    except BaseException as error:
        call.error = error
        call.ended.release()


_idle: Final[list[_Helper]] = []
"""Helper threads that make no call at the moment. Each operation on this list is atomic."""
os.register_at_fork(after_in_child=_idle.clear)


def is_shutdown_error(error: RuntimeError) -> bool:
    """Return True if a thread could not be started because the interpreter shuts down (Python 3.12). Returns
    False for other reasons, such as too many threads."""
    return "interpreter shutdown" in str(error)


def start_thread(thread: threading.Thread) -> bool:
    """Start a thread. Returns False if the interpreter shuts down and can start no thread. Raises RuntimeError if the
    thread cannot be started for another reason."""
    try:
        thread.start()
    except RuntimeError as error:
        if not is_shutdown_error(error):
            raise
        return False
    return True


def start_daemon(function: Callable[..., object], *arguments: Any, name: str) -> threading.Thread | None:
    """Start a daemon thread that calls `function(*arguments)`. Returns the thread; None if the interpreter shuts down
    and can start no thread. Raises RuntimeError if the thread cannot be started for another reason."""
    thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
    return thread if start_thread(thread) else None


def require_daemon(function: Callable[..., object], *arguments: Any, name: str, what: str) -> threading.Thread:
    """Start a daemon thread that calls `function(*arguments)`, for an object that is useless without the thread.

    `what`: the object or call that needs the thread, for the error. Raises ClientStateError if the interpreter shuts
    down and can start no thread, and RuntimeError if the thread cannot be started for another reason.
    """
    thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
    require_thread(thread, what)
    return thread


def require_thread(thread: threading.Thread, what: str) -> None:
    """Start a thread for an object that is useless without it. Raises like `require_daemon`."""
    if not start_thread(thread):
        raise ClientStateError(
            f"{what} needs a new thread, and Python starts no thread while the program exits: begin before the exit"
        )


class _LateCalls:
    """The calls that one pool refuses because the main thread has finished. Daemon threads make these calls, as many at
    a time as the pool has threads. A thread ends after HELPER_IDLE_S without a call."""

    def __init__(self, name: str, threads_max: int) -> None:
        self._name, self._threads_max = name, threads_max
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._lock = threading.Lock()
        """Guards the two counters. A call enters the queue, and an idle thread ends, only while this lock is held."""
        self._threads = self._unfinished = 0

    def add(self, made: Future[Any], call: Callable[[], Any]) -> bool:
        """Make a call in a thread, and set the outcome of the future `made`. Returns False, and does nothing, if no
        thread serves the pool's calls and none can be started. Raises RuntimeError if the process has too many
        threads."""
        with self._lock:
            if self._unfinished >= self._threads < self._threads_max:
                try:
                    self._threads += start_daemon(self._run, name=self._name) is not None
                # the process has too many threads; a thread that already runs makes the call
                except RuntimeError:
                    if not self._threads:
                        raise
            if not self._threads:
                return False
            self._unfinished += 1
            self._calls.put((made, call))
            return True

    def _run(self) -> None:
        while True:
            try:
                made, call = self._calls.get(timeout=HELPER_IDLE_S)
            except Empty:
                with self._lock:
                    if self._calls.empty():
                        self._threads -= 1
                        return
                continue
            _make(made, call)
            del made, call
            with self._lock:
                self._unfinished -= 1


_late_calls: Final[WeakKeyDictionary[ThreadPoolExecutor, _LateCalls]] = WeakKeyDictionary()
"""The calls of each pool that has refused a call because the main thread has finished."""
os.register_at_fork(after_in_child=_late_calls.clear)


def _make(made: Future[Any], call: Callable[[], Any]) -> None:
    """Make a call, and set the outcome of the future `made`. Does nothing if the future was cancelled."""
    if not made.set_running_or_notify_cancel():
        return
    try:
        result = call()
    # catch every error, as a thread of a pool does: the future's reader gets the error
    except BaseException as error:
        made.set_exception(error)
        # break a reference cycle: the error's traceback refers to this frame, and the future refers to the error
        del made
    else:
        made.set_result(result)


def submit(pool: ThreadPoolExecutor, call: Callable[[], Result]) -> Future[Result]:
    """Make a call in a thread of a pool, and return the call's future.

    A pool accepts no call after the main thread has finished. Then a daemon thread makes the call; at most as many of
    these threads run as the pool has threads, and `pool.shutdown` does not wait for them. If the interpreter can start
    no thread, the calling thread makes the call before `submit` returns. Raises RuntimeError if the pool was shut down,
    or if the process has too many threads.
    """
    try:
        return pool.submit(call)
    except RuntimeError as error:
        # any other error leaves the call in the pool's queue, from which a thread of the pool may still take it
        if "cannot schedule new futures after interpreter shutdown" not in str(error):
            raise
    made: Future[Result] = Future()
    late = _LateCalls(f"{pool._thread_name_prefix}-late", pool._max_workers)
    if not _late_calls.setdefault(pool, late).add(made, call):
        _make(made, call)
    return made


def aside(function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """Make a call that no signal handler interrupts. If the main thread calls `aside`, the call runs in a helper
    thread.

    Returns the call's result or raises its exception. If a signal handler raises an exception in the main thread,
    `aside` raises this exception at once, and the call still runs to its end.
    """
    if get_ident() != threading.main_thread().ident:
        return function(*arguments, **keywords)
    call = _HelperCall(copy_context().run, (function, *arguments), keywords)
    try:
        helper = _idle.pop()
    except IndexError:
        try:
            start_new_thread(_start_helper, (call,))
        except RuntimeError as error:
            if not is_shutdown_error(error):
                raise
            return function(*arguments, **keywords)
    else:
        helper.calls.put(call)
    while not call.ended.acquire(True, SIGNAL_LOOK_S):
        pass
    if call.error is not None:
        try:
            raise call.error
        finally:
            # Break a reference cycle: the error's traceback refers to this frame, and this frame refers to the error
            # through `call`.
            call.error = None
    result: Result = call.result
    return result


def contained(
    log: logging.Logger, failure: str, function: Callable[..., object], *arguments: Any
) -> BaseException | None:
    """Call a function of the program, such as a callback, so that its exception ends no work of raymq. Writes each
    exception to `log` with the text `failure`, and returns None.

    In the main thread, KeyboardInterrupt or SystemExit may be the exception of a signal handler, and must not get lost.
    There the exception is returned, and the caller raises it after its own work is complete.
    """
    try:
        function(*arguments)
    except BaseException as error:
        if not isinstance(error, Exception) and get_ident() == threading.main_thread().ident:
            return error
        log.exception("%s", failure)
    return None


def map_parallel(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads_max: int, name: str
) -> list[Result]:
    """Return the results of `function` for each item, in order, with at most `threads_max` calls at a time.

    `map_parallel` returns after all calls have ended. If several calls failed, it raises the exception of the first
    failed item. `name`: prefix of the threads' names. If the interpreter shuts down, the calling thread makes the calls
    one after another.
    """
    todo = deque(enumerate(items))
    results: dict[int, Result] = {}
    failures: dict[int, Exception] = {}

    def work() -> None:
        while True:
            try:
                number, item = todo.popleft()
            except IndexError:
                return
            try:
                results[number] = function(item)
            except Exception as error:
                failures[number] = error

    count = min(len(todo), threads_max)
    threads = [threading.Thread(target=work, name=f"{name}-{index}", daemon=True) for index in range(count)]
    started = list(takewhile(start_thread, threads))
    if len(started) < len(threads):
        work()
    for thread in started:
        thread.join()
    if failures:
        raise failures[min(failures)]
    return [results[number] for number in sorted(results)]
