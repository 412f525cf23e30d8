"""PollingReceive receives messages of one topic from all of its broker groups, until its client leaves.

RocketMQ's clients name one broker group. The name is only where this receive looks first: a message at another group is
received at once, too, because the receipt names the broker group that settles it. The broker decides by the group's
settings whether the messages come in order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from raymq.client.consumer.simple.engine import WAIT_OF_ONE_S, WAIT_OF_SEVERAL_S
from raymq.client.consumer.simple.pop_steps import Place
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import RaymqError
from raymq.common.protocol.pop import LeasePart
from raymq.common.retry import Backoff
from raymq.gateway.convert.leases import LeaseTerms

logger = logging.getLogger(__name__)


class GroupCalls(Protocol):
    """The calls of one consumer group (`raymq.client.consumer.simple.async_pop_calls.AsyncPopCalls`). `close` blocks.
    `group`: the group's stored name."""

    group: str

    async def receive(
        self,
        broker_name: str,
        subscriptions: dict[str, Subscription],
        max_messages: int,
        invisible_ms: int,
        wait_s: float = 0.0,
        *,
        attempt_id: str = "",
    ) -> list[ReceivedMessage]: ...

    async def places(self, topic: str, handles: Sequence[str]) -> list[Place]: ...

    async def ack_places(self, places: Sequence[Place]) -> int: ...

    async def change_invisible(
        self, messages: Sequence[ReceivedMessage], invisible_ms: int, *, counted: bool = True
    ) -> list[ReceivedMessage]: ...

    async def change_invisible_handles(
        self, topic: str, handles: Sequence[str], invisible_ms: int, *, counted: bool = True
    ) -> list[str | None]: ...

    async def extend_once(
        self, broker_name: str, parts: Sequence[LeasePart], invisible_ms: int, timeout_s: float
    ) -> list[bool]: ...

    async def return_parts(self, broker_name: str, parts: Sequence[LeasePart], invisible_ms: int) -> None: ...

    async def dead_letter(self, topic: str, handle: str, attempts: int = 0, failure: str = "") -> bool: ...

    async def report_reads(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PollingReceive:
    """One receive. `brokers`: the broker groups in the order of the first look. `attempt_id`: the client's id of this
    attempt, empty for none."""

    calls: GroupCalls
    subscription: Subscription
    brokers: Sequence[str]
    terms: LeaseTerms
    attempt_id: str = ""

    async def run(self) -> list[ReceivedMessage]:
        """Receive messages. Returns an empty list if none arrived in time. Messages that the subscription excludes do
        not end the wait. If the caller is cancelled, a message that still arrives is visible to other clients at once.

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
                    messages = await self._receive(broker, 0.0 if first else min(left_s, most_s), is_first=first)
                except RaymqError as error:
                    failure = error
                    continue
                if messages:
                    return messages
            await self.calls.report_reads()
            if time.monotonic() >= deadline_s:
                if failure is not None:
                    raise failure
                return []
            if failure is not None:
                await asyncio.sleep(min(backoff.next(), max(0.0, deadline_s - time.monotonic())))
            first = False

    async def _receive(self, broker: str, wait_s: float, *, is_first: bool) -> list[ReceivedMessage]:
        # Only the first look has the client's id. With the id, a later look would get the leases that an earlier look
        # has already read.
        return await self.calls.receive(
            broker,
            {self.subscription.topic: self.subscription},
            self.terms.max_messages,
            self.terms.invisible_ms,
            wait_s,
            attempt_id=self.attempt_id if is_first else "",
        )

    async def give_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Make messages visible at once that no client has got. The delivery does not count as an attempt. If the
        broker does not answer, the messages are visible after their invisible time."""
        try:
            await self.calls.change_invisible(messages, 0, counted=False)
        except RaymqError as error:
            logger.info("%d messages are delivered again after their lease: %s", len(messages), error)
