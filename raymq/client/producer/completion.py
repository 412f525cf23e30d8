"""The ends of sends: one Completion for messages that travel together, and futures that are places in it.

    SendFuture (completion, index) ──► Completion ──► Acknowledged, or the error, of all its messages
                                            └──► of parts of them, where a batch had to be divided

A future has no state of its own, so making one costs next to nothing. A completion makes what waiting needs (a
Condition, lists of callbacks) when somebody waits. The garbage collector does not track futures; so a completion drops
everything that might lead back to one of its futures when it ends, and each raise is of a copy of its error, whose
traceback leads to the frames that hold the future.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, RUNNING
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, overload

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from raymq.common.closing import refuse_other_process, shared_lock
from raymq.common.errors import RaymqError
from raymq.common.message import MessageQueue, SendResult, SendStatus
from raymq.common.parallel import aside
from raymq.common.protocol.recall import RecallHandle
from raymq.records.format.layout import encode_host
from raymq.records.format.message_id import IdRange

if TYPE_CHECKING:
    import asyncio

E = TypeVar("E", bound=BaseException)

logger = logging.getLogger(__name__)

_CREATING: Final = shared_lock()
"""Held for a moment while a completion makes its Condition, or ends without one."""
_HEX_PAIRS: Final = [f"{number:02X}" for number in range(256)]
_HEX_DIGITS: Final = np.frombuffer("".join(_HEX_PAIRS).encode(), np.uint16)
"""The two digits of each byte as one number."""


class DueTimes(NamedTuple):
    """The times of delayed messages of one topic, in ms since 1970, in the order of the messages."""

    topic: str
    times_ms: Sequence[int]


class Acknowledged:
    """The store's answer for messages that follow each other in one batch of `queue`.

    Message i has unique id `message_ids[i]` and queue offset `queue_offsets[i]`. Its record begins at
    `physical_offsets[i]`. The SendResults are made when one is asked for.
    """

    __slots__ = (
        "_due",
        "_results",
        "_store_host",
        "message_ids",
        "physical_offsets",
        "queue",
        "queue_offsets",
        "status",
    )

    def __init__(
        self,
        status: SendStatus,
        queue: MessageQueue,
        message_ids: Sequence[str],
        queue_offsets: Sequence[int],
        physical_offsets: Sequence[int] | NDArray[np.int64],
        store_host: tuple[str, int],
        due: DueTimes | None = None,
    ) -> None:
        """`due`: of messages in a timer queue."""
        self._due = due
        self.status, self.queue = status, queue
        self.message_ids, self.queue_offsets, self.physical_offsets = message_ids, queue_offsets, physical_offsets
        self._store_host = store_host
        self._results: list[SendResult] | None = None

    def results(self) -> list[SendResult]:
        """A SendResult for each message, in order; the same list each time, so do not change it."""
        made = self._results
        if made is None:
            made = self._results = self._make()
        return made

    def _make(self) -> list[SendResult]:
        status, queue = self.status, self.queue
        if self._due is not None:
            return self._make_recallable(self._due)
        if len(self.message_ids) == 1:
            offset_id = offset_message_id(self._store_host, int(self.physical_offsets[0]))
            return [SendResult(status, self.message_ids[0], offset_id, queue, self.queue_offsets[0])]
        ids, offset_ids = _texts(self.message_ids), offset_message_ids(self._store_host, self.physical_offsets)
        # Without a line of Python per message: a program may send a million.
        return list(map(SendResult, repeat(status), ids, offset_ids, repeat(queue), self.queue_offsets))

    def _make_recallable(self, due: DueTimes) -> list[SendResult]:
        """The results of messages that wait for their times."""
        ids, offset_ids = _texts(self.message_ids), offset_message_ids(self._store_host, self.physical_offsets)
        name = self.queue.broker_name
        handles = [
            str(RecallHandle(due.topic, name, at_ms, message_id))
            for at_ms, message_id in zip(due.times_ms, ids, strict=True)
        ]
        results = map(SendResult, repeat(self.status), ids, offset_ids, repeat(self.queue), self.queue_offsets, handles)
        return list(results)


class SendResults(Sequence[SendResult]):
    """The results of messages that were sent together, in order. They are made when one of them is looked at, so a
    program that only waits for them does not pay for them. Equal to a list of the same results; immutable."""

    __slots__ = ("_acknowledged",)

    def __init__(self, acknowledged: Acknowledged) -> None:
        self._acknowledged = acknowledged

    def __len__(self) -> int:
        return len(self._acknowledged.queue_offsets)

    @overload
    def __getitem__(self, index: int) -> SendResult: ...

    @overload
    def __getitem__(self, index: slice) -> list[SendResult]: ...

    def __getitem__(self, index: int | slice) -> SendResult | list[SendResult]:
        return self._acknowledged.results()[index]

    def __iter__(self) -> Iterator[SendResult]:
        return iter(self._acknowledged.results())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (SendResults, list)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def __add__(self, other: Iterable[SendResult]) -> list[SendResult]:
        return [*self, *other]

    def __radd__(self, other: Iterable[SendResult]) -> list[SendResult]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type[list[SendResult]], tuple[list[SendResult]]]:
        return list, (list(self),)


@lru_cache(maxsize=256)
def _host_digits(store_host: tuple[str, int]) -> str:
    return encode_host(*store_host).hex().upper()


def offset_message_id(store_host: tuple[str, int], physical_offset: int) -> str:
    """The offset message id (raymq.records.format.message_id) of the record at this byte of the store at
    `store_host`."""
    return f"{_host_digits(store_host)}{physical_offset:016X}"


def offset_message_ids(store_host: tuple[str, int], physical_offsets: Sequence[int] | NDArray[np.int64]) -> list[str]:
    """The offset message ids (raymq.records.format.message_id) of the records at these bytes of the store at
    `store_host`."""
    host = encode_host(*store_host)
    rows = np.empty((len(physical_offsets), len(host) + 8), np.uint8)
    rows[:, : len(host)] = np.frombuffer(host, np.uint8)
    rows[:, len(host) :] = np.array(physical_offsets, ">i8").view(np.uint8).reshape(-1, 8)
    digits, width = _HEX_DIGITS[rows].tobytes().decode(), 2 * rows.shape[1]
    return [digits[at : at + width] for at in range(0, len(digits), width)]


def _texts(ids: Sequence[str]) -> Sequence[str]:
    """The ids as texts; those of a range are made 256 at a time."""
    if not isinstance(ids, IdRange) or len(ids) < 8:
        return list(ids)
    texts: list[str] = []
    number, end = ids.first, ids.first + len(ids)
    while number < end:
        until = min(end, (number | 0xFF) + 1)
        prefix = ids.stem + _HEX_PAIRS[number >> 8 & 0xFF]
        low = number & 0xFF
        texts += [prefix + pair for pair in _HEX_PAIRS[low : low + until - number]]
        number = until
    return texts


Outcome = Acknowledged | BaseException
"""The end of messages: they are stored, or there was an error."""
BeforeEnd = Callable[[int, int, Outcome], None]
"""Called before messages of a Completion end: the indices of the first of them and behind the last, their outcome."""
_Watcher = tuple[int, Any, Callable[[Any], object] | None, Any]
"""The index of a future, the future, and the callback, or the waiter of concurrent.futures, that waits for it."""


class Completion(Struct, eq=False):
    """The ends of messages that were handed over together or one after another. Thread-safe.

    Either all have one end, `acknowledged` or `error`, or parts of them have ends of their own. `before_end`, if there
    is one, is called just before messages end, with the index of the first of them, the index behind the last, and
    their outcome.
    """

    before_end: BeforeEnd | None = None
    acknowledged: Acknowledged | None = None
    error: BaseException | None = None
    results: list[SendResult] | None = None
    """Those of all messages, from when one of them was asked for."""
    _parts: list[tuple[int, int, Outcome]] | None = None
    _lock: threading.RLock | None = None
    """Guards the ends, once somebody waits for them: by a `with` of it, which no signal handler leaves locked."""
    _condition: threading.Condition | None = None
    """Of the lock."""
    _watchers: list[_Watcher] = []
    _loops: dict[Any, list[tuple[int, Any]]] = {}
    """By event loop, the indices of messages that are awaited there, and the futures of the loop."""
    _process_id: int = field(default_factory=os.getpid)
    """The process whose threads will end the messages."""

    def end(self, outcome: Outcome, first: int, end: int, *, divided: bool = False) -> None:
        """Give the messages from index `first` up to `end` their end, once; all there are, unless `divided`.

        Threads that wait are woken, each event loop with messages that wait is woken once, and callbacks are called.
        """
        if isinstance(outcome, RaymqError):
            outcome.__traceback__ = None  # it leads to the frames that hold what was sent
        if self.before_end is not None:
            self.before_end(first, end, outcome)
            if not divided:
                self.before_end = None
        with _CREATING:
            condition = self._condition
            if condition is None:  # nobody waits, or has a callback
                self._note(outcome, first, end, divided)
                return
        with condition:
            self._note(outcome, first, end, divided)
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
        for _, future, callback, _ in ended:
            if callback is not None:
                _call(callback, future)

    def done(self, index: int) -> bool:
        """True if message `index` has its end."""
        return self.acknowledged is not None or self._find(index) is not None

    def wait(self, index: int, timeout_s: float | None) -> tuple[int, Outcome]:
        """Wait for the end of message `index`: the first index of the part that ended with it, and the outcome.
        TimeoutError after `timeout_s`."""
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
        """The SendResult of message `index`; its error, copied; or TimeoutError after `timeout_s`."""
        first, outcome = self.wait(index, timeout_s)
        if isinstance(outcome, BaseException):
            raise copied(outcome)
        results = outcome.results()
        if outcome is self.acknowledged:
            self.results = results
        return results[index - first]

    def exception(self, index: int, timeout_s: float | None = None) -> BaseException | None:
        """A copy of the error of message `index`, None if it was stored; or TimeoutError after `timeout_s`."""
        outcome = self.wait(index, timeout_s)[1]
        return copied(outcome) if isinstance(outcome, BaseException) else None

    def condition(self) -> threading.Condition:
        """The condition that guards the ends, once somebody waits for them."""
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
        """The lock of the condition."""
        self.condition()
        assert self._lock is not None
        return self._lock

    def add_callback(self, index: int, future: SendFuture, callback: Callable[[Any], object]) -> None:
        """Call `callback(future)` when message `index` has its end: at once if it has, else in the thread that ends
        it."""
        with self.guard():
            if not self.done(index):
                self._watchers.append((index, future, callback, None))
                return
        _call(callback, future)

    def add_waiter(self, index: int, future: SendFuture, waiter: Any) -> None:
        """Tell a waiter of concurrent.futures when message `index` has its end. Called with the condition."""
        self._watchers.append((index, future, None, waiter))

    def remove_waiter(self, index: int, waiter: Any) -> None:
        """Forget a waiter. Called with the condition."""
        self._watchers = [known for known in self._watchers if known[0] != index or known[3] is not waiter]

    def add_loop_waiter(self, index: int, loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[None]) -> bool:
        """End `waiting` in its loop when message `index` has its end. False if it has: nothing is done then."""
        with self.guard():
            if self.done(index):
                return False
            self._loops.setdefault(loop, []).append((index, waiting))
            return True

    def _note(self, outcome: Outcome, first: int, end: int, divided: bool) -> None:
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
        """The event loops with messages that end, and their futures; they are forgotten."""
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
    """End the futures, in their loop, by one wake of it."""

    def settle() -> None:
        for future in waiting:
            if not future.done():
                future.set_result(None)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        logger.debug("an event loop was closed while sends were under way")


def _call(callback: Callable[[Any], object], future: Any) -> None:
    try:
        callback(future)
    except Exception:
        logger.exception("a callback of a send failed")


def copied(error: E) -> E:
    """A copy of `error` to be raised: with its arguments, fields, cause and notes, and a traceback of its own."""
    copy: E = error.__class__.__new__(error.__class__, *error.args)
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    copy.__cause__, copy.__suppress_context__ = error.__cause__, error.__suppress_context__
    return copy


class _Waiters:
    """The list of waiters that concurrent.futures expects a future to have."""

    __slots__ = ("_completion", "_future", "_index")

    def __init__(self, completion: Completion, index: int, future: SendFuture) -> None:
        self._completion, self._index, self._future = completion, index, future

    def append(self, waiter: Any) -> None:
        self._completion.add_waiter(self._index, self._future, waiter)

    def remove(self, waiter: Any) -> None:
        self._completion.remove_waiter(self._index, waiter)


if TYPE_CHECKING:

    class SendFuture(Future[SendResult]):
        """As below, for type checkers."""

        def __init__(self, completion: Completion, index: int) -> None: ...

        @property
        def place(self) -> tuple[Completion, int]: ...

        def __await__(self) -> Generator[Any, None, SendResult]: ...

else:

    class SendFuture(Struct, frozen=True, gc=False):
        """The future of one message: its index in a Completion.

        It is a concurrent.futures.Future to its users: `result`, `exception`, `done`, `add_done_callback`,
        `concurrent.futures.wait` and `as_completed`, `asyncio.wrap_future`. It can be awaited, too, and cannot be
        cancelled: its message is on its way as soon as it was handed over. Two futures of one message are equal.
        """

        _completion: Completion
        _index: int

        @property
        def __class__(self):
            return Future

        @property
        def place(self):
            """The completion and the index in it."""
            return self._completion, self._index

        def result(self, timeout=None):
            results = self._completion.results
            if results is not None:  # mostly: a program waits for the first of many, and then asks for all
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
            raise TypeError("the future of a send cannot be pickled: ask for its result where the producer is")

        # What concurrent.futures.wait and as_completed use.

        @property
        def _condition(self):
            return self._completion.condition()

        @property
        def _state(self):
            return FINISHED if self.done() else RUNNING

        @property
        def _waiters(self):
            return _Waiters(self._completion, self._index, self)
