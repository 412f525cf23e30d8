"""The threads of a listener's process, and what they are working on.

A `Work` is one task's listener calls. One thread takes its calls one after another; while it is not through, further
threads join, so a listener that answers quickly costs no thread switch per message, and one that waits gets all the
threads there are. In order, no thread joins, and the first failure ends the work.

A call that outlives its timeout is given up: it is reported as failed, and its thread no longer counts. At most as many
threads as there are may be given up so; when all of those are stuck too, nothing more is consumed until one returns
(`stuck` says how many are).

A work whose owner does not ask about it for HANDLER_LEASE_S is taken away, between two calls: its owner is gone, and
somebody else may have its queue. Nothing here survives the process.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from raymq.consumer.push.hook import ConsumeContext, ConsumeHook, call_hooks
from raymq.message import ConsumeStatus
from raymq.protocol.consume_result import TIMEOUT_DELAY_LEVEL, ConsumeLater, ConsumeReport, Failure

JOIN_AFTER_S: Final = 0.02
"""A work that is not through after this long gets further threads, more each time."""
HANDLER_LEASE_S: Final = 5.0
SETTLE_AFTER_S: Final = 0.05
"""A call that took longer may have been given up meanwhile: whether it was is asked under the lock."""

logger = logging.getLogger(__name__)

Handler = Callable[[Any], Any]


class Work:
    """One task's calls: what the listener is called with, a message or a list of them, or (`damaged`: there is one) an
    error in place of a message that cannot be shown to it and fails. Call i is about messages `firsts[i]` and following
    of the task. `key` names the queue for an orderly work, and is None otherwise."""

    def __init__(self, calls: Sequence[Any], firsts: Sequence[int], key: str | None, *, damaged: bool = False) -> None:
        self.calls = calls
        self.firsts = firsts
        self.key = key
        self.damaged = damaged
        self.indices = iter(range(len(calls)))  # shared: each thread's next() takes one call
        self.ended: list[int] = []
        """Calls that ended, well or badly; appended by the threads, without a lock."""
        self.failures: dict[int, Failure] = {}
        """By call. Entered before the call counts as ended."""
        self.consume_s = 0.0
        self.workers = 0
        self.invited = 0
        self.cancelled = False
        self.lease_until_s = float("inf")
        self.done = threading.Event()
        self.follower: Work | None = None
        """The work of the same queue that begins when this one is done."""
        self.follows: Work | None = None
        self._reported = 0
        self._left = set(range(len(calls)))

    def messages_of(self, index: int) -> range:
        """Which messages of the task a call is about."""
        first, call = self.firsts[index], self.calls[index]
        return range(first, first + (len(call) if isinstance(call, list) else 1))

    def failure(self, index: int, error: str, **how: Any) -> Failure:
        """A call's messages were not consumed."""
        messages = self.messages_of(index)
        return Failure(messages.start, len(messages), error, **how)

    def report(self, stuck: int) -> ConsumeReport:
        """What happened since the last report."""
        done = self.done.is_set()
        new = self.ended[self._reported :]
        self._reported += len(new)
        self._left.difference_update(new)
        failures = tuple([self.failures[index] for index in new if index in self.failures]) if self.failures else ()
        unfinished = tuple([i for index in sorted(self._left) for i in self.messages_of(index)])
        return ConsumeReport(unfinished, failures, done, self.consume_s if done else 0.0, stuck)


class _Worker:
    """One thread: which call of which work it is in, and since when (0: in none)."""

    __slots__ = ("given_up", "index", "started_s", "work")

    def __init__(self) -> None:
        self.work: Work | None = None
        self.index = -1
        self.started_s = 0.0
        self.given_up = False


