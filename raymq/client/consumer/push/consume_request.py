"""ConsumeRequest is one task's listener calls: the calls that ended, their failures, and the reports about them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from raymq.common.protocol.consume_result import ConsumeReport, Failure
from raymq.telemetry.trace.contexts import TracedCalls


class ConsumeRequest:
    """The listener calls of one task.

    `calls` are the arguments of the calls: a message or a list of messages each, or an error. An error stands for a
    message that cannot be decoded; it fails without a call, and `damaged` is true then. Call i is about the messages
    from number `firsts[i]` of the task on. `key` names the queue of an orderly request; None for another request.
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
        """`of_lists`: a call may have several messages."""
        self.calls = calls
        self.of_lists = of_lists
        self.firsts = firsts
        self.key = key
        self.damaged = damaged
        self.topic = topic
        self.indices = iter(range(len(calls)))  # shared: each thread's next() takes one call
        self.ended: list[int] = []
        """The calls that ended, with or without success. Threads append to it without a lock."""
        self.failures: dict[int, Failure] = {}
        """The failures by call, entered before the call counts as ended."""
        self.consume_s = 0.0
        """Seconds that all threads have spent in calls."""
        self.counted = 0
        """Slow and failed calls, which the metrics count one by one. All other calls are in the first bucket; they are
        counted together when the request is done."""
        self.counted_s = 0.0
        """The seconds that the calls in `counted` took."""
        self.workers = 0
        """The threads that make calls of this request now."""
        self.invited = 0
        """The threads that join this request as soon as they are free."""
        self.cancelled = False
        """True if no further call may begin."""
        self.lease_until_s = float("inf")
        """The request is cancelled after this time."""
        self.join_at_s = 0.0
        """The time at which `joining` further threads join, unless all calls have ended."""
        self.joining = 1
        self.done = threading.Event()
        """Set when no thread makes calls of this request, and none will."""
        self.follower: ConsumeRequest | None = None
        """The request of the same queue that begins after this request."""
        self.follows: ConsumeRequest | None = None
        """The request that must end before this request begins."""
        self.traced: TracedCalls | None = None
        """These calls in the message trace; None without a trace."""
        self._reported = 0
        """The number of entries of `ended` that reports have named."""
        self._left: set[int] | None = None
        """The calls that no report has named as ended; None until a report leaves some out."""

    @property
    def message_count(self) -> int:
        """The number of messages of all calls."""
        if self.of_lists:
            return sum(len(call) if isinstance(call, list) else 1 for call in self.calls)
        return len(self.calls)

    def messages_of(self, index: int) -> range:
        """The indices in the task of the messages a call is about."""
        first, call = self.firsts[index], self.calls[index]
        return range(first, first + (len(call) if isinstance(call, list) else 1))

    def failure(self, index: int, error: str, **how: Any) -> Failure:
        """Make the failure of a call, whose messages were not consumed."""
        messages = self.messages_of(index)
        return Failure(messages.start, len(messages), error, **how)

    def report(self, stuck: int) -> ConsumeReport:
        """Report the calls that ended since the last report. `stuck`: the number of threads in calls given up."""
        done = self.done.is_set()
        new = self.ended[self._reported :]
        self._reported += len(new)
        failures = tuple([self.failures[index] for index in new if index in self.failures]) if self.failures else ()
        return ConsumeReport(self._unfinished(new), failures, done, self.consume_s if done else 0.0, stuck)

    def _unfinished(self, new: Sequence[int]) -> tuple[int, ...]:
        """Note that the calls `new` have ended, and return the messages of all calls that have not."""
        if self._left is None:
            if len(new) == len(self.calls):
                return ()
            self._left = set(range(len(self.calls)))
        self._left.difference_update(new)
        return tuple([i for index in sorted(self._left) for i in self.messages_of(index)])
