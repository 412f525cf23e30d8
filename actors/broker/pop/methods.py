"""The methods of the Broker actor for simple consumers: they lease messages for a time, and acknowledge them one by
one.

The decisions themselves are in actors.core.pop. RocketMQ stores this state as check points and acknowledgements in its
revive topics, and copies redelivered messages to a retry topic. In raymq this state is part of the broker's state, and
each change is a record in the state log. Redelivered messages are read from their own queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from actors.broker.group_methods import GroupMethods
from actors.broker.master_store import MasterStore
from actors.broker.monitor import BrokerMonitor
from actors.broker.pop.queue_ends import QueueEndsWatch
from actors.broker.pop.receives import LOOK_TIMEOUT_S, Receives
from actors.broker.state_log import StateLog
from actors.broker.stored_state import LEASE_CLOCK
from actors.core.broker.state import BrokerState, Change
from actors.core.broker.stats import GROUP_GET_NUMS
from actors.core.pop.receive import Committed, lease_range
from actors.core.pop.settle import SettleDecision, decide_ack, decide_extend, decide_invisible
from raymq.common.config.cluster import BrokerSettings
from raymq.common.protocol.group import StartOffsetQuery
from raymq.common.protocol.pop import LeasedRange, LeasePart, ReceiveRequest
from raymq.remoting.lane.calls import encode_result
from raymq.remoting.lane.connection import LaneRequest

RECEIVE_GRACE_S: Final = LOOK_TIMEOUT_S + 5.0

Settle = Callable[[BrokerState, Committed], SettleDecision]


class PopMethods(GroupMethods):
    """The Broker's methods for simple consumers; the Broker actor inherits from this class. Thread-safe.

    Methods whose names end in `_soon` serve the broker's lane (direct socket connection): they do not block, and send
    their answer later.
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
        """Map method names of the broker's lane (direct socket connection) to methods that do not block. These methods
        send their answers themselves, later."""
        return {
            "receive_messages": self._receive_soon,
            "ack_messages": self._ack_soon,
            "change_invisible": self._change_invisible_soon,
            "extend_invisible": self._extend_invisible_soon,
        }

    def start_receiving(self, group: str, topics: Sequence[str], query: StartOffsetQuery) -> None:
        """Prepare a group for its first receive. Creates the group if it is new. In each queue in which the group has
        no committed offset, commits the start offset that `query` selects.

        Safe to repeat. Raises the errors of `start_offset`: TopicNotExistError, GroupNotExistError or
        NoPermissionError.
        """
        self.ensure_group(group)
        state = self._log.ready()
        queues = {topic: range(state.check_readable(group, topic).read_queue_nums) for topic in topics}
        first = self._first_offsets(group, queues, query)

        def decide(state: BrokerState) -> list[Change]:
            changes = [state.decide_starts(group, topic, offsets) for topic, offsets in first.items()]
            return [change for change in changes if change is not None]

        self._change(decide)

    def _receive_soon(self, lane: LaneRequest, request: ReceiveRequest) -> None:
        """Lease up to `request.max_messages` messages to a consumer, after waiting up to `request.wait_s` for the first
        message.

        Answers with the messages' offsets after the leases are durable; the consumer reads the messages itself.
        Repeating the call with the same attempt id is safe. If the consumer's connection ends while the receive waits,
        the receive leases nothing.

        The answer can be InvalidArgumentError, GroupNotExistError, TopicNotExistError, NoPermissionError, or
        SystemBusyError if too many receives wait.
        """
        leave = self._receives.submit(
            request, lambda answer: lane.answer(encode_result(answer)), _failing(lane, "a receive")
        )
        lane.when_gone(leave)

    def _ack_soon(self, lane: LaneRequest, group: str, parts: list[LeasePart]) -> None:
        """Acknowledge received messages. Answers with the number of acknowledged messages, after the acknowledgement is
        durable.

        Messages whose lease has ended (because they were acknowledged or leased again) are not counted. Repeating the
        call is safe. An error is also sent as the answer: GroupNotExistError or InvalidArgumentError.
        """
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

    def _change_invisible_soon(
        self, lane: LaneRequest, group: str, parts: list[LeasePart], invisible_ms: int, counted: bool = True
    ) -> None:
        """Make received messages visible again `invisible_ms` from now. Answers after the change is durable.

        The answer has the new lease of each element of `parts`, or None for an element whose old lease has ended. With
        `counted` False the delivery attempt is not counted, because no consumer has processed the messages.

        The answer can be GroupNotExistError, InvalidArgumentError or SystemBusyError.
        """
        self._settle_soon(
            group,
            _invisible(group, parts, invisible_ms, counted),
            lambda settled: lane.answer(encode_result(_new_ranges(parts, settled))),
            _failing(lane, "a change of the invisible time"),
        )

    def _extend_invisible_soon(self, lane: LaneRequest, group: str, parts: list[LeasePart], invisible_ms: int) -> None:
        """Extend leases in place, to `invisible_ms` from now: the receipts of their messages stay valid. Answers after
        the change is durable.

        The answer has True for each element of `parts` that names an unacknowledged message of a lease; the whole lease
        is then extended. It has False for an element whose lease has ended. No lease becomes shorter. Repeating the
        call is safe. The answer can be GroupNotExistError or InvalidArgumentError.
        """
        self._settle_soon(
            group,
            lambda state, committed: decide_extend(
                state.pop, committed, group, parts, invisible_ms, LEASE_CLOCK.now_ms()
            ),
            lambda settled: lane.answer(encode_result([lease is not None for lease in settled.leases])),
            _failing(lane, "an extension of leases"),
        )

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
