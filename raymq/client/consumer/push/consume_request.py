"""ConsumeRequest holds the listener calls of one task, their failures, and the reports about ended calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from raymq.common.protocol.consume_result import ConsumeReport, Failure
from raymq.telemetry.trace.contexts import TracedCalls


class ConsumeRequest:
    """The listener calls of one task.

    `calls` are the arguments of the calls: each is a message, a list of messages, or an error. An error stands for a
    message that cannot be decoded. Its call fails without calling the listener, and `damaged` is True. The messages of
    call i begin at index `firsts[i]` of the task. `key` names the queue of an orderly request; None for other requests.
    """

    def __init__(
        self,
        calls: Sequence[Any],
        firsts: Sequence[int],
        key: str | None,
        *,
        damaged: bool = False,
        topic: str = "",
        of_lists: bool = False,
    ) -> None:
        """Create the request for the listener calls in `calls`. `of_lists`: True if the listener takes a list of
        messages, not a single message."""
        self.calls = calls
        self.of_lists = of_lists
        self.firsts = firsts
        self.key = key
        self.damaged = damaged
        self.topic = topic
        # Iterator over the indices of the listener calls. Each thread takes the index of its next call from it, so no
        # call is made twice.
        self.indices = iter(range(len(calls)))
        self.ended: list[int] = []
        """Indices of the listener calls that have ended, with or without success. Threads append to the list without a
        lock."""
        self.failures: dict[int, Failure] = {}
        """Failure of each failed call, by the call's index. It is stored before the call is added to `ended`."""
        self.consume_s = 0.0
        """Total time in s that all threads have spent in listener calls for this request."""
        self.counted = 0
        """Number of slow and failed calls, which the metrics count one by one. All other calls belong to the metric's
        first bucket, and are counted together when the request is done."""
        self.counted_s = 0.0
        """Total time in s of the listener calls that `counted` counts: the slow and failed calls of this
        request."""
        self.workers = 0
        """Number of threads that are calling the listener for this request now."""
        self.invited = 0
        """Number of pool threads that will work on this request as soon as they are free."""
        self.cancelled = False
        """True if no further listener call of this request may begin."""
        self.lease_until_s = float("inf")
        """Time after which the request is cancelled. Each answer of the request's owner (the Pull actor) extends the
        time (`ConsumePool.renew_leases`)."""
        self.join_at_s = 0.0
        """Time at which `joining` more threads begin to help with this request, unless all its listener calls have
        ended."""
        self.joining = 1
        self.done = threading.Event()
        """Event that is set when no thread makes calls of this request, and no further call will begin."""
        self.follower: ConsumeRequest | None = None
        """The next request for the same queue, which begins when this request has ended; None if no such
        request waits."""
        self.follows: ConsumeRequest | None = None
        """The earlier request of the same queue. This request begins only after the earlier request has ended. None if
        no earlier request exists."""
        self.traced: TracedCalls | None = None
        """The record of this request's listener calls in the message trace; None without a trace."""
        self._reported = 0
        """Number of this request's listener calls that have ended and were already reported to the Pull actor."""
        self._left: set[int] | None = None
        """Indices of the calls that were not yet reported as ended. Set by the first report that is made while some
        calls are still running; None before this report."""

    @property
    def message_count(self) -> int:
        """Total number of messages in all listener calls of this request."""
        if self.of_lists:
            return sum(len(call) if isinstance(call, list) else 1 for call in self.calls)
        return len(self.calls)

    def messages_of(self, index: int) -> range:
        """Return the indices, in the task, of the messages that a call covers."""
        first, call = self.firsts[index], self.calls[index]
        return range(first, first + (len(call) if isinstance(call, list) else 1))

    def failure(self, index: int, error: str, **how: Any) -> Failure:
        """Create the Failure of a listener call whose messages were not consumed."""
        messages = self.messages_of(index)
        return Failure(messages.start, len(messages), error, **how)

    def report(self, stuck: int) -> ConsumeReport:
        """Report the listener calls of this request that have ended since the last report. `stuck`: the number of
        threads in listener calls that exceeded their timeout and were given up.

        A failed call of an orderly request is reported together with the request's end, which follows at once. So the
        owner can return the messages behind the failed one first.
        """
        done = self.done.is_set()
        new = self.ended[self._reported :]
        if self.key is not None and self.failures and not done:
            new = [index for index in new if index not in self.failures]
        self._reported += len(new)
        failures = tuple([self.failures[index] for index in new if index in self.failures]) if self.failures else ()
        return ConsumeReport(self._unfinished(new), failures, done, self.consume_s if done else 0.0, stuck)

    def _unfinished(self, new: Sequence[int]) -> tuple[int, ...]:
        """Record that the listener calls with the indices `new` have ended. Returns the message indices of the calls
        that have not ended."""
        if self._left is None:
            if len(new) == len(self.calls):
                return ()
            self._left = set(range(len(self.calls)))
        self._left.difference_update(new)
        return tuple([i for index in sorted(self._left) for i in self.messages_of(index)])
