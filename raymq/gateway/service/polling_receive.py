"""PollingReceive receives messages of one topic from all of its broker groups, in a thread, until its client leaves.

RocketMQ's clients name one broker group. The name is only where this receive looks first: a message at another group is
received at once, too, because the receipt names the broker group that settles it. The broker decides by the group's
settings whether the messages come in order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from raymq.client.consumer.simple.engine import WAIT_OF_ONE_S, WAIT_OF_SEVERAL_S
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import RaymqError
from raymq.common.protocol.pop import LeasePart
from raymq.common.retry import Backoff
from raymq.gateway.convert.leases import LeaseTerms

logger = logging.getLogger(__name__)


class GroupCalls(Protocol):
    """The calls of one consumer group (`raymq.client.consumer.simple.pop_calls.PopCalls`). All of them block.
    `group`: the group's stored name."""

    group: str

    def receive(
        self,
        broker_name: str,
        subscriptions: dict[str, Subscription],
        max_messages: int,
        invisible_ms: int,
        wait_s: float = 0.0,
        *,
        attempt_id: str = "",
    ) -> list[ReceivedMessage]: ...

    def ack_handles(self, topic: str, handles: Sequence[str]) -> int: ...

    def change_invisible(
        self, messages: Sequence[ReceivedMessage], invisible_ms: int, *, counted: bool = True
    ) -> list[ReceivedMessage]: ...

    def change_invisible_handles(
        self, topic: str, handles: Sequence[str], invisible_ms: int, *, counted: bool = True
    ) -> list[str | None]: ...

    def extend_once(
        self, broker_name: str, parts: Sequence[LeasePart], invisible_ms: int, timeout_s: float
    ) -> list[bool]: ...

    def return_parts(self, broker_name: str, parts: Sequence[LeasePart], invisible_ms: int) -> None: ...

    def dead_letter(self, topic: str, handle: str, attempts: int = 0, failure: str = "") -> bool: ...

    def report_reads(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PollingReceive:
    """One receive. `brokers`: the broker groups in the order of the first look. `attempt_id`: the client's id of this
    attempt, empty for none. `gone`: set when the client has left."""

    calls: GroupCalls
    subscription: Subscription
    brokers: Sequence[str]
    terms: LeaseTerms
    attempt_id: str = ""
    gone: threading.Event = field(default_factory=threading.Event)

    def run(self) -> list[ReceivedMessage]:
        """Receive messages. Returns an empty list if none arrived in time, or if the client left. Messages that the
        subscription excludes do not end the wait.

        Raises the last error of a broker group if no group had a message.
        """
        deadline_s = time.monotonic() + self.terms.wait_s
        most_s = WAIT_OF_ONE_S if len(self.brokers) == 1 else WAIT_OF_SEVERAL_S
        backoff, first = Backoff(), True
        while True:
            failure: RaymqError | None = None
            for broker in self.brokers:
                left_s = max(0.0, deadline_s - time.monotonic())
                try:
                    messages = self._receive(broker, 0.0 if first else min(left_s, most_s), is_first=first)
                except RaymqError as error:
                    failure = error
                    continue
                if messages or self.gone.is_set():
                    return messages
            self.calls.report_reads()
            if time.monotonic() >= deadline_s:
                if failure is not None:
                    raise failure
                return []
            if failure is not None and self.gone.wait(min(backoff.next(), max(0.0, deadline_s - time.monotonic()))):
                return []
            first = False

    def _receive(self, broker: str, wait_s: float, *, is_first: bool) -> list[ReceivedMessage]:
        # Only the first look has the client's id. With the id, a later look would get the leases that an earlier look
        # has already read.
        return self.calls.receive(
            broker,
            {self.subscription.topic: self.subscription},
            self.terms.max_messages,
            self.terms.invisible_ms,
            wait_s,
            attempt_id=self.attempt_id if is_first else "",
        )

    def give_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Make messages visible at once that no client has got. The delivery does not count as an attempt. If the
        broker does not answer, the messages are visible after their invisible time."""
        try:
            self.calls.change_invisible(messages, 0, counted=False)
        except RaymqError as error:
            logger.info("%d messages are delivered again after their lease: %s", len(messages), error)
