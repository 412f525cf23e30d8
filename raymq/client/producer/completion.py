"""Completion: the outcomes of messages that are sent together. A SendFuture is an index in a Completion.

    SendFuture (completion, index) ──► Completion ──► Acknowledged, or an error, for all its messages
                                            └──► one outcome for each part, if the batch was divided

A future has no state of its own, so it is cheap to make. A completion makes its Condition and its lists of callbacks
only when a thread or an event loop waits. The garbage collector does not track futures, so no completion may refer to
one of its futures after the outcome is set. A raised error has a traceback, whose frames refer to the future. Therefore
a completion always raises a copy of the error.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, RUNNING
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Struct, field

from raymq.client.producer.results import Acknowledged, BeforeEnd, Outcome
from raymq.common.closing import refuse_other_process, shared_lock
from raymq.common.errors import RaymqError
from raymq.common.message import SendResult
from raymq.common.parallel import aside, contained

if TYPE_CHECKING:
    import asyncio

E = TypeVar("E", bound=BaseException)

logger = logging.getLogger(__name__)

CALLBACK_FAILED: Final = "a callback of a send raised an exception"
_CREATING: Final = shared_lock()
"""Lock that all completions share. A completion holds it for a moment while it makes its Condition, or sets an outcome
without a Condition."""
_Watcher = tuple[int, Any, Callable[[Any], object] | None, Any]
"""A subscriber to a message's outcome: the message's index, its future, and a callback or a waiter of
concurrent.futures."""


class Completion(Struct, eq=False):
    """The outcomes of messages that share a batch, even if several calls sent the messages. Thread-safe.

    Either all messages have one outcome, `acknowledged` or `error`, or each part of the messages has its own outcome.
    `before_end` is called just before an outcome is set. Its arguments are the index of the first message, the index
    after the last message, and the outcome.
    """

    before_end: BeforeEnd | None = None
    acknowledged: Acknowledged | None = None
    error: BaseException | None = None
    results: list[SendResult] | None = None
    """SendResults of all messages of this Completion. They are computed when a caller first requests the result of one
    of the messages; None until then."""
    _parts: list[tuple[int, int, Outcome]] | None = None
    _lock: threading.RLock | None = None
    """Guards the outcomes while a thread or an event loop waits. It is an RLock, because a signal handler that
    interrupts a `with` statement never leaves an RLock held."""
    _condition: threading.Condition | None = None
    """Condition that is notified when an outcome is set; it uses `_lock`."""
    _watchers: list[_Watcher] = []
    _loops: dict[Any, list[tuple[int, Any]]] = {}
    """For each event loop, the indices of the messages that the loop awaits, each with the loop's future."""
    _process_id: int = field(default_factory=os.getpid)
    """Id of the process that created this Completion and sends its messages. A wait for the outcome in another process
    (after a fork) is refused."""

    def end(self, outcome: Outcome, first: int, end: int, *, divided: bool = False) -> None:
        """Set the outcome of the messages from index `first` up to, but not including, `end`. Called once per message.

        If `divided` is false, the range covers all messages. Wakes waiting threads, wakes each waiting event loop once,
        and calls the callbacks. If `before_end` or a signal handler in a callback raises an exception, this method
        raises the exception after all of this is done.
        """
        raised: BaseException | None = None
        if isinstance(outcome, RaymqError):
            # Remove the traceback: it refers to frames whose variables would keep the messages in memory.
            outcome.__traceback__ = None
        if self.before_end is not None:
            try:
                self.before_end(first, end, outcome)
            # the messages need their outcome even if an observer of the send fails
            except BaseException as error:
                raised = error
            if not divided:
                self.before_end = None
        with _CREATING:
            condition = self._condition
            # If no Condition exists, no thread or event loop waits for an outcome, and no callback is registered.
            if condition is None:
                self._set(outcome, first, end, divided)
        if condition is not None:
            raised = self._notify(condition, outcome, first, end, divided) or raised
        if raised is not None:
            raise raised

    def _notify(
        self, condition: threading.Condition, outcome: Outcome, first: int, end: int, divided: bool
    ) -> BaseException | None:
        """Set the outcome of the messages from index `first` up to `end`, and notify all that wait for it. Returns the
        exception of a signal handler that ran in a callback."""
        with condition:
            self._set(outcome, first, end, divided)
            condition.notify_all()
            ended = [watcher for watcher in self._watchers if first <= watcher[0] < end]
            self._watchers = [watcher for watcher in self._watchers if not first <= watcher[0] < end]
            for _, future, callback, waiter in ended:
                if callback is None:
                    notify = waiter.add_exception if isinstance(outcome, BaseException) else waiter.add_result
                    notify(future)
            loops = self._take_loops(first, end)
        for loop, waiting in loops:
            _wake(loop, waiting)
        raised: BaseException | None = None
        for _, future, callback, _ in ended:
            if callback is not None:
                raised = contained(logger, CALLBACK_FAILED, callback, future) or raised
        return raised

    def done(self, index: int) -> bool:
        """Return True if message `index` has an outcome."""
        return self.acknowledged is not None or self._find(index) is not None

    def wait(self, index: int, timeout_s: float | None) -> tuple[int, Outcome]:
        """Wait for the outcome of message `index`.

        Returns the outcome, which may apply to several consecutive messages, and the index of the first of these
        messages. Raises TimeoutError if there is no outcome after `timeout_s`.
        """
        return self._find(index) or aside(self._wait, index, timeout_s)

    def _wait(self, index: int, timeout_s: float | None) -> tuple[int, Outcome]:
        condition = self.condition()
        with condition:
            if not condition.wait_for(lambda: self._find(index) is not None, timeout_s):
                raise TimeoutError
            found = self._find(index)
            assert found is not None
            return found

    def result(self, index: int, timeout_s: float | None = None) -> SendResult:
        """Wait for the SendResult of message `index`, and return it. Raises a copy of the message's error if its send
        failed, or TimeoutError if there is no outcome after `timeout_s`."""
        first, outcome = self.wait(index, timeout_s)
        if isinstance(outcome, BaseException):
            raise copied(outcome)
        results = outcome.results()
        if outcome is self.acknowledged:
            self.results = results
        return results[index - first]

    def exception(self, index: int, timeout_s: float | None = None) -> BaseException | None:
        """Wait for the outcome of message `index`. Returns a copy of the message's error; None if the message was
        stored. Raises TimeoutError if there is no outcome after `timeout_s`."""
        outcome = self.wait(index, timeout_s)[1]
        return copied(outcome) if isinstance(outcome, BaseException) else None

    def condition(self) -> threading.Condition:
        """Return the Condition on which threads wait for outcomes of this completion. The first call creates the
        Condition. After that, outcomes are set while its lock is held."""
        condition = self._condition
        if condition is None:
            refuse_other_process(self._process_id, "send")
            with _CREATING:
                condition = self._condition
                if condition is None:
                    self._lock = threading.RLock()
                    condition = self._condition = threading.Condition(self._lock)
        return condition

    def guard(self) -> threading.RLock:
        """Return the lock of this completion's Condition."""
        self.condition()
        assert self._lock is not None
        return self._lock

    def add_callback(self, index: int, future: SendFuture, callback: Callable[[Any], object]) -> None:
        """Call `callback(future)` when message `index` has an outcome. If the outcome is already set, the callback is
        called at once; otherwise it is called later, in the thread that sets the outcome."""
        with self.guard():
            if not self.done(index):
                self._watchers.append((index, future, callback, None))
                return
        try:
            callback(future)
        except Exception:
            logger.exception(CALLBACK_FAILED)

    def add_waiter(self, index: int, future: SendFuture, waiter: Any) -> None:
        """Register a waiter of concurrent.futures (`wait` or `as_completed`). It is notified when message `index` has
        an outcome. The caller must hold this Completion's condition."""
        self._watchers.append((index, future, None, waiter))

    def remove_waiter(self, index: int, waiter: Any) -> None:
        """Remove a waiter of concurrent.futures, so that it is not notified when message `index` has an outcome. The
        caller holds the completion's condition."""
        self._watchers = [known for known in self._watchers if known[0] != index or known[3] is not waiter]

    def add_loop_waiter(self, index: int, loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[None]) -> bool:
        """Register the asyncio future `waiting`: it is completed in its event loop when message `index` has an outcome.
        Returns False, and does nothing, if the message already has an outcome."""
        with self.guard():
            if self.done(index):
                return False
            self._loops.setdefault(loop, []).append((index, waiting))
            return True

    def _set(self, outcome: Outcome, first: int, end: int, divided: bool) -> None:
        if divided:
            self._parts = [*(self._parts or ()), (first, end, outcome)]
        elif isinstance(outcome, Acknowledged):
            self.acknowledged = outcome
        else:
            self.error = outcome

    def _find(self, index: int) -> tuple[int, Outcome] | None:
        if self.acknowledged is not None:
            return 0, self.acknowledged
        if self.error is not None:
            return 0, self.error
        for first, end, outcome in self._parts or ():
            if first <= index < end:
                return first, outcome
        return None

    def _take_loops(self, first: int, end: int) -> list[tuple[asyncio.AbstractEventLoop, list[asyncio.Future[None]]]]:
        """Return the event loops that await messages from `first` up to `end`, each with its futures for these
        messages. Also remove these futures from `_loops`."""
        taken = []
        for loop, waiting in list(self._loops.items()):
            taken.append((loop, [future for index, future in waiting if first <= index < end]))
            left = [(index, future) for index, future in waiting if not first <= index < end]
            if left:
                self._loops[loop] = left
            else:
                del self._loops[loop]
        return taken


