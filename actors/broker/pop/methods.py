"""The methods of the Broker actor for simple consumers: messages are leased for a time, and settled one by one.

Remote methods about simple consumers belong here; the decisions themselves are in actors.core.pop. RocketMQ keeps this
state in check points and acknowledgements of its revive topics, and copies redelivered messages to a retry topic. Here
it is a part of the broker's state, each change a record in the state log; redelivered messages are read in their own
queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from functools import partial
from typing import Final

from actors.broker.group_methods import GroupMethods
from actors.broker.master_store import MasterStore
from actors.broker.monitor import BrokerMonitor
from actors.broker.pop.queue_ends import QueueEndsWatch
from actors.broker.pop.receives import LOOK_TIMEOUT_S, Receives
from actors.broker.state_log import CHANGE_TIMEOUT_S, LEASE_CLOCK, StateLog
from actors.core.broker.state import BrokerState, Change
from actors.core.broker.stats import GROUP_GET_NUMS
from actors.core.pop.receive import Committed, lease_range
from actors.core.pop.settle import SettleDecision, decide_ack, decide_invisible
from raymq.common.config.cluster import BrokerSettings
from raymq.common.errors import RequestTimeoutError
from raymq.common.protocol.group import StartOffsetQuery
from raymq.common.protocol.pop import LeasedRange, LeasePart, ReceiveAnswer, ReceiveRequest
from raymq.remoting.lane.calls import encode_result
from raymq.remoting.lane.connection import LaneRequest

RECEIVE_GRACE_S: Final = LOOK_TIMEOUT_S + 5.0

Settle = Callable[[BrokerState, Committed], SettleDecision]


class PopMethods(GroupMethods):
    """The part of the Broker for simple consumers; the actor inherits its methods. Thread-safe.

    The methods whose names end in `_soon` are for the broker's lane: they do not block, and answer later.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        log: StateLog,
        store: MasterStore,
        monitor: BrokerMonitor,
        ends: QueueEndsWatch,
    ) -> None:
        super().__init__(settings, log, store, monitor)
        self._receives = Receives(log, ends)

    @property
    def _answered_later(self) -> dict[str, Callable[..., None]]:
        """Return the methods for the broker's lane that do not block and answer by themselves, by their lane names."""
        return {
            "receive_messages": self._receive_soon,
            "ack_messages": self._ack_soon,
            "change_invisible": self._change_invisible_soon,
        }

    def start_receiving(self, group: str, topics: Sequence[str], query: StartOffsetQuery) -> None:
        """Create the group if it is new, and commit its start in queues in which it has committed nothing.

        Safe to repeat. TopicNotExistError, GroupNotExistError, NoPermissionError.
        """
        self.ensure_group(group)
        state = self._log.ready()
        queues = {topic: range(state.check_readable(group, topic).read_queue_nums) for topic in topics}
        first = self._first_offsets(group, queues, query)

        def decide(state: BrokerState) -> list[Change]:
            changes = [state.decide_starts(group, topic, offsets) for topic, offsets in first.items()]
            return [change for change in changes if change is not None]

        self._change(decide)

    def receive_messages(self, request: ReceiveRequest) -> ReceiveAnswer:
        """Lease up to `request.max_messages` messages, after waiting up to `request.wait_s` for the first.

        Returns their offsets; the consumer reads the messages itself. Durable on return, and safe to repeat under the
        same attempt id.

        InvalidArgumentError, GroupNotExistError, TopicNotExistError, NoPermissionError. SystemBusyError: too many
        receives wait.
        """
        future: Future[ReceiveAnswer] = Future()
        self._receives.submit(request, future.set_result, future.set_exception)
        try:
            return future.result(request.wait_s + RECEIVE_GRACE_S)
        except FutureTimeoutError as error:
            if isinstance(error, RequestTimeoutError):
                raise
            raise RequestTimeoutError("the broker, to hand out messages,", request.wait_s + RECEIVE_GRACE_S) from None

    def _receive_soon(self, lane: LaneRequest, request: ReceiveRequest) -> None:
        """Receive messages for the lane, as `receive_messages`."""
        self._receives.submit(request, lambda answer: lane.answer(encode_result(answer)), _failing(lane, "a receive"))

    def ack_messages(self, group: str, parts: Sequence[LeasePart]) -> int:
        """Acknowledge received messages. Returns how many were acknowledged. Durable on return, and safe to repeat.

        Messages whose lease has ended, because they were settled or leased again, do not count. GroupNotExistError,
        InvalidArgumentError.
        """
        settled = self._settle(group, lambda state, committed: decide_ack(state.pop, committed, group, parts))
        return self._acked(group, parts, settled)

    def _ack_soon(self, lane: LaneRequest, group: str, parts: list[LeasePart]) -> None:
        """Acknowledge messages for the lane, as `ack_messages`."""
        self._settle_soon(
            group,
            lambda state, committed: decide_ack(state.pop, committed, group, parts),
            lambda settled: lane.answer(encode_result(self._acked(group, parts, settled))),
            _failing(lane, "an acknowledgement"),
        )

    def _acked(self, group: str, parts: Sequence[LeasePart], settled: SettleDecision) -> int:
        for topic in {part.topic for part in parts}:
            self._monitor.count(GROUP_GET_NUMS, f"{topic}@{group}", settled.counts.get(topic, 0))
        return settled.count

    def change_invisible(
        self, group: str, parts: Sequence[LeasePart], invisible_ms: int, counted: bool = True
    ) -> list[LeasedRange | None]:
        """Make received messages visible again `invisible_ms` from now. Durable on return.

        Returns the new lease of each part; None if the old lease has ended. Without `counted` the attempt is not
        counted, because nobody has seen the messages.

        GroupNotExistError, InvalidArgumentError, SystemBusyError.
        """
        settled = self._settle(group, _invisible(group, parts, invisible_ms, counted))
        return _new_ranges(parts, settled)

    def _change_invisible_soon(
        self, lane: LaneRequest, group: str, parts: list[LeasePart], invisible_ms: int, counted: bool = True
    ) -> None:
        """Change the leases for the lane, as `change_invisible`."""
        self._settle_soon(
            group,
            _invisible(group, parts, invisible_ms, counted),
            lambda settled: lane.answer(encode_result(_new_ranges(parts, settled))),
            _failing(lane, "a change of the invisible time"),
        )

    def _settle(self, group: str, settle: Settle) -> SettleDecision:
        done: Future[SettleDecision] = Future()
        self._settle_soon(group, settle, done.set_result, done.set_exception)
        try:
            return done.result(CHANGE_TIMEOUT_S)
        except FutureTimeoutError as error:
            if isinstance(error, RequestTimeoutError):
                raise
            raise RequestTimeoutError("the broker, to settle messages,", CHANGE_TIMEOUT_S) from None

    def _settle_soon(
        self,
        group: str,
        settle: Settle,
        answer: Callable[[SettleDecision], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        settled = SettleDecision()

        def decide(state: BrokerState) -> list[Change]:
            nonlocal settled
            state.require_group(group)
            settled = settle(state, partial(state.committed, group))
            return [] if settled.change is None else [settled.change]

        def done(_: bool, error: Exception | None) -> None:
            if error is not None:
                fail(error)
                return
            self._receives.look_again()
            answer(settled)

        self._log.submit_with(decide, done)


def _failing(lane: LaneRequest, what: str) -> Callable[[BaseException], None]:
    return lambda error: lane.fail(lane.told(error, what) if isinstance(error, Exception) else error)


def _invisible(group: str, parts: Sequence[LeasePart], invisible_ms: int, counted: bool) -> Settle:
    return lambda state, committed: decide_invisible(
        state.pop, committed, group, parts, invisible_ms, LEASE_CLOCK.now_ms(), counted=counted
    )


def _new_ranges(parts: Sequence[LeasePart], settled: SettleDecision) -> list[LeasedRange | None]:
    return [
        None if lease is None else lease_range(part.topic, part.queue_id, lease)
        for part, lease in zip(parts, settled.leases, strict=True)
    ]