class ConsumePool:
    """`threads` calls of `handler` at a time. `timeout_s` is for works that are not in order."""

    def __init__(
        self, handler: Handler, *, threads: int, timeout_s: float, group: str = "", hooks: Sequence[ConsumeHook] = ()
    ) -> None:
        self._handler = handler
        self._threads = threads
        self._timeout_s = timeout_s
        self._group = group
        self._hooks = tuple(hooks)
        self._lock = threading.Lock()
        self._wanted = threading.Condition(self._lock)
        self._queue: deque[Work] = deque()
        """A work is in it once for each thread that should work on it."""
        self._workers: set[_Worker] = set()
        self._idle = 0
        self._stuck = 0
        self._in_order: dict[str, Work] = {}

    def submit(self, work: Work) -> None:
        """Begin. An orderly work takes an earlier one of its queue away, and waits for the call that this is in."""
        with self._lock:
            if not work.calls:
                work.done.set()
                return
            if work.key is not None:
                before = self._in_order.get(work.key)
                self._in_order[work.key] = work
                if before is not None and self._is_followed(before, work):
                    return
            self._invite(work)

    def _is_followed(self, before: Work, work: Work) -> bool:
        """Take away the works of a queue before this one. Whether it has to wait for a call that one of them is in."""
        self._cancel(before)
        running = before if before.follows is None else before.follows
        self._cancel(running)
        if running.done.is_set():
            return False
        running.follower, work.follows = work, running
        return True

    def cancel(self, work: Work) -> None:
        """Take a work away: no further call of it begins."""
        with self._lock:
            self._cancel(work)

    def wait(self, work: Work, wait_s: float) -> ConsumeReport:
        """Wait until a work is done, at most `wait_s`; how far it is."""
        deadline_s = time.monotonic() + wait_s
        work.lease_until_s = float("inf")
        more = 1
        while not work.done.is_set() and (left_s := deadline_s - time.monotonic()) > 0:
            with self._lock:
                timeout_at_s = self._give_up_late(work)
                may_join = work.key is None and not work.invited and work.workers + len(work.ended) < len(work.calls)
            pause_s = min(left_s, max(timeout_at_s - time.monotonic(), 0.001))
            if work.done.wait(min(pause_s, JOIN_AFTER_S) if may_join and work.workers < self._threads else pause_s):
                break
            if may_join:
                with self._lock:
                    for _ in range(min(more, self._threads - work.workers)):
                        self._invite(work)
                more *= 2
        with self._lock:
            self._give_up_late(work)
            work.lease_until_s = time.monotonic() + HANDLER_LEASE_S
            return work.report(self._stuck)

    def _invite(self, work: Work) -> None:
        """Have one more thread work on it, as soon as one is free."""
        self._queue.append(work)
        work.invited += 1
        if self._idle >= len(self._queue):
            self._wanted.notify()
        else:
            self._start_thread()

    def _start_thread(self) -> None:
        """Unless there are enough: the given up do not count, up to as many as there may be others."""
        if len(self._workers) - min(self._stuck, self._threads) < self._threads:
            worker = _Worker()
            self._workers.add(worker)
            threading.Thread(target=self._serve, args=(worker,), name="listener", daemon=True).start()

    def _serve(self, worker: _Worker) -> None:
        while True:
            with self._lock:
                while not self._queue:
                    self._idle += 1
                    self._wanted.wait()
                    self._idle -= 1
                work = self._queue.popleft()
                work.invited -= 1
                if work.done.is_set():
                    continue
                work.workers += 1
                worker.work = work
            self._run(worker, work)
            with self._lock:
                worker.work = None
                if worker.given_up:
                    self._stuck -= 1
                    self._workers.discard(worker)
                    if self._queue and not self._idle:
                        self._start_thread()
                    return
                work.workers -= 1
                self._end_if_through(work)

    def _run(self, worker: _Worker, work: Work) -> None:
        """Take calls of a work until none is left."""
        calls, ended, handler = work.calls, work.ended, self._handler
        plain = not self._hooks and not work.damaged
        begun_s = now_s = time.monotonic()
        for index in work.indices:
            if work.cancelled or now_s > work.lease_until_s:
                work.cancelled = True
                break
            worker.index, worker.started_s = index, now_s
            failure = None
            if plain:
                try:
                    answer = handler(calls[index])
                except BaseException:  # a user's code; sys.exit would end this thread only, and say nothing
                    failure = _raised(work, index)
                else:
                    if answer is not None:
                        failure = _judged(work, index, answer)
            else:
                failure = self._call(work, index)
            started_s, now_s = now_s, time.monotonic()
            if (worker.given_up or now_s - started_s > SETTLE_AFTER_S) and self._was_given_up(worker):
                return
            worker.started_s = 0.0
            if failure is not None:
                work.failures[index] = failure
                if work.key is not None:
                    work.cancelled = True
            ended.append(index)
        with self._lock:
            work.consume_s += now_s - begun_s

    def _call(self, work: Work, index: int) -> Failure | None:
        """The call if there is more to do than to make it."""
        call = work.calls[index]
        if isinstance(call, Exception):
            return work.failure(index, f"the message cannot be decoded: {call}")
        context = ConsumeContext(self._group, call if isinstance(call, list) else [call])
        call_hooks(self._hooks, "before", context)
        try:
            failure = _judged(work, index, self._handler(call))
        except BaseException:  # as in _run
            failure = _raised(work, index)
        context.success, context.error = failure is None, "" if failure is None else failure.error
        call_hooks(self._hooks, "after", context)
        return failure

    def _was_given_up(self, worker: _Worker) -> bool:
        with self._lock:
            if not worker.given_up:
                worker.started_s = 0.0  # from here on it cannot be
            return worker.given_up

    def _give_up_late(self, work: Work) -> float:
        """Give up the calls of a work that take too long. When the next one will."""
        if work.key is not None:
            return float("inf")
        now_s, earliest_s = time.monotonic(), float("inf")
        for worker in self._workers:
            if worker.work is not work or worker.given_up or not worker.started_s:
                continue
            late_at_s = worker.started_s + self._timeout_s
            if now_s < late_at_s:
                earliest_s = min(earliest_s, late_at_s)
                continue
            worker.given_up = True
            self._stuck += 1
            error = f"the listener has not returned after {self._timeout_s:g} s"
            work.failures[worker.index] = work.failure(
                worker.index, error, delay_level=TIMEOUT_DELAY_LEVEL, timed_out=True
            )
            work.ended.append(worker.index)
            work.workers -= 1
            self._end_if_through(work)
            if self._queue and not self._idle:
                self._start_thread()
        return min(earliest_s, now_s + self._timeout_s)

    def _cancel(self, work: Work) -> None:
        work.cancelled = True
        if work.workers == 0:
            self._finish(work)

    def _end_if_through(self, work: Work) -> None:
        if work.workers == 0 and (work.cancelled or len(work.ended) == len(work.calls)):
            self._finish(work)

    def _finish(self, work: Work) -> None:
        work.done.set()
        follower, work.follower = work.follower, None
        if work.key is not None and self._in_order.get(work.key) is work:
            del self._in_order[work.key]
        if follower is not None and not follower.done.is_set():
            follower.follows = None
            self._invite(follower)


def _raised(work: Work, index: int) -> Failure:
    logger.exception("the listener failed")
    return work.failure(index, traceback.format_exc())


def _judged(work: Work, index: int, answer: Any) -> Failure | None:
    """What a listener's answer means; None is success, and so is everything that does not say otherwise."""
    if answer is ConsumeStatus.RECONSUME_LATER:
        return work.failure(index, "the listener answered RECONSUME_LATER")
    messages = work.messages_of(index)
    if isinstance(answer, ConsumeLater) and answer.first < len(messages):
        return Failure(
            messages.start + answer.first,
            len(messages) - answer.first,
            f"the listener answered {answer}",
            delay_level=answer.delay_level,
            suspend_ms=answer.suspend_ms,
        )
    return None
