"""Calls in other threads: several at a time, or one that no signal handler interrupts.

Both also work while the interpreter shuts down. A `ThreadPoolExecutor` refuses work after the main thread has finished,
before functions registered with `atexit` run; a client that is closed there still has offsets to commit.

Python runs signal handlers only in the main thread, between two bytecodes, and an exception of a handler (ctrl-C raises
KeyboardInterrupt) appears in the interrupted code. `aside` makes a call in a helper thread while the main thread waits.
So the handler's exception ends the wait, never the call.
"""

from __future__ import annotations

import logging
import os
import threading
from _thread import allocate_lock, get_ident, start_new_thread
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


HELPER_IDLE_S: Final = 10.0
"""A helper thread that is unused for this time ends, if another helper is idle."""
SIGNAL_LOOK_S: Final = 1.0
"""The longest time until a signal's handler runs. A signal just before the main thread blocks does not wake the
thread."""

logger = logging.getLogger(__name__)


class _HelperCall:
    """A call that a helper makes, and its result. `ended` is locked until the call has ended."""

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
        except BaseException as error:  # the waiting thread raises it
            self.error = error
        self.ended.release()


class _Helper:
    """A thread that makes calls for the main thread. It waits in `_idle` between calls."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[_HelperCall] = SimpleQueue()
        threading.Thread(target=self._run, name="raymq-aside", daemon=True).start()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            if not _idle:  # the main thread finds an idle helper next time
                try:
                    _idle.append(_Helper())
                except RuntimeError as error:  # the process cannot start more threads; the call needs no other helper
                    logger.debug("no further helper thread can be started now: %s", error)
            call.make()
            del call
            _idle.append(self)

    def _next(self) -> _HelperCall | None:
        """Return the next call; None if this thread was idle for so long that it should end."""
        while True:
            try:
                return self.calls.get(timeout=HELPER_IDLE_S)
            except Empty:
                pass
            if len(_idle) == 1 and self in _idle:
                continue
            try:
                _idle.remove(self)
            except ValueError:  # the main thread has just taken this helper, or a signal interrupted it then
                with suppress(Empty):
                    return self.calls.get(timeout=HELPER_IDLE_S)
            return None


def _start_helper(call: _HelperCall) -> None:
    """Make a call in a new helper. Runs in a bare thread, which the main thread starts by one call of C.

    `threading.Thread.start` takes several steps. An interrupt between them would leave locks of the `threading` module
    held, or a thread that dies before it runs.
    """
    try:
        _Helper().calls.put(call)
    except BaseException as error:  # no thread can be started; without an error the main thread would wait for ever
        call.error = error
        call.ended.release()


_idle: Final[list[_Helper]] = []
"""Helpers without a call. Each step on the list is atomic."""
os.register_at_fork(after_in_child=_idle.clear)


def aside(function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """Make a call that no signal handler interrupts. Calls from the main thread run in a helper thread.

    Returns or raises the call's result. If a signal handler raises in the main thread, its exception is raised at once,
    and the call continues to its end.
    """
    if get_ident() != threading.main_thread().ident:
        return function(*arguments, **keywords)
    call = _HelperCall(copy_context().run, (function, *arguments), keywords)
    try:
        helper = _idle.pop()
    except IndexError:
        start_new_thread(_start_helper, (call,))
    else:
        helper.calls.put(call)
    while not call.ended.acquire(True, SIGNAL_LOOK_S):
        pass
    if call.error is not None:
        try:
            raise call.error
        finally:
            call.error = None  # the exception refers to this frame
    result: Result = call.result
    return result


def map_parallel(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads_max: int, name: str
) -> list[Result]:
    """Return the results of `function` for each item, in order, with at most `threads_max` calls at a time.

    Returns after all calls have ended. If several calls failed, raises the exception for the first failed item. `name`:
    prefix of the threads' names.
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
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[min(failures)]
    return [results[number] for number in sorted(results)]