def _wake(loop: asyncio.AbstractEventLoop, waiting: list[asyncio.Future[None]]) -> None:
    """Complete asyncio futures in their event loop, with a single wake-up of the loop."""

    def settle() -> None:
        for future in waiting:
            if not future.done():
                future.set_result(None)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        logger.debug("an event loop was closed before its sends ended")


def copied(error: E) -> E:
    """Return a copy of `error` to raise. The copy has the same arguments, fields, cause and notes, but its own
    traceback."""
    copy: E = error.__class__.__new__(error.__class__, *error.args)
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    copy.__cause__, copy.__suppress_context__ = error.__cause__, error.__suppress_context__
    return copy


class _Waiters:
    """A list of waiters that always stays empty. concurrent.futures expects such a list as an attribute of a future.
    `append` and `remove` pass a waiter to the Completion instead."""

    __slots__ = ("_completion", "_future", "_index")

    def __init__(self, completion: Completion, index: int, future: SendFuture) -> None:
        self._completion, self._index, self._future = completion, index, future

    def append(self, waiter: Any) -> None:
        self._completion.add_waiter(self._index, self._future, waiter)

    def remove(self, waiter: Any) -> None:
        self._completion.remove_waiter(self._index, waiter)


if TYPE_CHECKING:

    class SendFuture(Future[SendResult]):
        """Declaration of SendFuture for type checkers. At run time, the Struct below is used."""

        def __init__(self, completion: Completion, index: int) -> None: ...

        @property
        def place(self) -> tuple[Completion, int]: ...

        def __await__(self) -> Generator[Any, None, SendResult]: ...

