"""Calls in other threads: several at a time, or one that no signal handler interrupts.

Both also work while the interpreter ends. A `ThreadPoolExecutor` takes no work any more once the main thread has
finished, which is before functions registered with `atexit` run: a client that is closed there still has offsets to
commit.

Python runs signal handlers in the main thread alone, between two of its bytecodes, and what a handler raises (ctrl-C
raises KeyboardInterrupt) comes out of whatever runs there. `aside` makes a call in a helper thread while the main
thread waits for it; so the handler's exception ends the wait, never the call.
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
"""A helper thread that was not used for so long ends, if another one is idle."""
SIGNAL_LOOK_S: Final = 1.0
"""How long a signal may wait for its handler. One that comes just before the main thread blocks does not wake it."""

logger = logging.getLogger(__name__)


class _HelperCall:
    """A call that a helper makes, and its end. `ended` is locked until then."""

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
        except BaseException as error:  # it is raised in the thread that waits
            self.error = error
        self.ended.release()


class _Helper:
    """A thread that makes calls for the main thread. Waits in `_idle` while it has none."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[_HelperCall] = SimpleQueue()
        threading.Thread(target=self._run, name="raymq-aside", daemon=True).start()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            if not _idle:  # the main thread finds one next time
                try:
                    _idle.append(_Helper())
                except RuntimeError as error:  # the process has as many threads as it may: the call needs no other
                    logger.debug("no further helper thread can be started now: %s", error)
            call.make()
            del call
            _idle.append(self)

    def _next(self) -> _HelperCall | None:
        """The next call; None if there was none for so long that this thread is to end."""
        while True:
            try:
                return self.calls.get(timeout=HELPER_IDLE_S)
            except Empty:
                pass
            if len(_idle) == 1 and self in _idle:
                continue
            try:
                _idle.remove(self)
            except ValueError:  # the main thread has just taken this helper; or was interrupted then, and forgot it
                with suppress(Empty):
                    return self.calls.get(timeout=HELPER_IDLE_S)
            return None


def _start_helper(call: _HelperCall) -> None:
    """Make a call in a new helper. Runs in a bare thread, which the main thread starts by one call of C.

    `threading.Thread.start` takes several steps, and none of them may be interrupted: it would leave locks of the
    `threading` module held, or a thread that dies before it runs.
    """
    try:
        _Helper().calls.put(call)
    except BaseException as error:  # no thread can be started: the main thread must not wait for ever
        call.error = error
        call.ended.release()


_idle: Final[list[_Helper]] = []
"""Helpers without a call. Each step on the list is atomic."""
os.register_at_fork(after_in_child=_idle.clear)


def aside(function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """Make a call so that no signal handler interrupts it: from the main thread in a helper thread, else at once.

    Returns or raises what the call does. When a signal handler raises in the main thread, that exception is raised at
    once, and the call goes on to its own end.
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
            call.error = None  # it leads to this frame
    result: Result = call.result
    return result


def map_parallel(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads_max: int, name: str
) -> list[Result]:
    """The result of `function` for each item, in the order of the items, of up to `threads_max` calls at a time.

    Returns when all calls have ended. Of several that failed, the exception for the first item is raised then. `name`
    begins the threads' names.
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
