"""PollingReceive receives messages of one topic from all of its broker groups, until its client leaves.

RocketMQ's clients name one broker group. The name is only where this receive looks first. Then it waits at all broker
groups at the same time, so a message at another group is received at once, too: the receipt names the broker group that
settles the message. The broker decides by the group's settings whether the messages come in order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from raymq.client.consumer.simple.pop_steps import Place
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import RaymqError
from raymq.common.protocol.pop import LeasePart
from raymq.common.retry import Backoff
from raymq.gateway.convert.leases import LeaseTerms
from raymq.gateway.service.answers import within

logger = logging.getLogger(__name__)

LOOK_S: Final = 2.0
"""Longest time in seconds of the first look at one of several broker groups. A broker that does not answer, because its
node is cut off, must not hide the messages of the other groups."""

Later = Callable[[Coroutine[Any, Any, object]], None]
"""Type of a function that runs a coroutine in a task of its own, without a result."""


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
        self, messages: Sequence[ReceivedMessage], invisible_ms: int | None, *, counted: bool = True
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

    async def finish(self) -> None: ...

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

    async def run(self, later: Later) -> list[ReceivedMessage]:
        """Receive messages of one broker group. Returns an empty list if none arrived in time. Messages that the
        subscription excludes do not end the wait.

        `later`: runs a coroutine that outlives this call. If the caller is cancelled, or if two broker groups have
        messages at the same time, the messages that the caller does not get are visible to other clients at once.
        Raises the last error of a broker group if no group had a message.
        """
        deadline_s = time.monotonic() + self.terms.wait_s
        if len(self.brokers) == 1:
            return await self._receive_from(self.brokers[0], deadline_s, self.attempt_id)
        failure: RaymqError | None = None
        for broker in self.brokers:
            try:
                is_last_chance = broker == self.brokers[-1] and not self.terms.wait_s
                messages = await self._look(broker, None if is_last_chance else LOOK_S)
            except RaymqError as error:
                failure = error
                continue
            if messages:
                return messages
        if time.monotonic() < deadline_s:
            return await self._wait_at_all(deadline_s, later)
        await self.calls.report_reads()
        if failure is not None:
            raise failure
        return []

    async def _look(self, broker: str, timeout_s: float | None) -> list[ReceivedMessage]:
        """Receive messages that a broker group has now. Raises RequestTimeoutError after `timeout_s`; the
        messages of a later answer are given back."""
        look = self._receive(broker, 0.0, self.attempt_id)
        return await within(timeout_s, f"a receive at broker group {broker!r}", look)

    async def _wait_at_all(self, deadline_s: float, later: Later) -> list[ReceivedMessage]:
        """Wait at all broker groups at the same time, for the first that has messages."""
        waits = [asyncio.ensure_future(self._receive_from(broker, deadline_s)) for broker in self.brokers]
        chosen: asyncio.Future[list[ReceivedMessage]] | None = None
        try:
            running = set(waits)
            while running and chosen is None:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                chosen = next((wait for wait in waits if wait in done and _messages_of(wait)), None)
        finally:
            for wait in waits:
                if not wait.done():
                    wait.cancel()
                elif wait is not chosen and (surplus := _messages_of(wait)):
                    later(self.give_back(surplus))
        if chosen is not None:
            return chosen.result()
        failures = [error for wait in waits if (error := wait.exception()) is not None]
        if failures:
            raise failures[-1]
        return []

    async def _receive_from(self, broker: str, deadline_s: float, attempt_id: str = "") -> list[ReceivedMessage]:
        """Receive messages of one broker group, with retries until the deadline."""
        backoff = Backoff()
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                messages = await self._receive(broker, left_s, attempt_id)
            except RaymqError as error:
                if not error.retryable or not left_s:
                    raise
                pause_s = max(backoff.next(), error.retry_after_s or 0.0)
                await asyncio.sleep(min(pause_s, max(0.0, deadline_s - time.monotonic())))
                continue
            if messages:
                return messages
            await self.calls.report_reads()
            if time.monotonic() >= deadline_s:
                return []
            # With the id, the next call would get the leases whose messages this call has already read.
            attempt_id = ""
            backoff.reset()

    async def _receive(self, broker: str, wait_s: float, attempt_id: str) -> list[ReceivedMessage]:
        return await self.calls.receive(
            broker,
            {self.subscription.topic: self.subscription},
            self.terms.max_messages,
            self.terms.invisible_ms,
            wait_s,
            attempt_id=attempt_id,
        )

    async def give_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Make messages visible at once that no client has got. The delivery does not count as an attempt. If the
        broker does not answer, the messages are visible after their invisible time."""
        try:
            await self.calls.change_invisible(messages, 0, counted=False)
        except RaymqError as error:
            logger.info("%d messages are delivered again after their lease: %s", len(messages), error)


def _messages_of(wait: asyncio.Future[list[ReceivedMessage]]) -> list[ReceivedMessage]:
    """Return the messages of a wait that is done; an empty list if the wait failed."""
    return [] if wait.cancelled() or wait.exception() is not None else wait.result()