else:

    class SendFuture(Struct, frozen=True, gc=False):
        """The future of one message: the message's index in a Completion.

        A SendFuture behaves as a concurrent.futures.Future: `result`, `exception`, `done`, `add_done_callback`,
        `concurrent.futures.wait` and `as_completed`, `asyncio.wrap_future`. It can be awaited, too. It cannot be
        cancelled, because its message is already enqueued for sending. Two futures of one message are equal.
        """

        _completion: Completion
        _index: int

        @property
        def __class__(self):
            return Future

        @property
        def place(self):
            """Return this future's completion, and the message's index in the completion."""
            return self._completion, self._index

        def result(self, timeout=None):
            results = self._completion.results
            # Fast path for a message that already has its result. Programs often wait for the first of many messages,
            # and then read the results of all others.
            if results is not None:
                return results[self._index]
            return self._completion.result(self._index, timeout)

        def exception(self, timeout=None):
            return self._completion.exception(self._index, timeout)

        def done(self):
            return self._completion.done(self._index)

        def running(self):
            return not self.done()

        def cancel(self):
            return False

        def cancelled(self):
            return False

        def add_done_callback(self, fn):
            self._completion.add_callback(self._index, self, fn)

        def __await__(self):
            if not self.done():
                from asyncio import get_running_loop

                loop = get_running_loop()
                waiting = loop.create_future()
                if self._completion.add_loop_waiter(self._index, loop, waiting):
                    yield from waiting
            return self.result(0)

        def __reduce__(self):
            raise TypeError("the future of a send cannot be pickled: read its result in the producer's process")

        # Attributes of a future that concurrent.futures.wait and as_completed use

        @property
        def _condition(self):
            return self._completion.condition()

        @property
        def _state(self):
            return FINISHED if self.done() else RUNNING

        @property
        def _waiters(self):
            return _Waiters(self._completion, self._index, self)
