"""The calls of a consumer group on messages in memory, with real receipts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from raymq.client.consumer.simple.pop_steps import Place
from raymq.client.consumer.simple.received_message import Receipt, ReceivedMessage, parse_handle, received
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.common.message import MessageExt
from raymq.common.protocol.pop import LeasePart
from tests.support.console.fake_cluster import fake_message

WAIT_S = 60.0
PAUSE_S = 0.005


@dataclass
class _Lease:
    message: MessageExt
    attempts: int = 0
    pop_ms: int = 0
    """The time of the present lease; 0 for a message that is visible."""
    is_settled: bool = False


class FakeGroupCalls:
    """The messages of a group, by broker. `failures`: an error for each broker that does not answer. `silent`: the
    brokers whose calls never end. `receives`: the
    arguments of each receive: broker, wait in seconds, and attempt id. `waiting`: number of receives that wait now.
    `answers`: while it is clear, receives that wait
    get no answer."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.failures: dict[str, RaymqError] = {}
        self.silent: set[str] = set()
        self.receives: list[tuple[str, float, str]] = []
        self.letters: list[tuple[str, int]] = []
        self.returned: list[tuple[int, bool]] = []
        self.extended: list[int] = []
        self.is_closed = False
        self.waiting = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self._changed = asyncio.Event()
        self._leases: dict[tuple[str, int], _Lease] = {}
        self._now_ms = 1_795_400_000_000

    def put(self, broker: str, body: bytes, *, tags: str | None = None, message: MessageExt | None = None) -> None:
        """Add a message that is visible to the group."""
        offset = len(self._leases)
        stored = message or fake_message("orders", body, queue_offset=offset, broker_name=broker, tags=tags)
        self._leases[broker, offset] = _Lease(stored)
        self._notify()

    def _notify(self) -> None:
        """Let the receives that wait look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def receive(
        self,
        broker_name: str,
        subscriptions: Mapping[str, Subscription],
        max_messages: int,
        invisible_ms: int,
        wait_s: float = 0.0,
        *,
        attempt_id: str = "",
    ) -> list[ReceivedMessage]:
        [(topic, subscription)] = subscriptions.items()
        end_s = time.monotonic() + wait_s
        self.receives.append((broker_name, wait_s, attempt_id))
        await self._reach(broker_name)
        if wait_s:
            async with asyncio.timeout(WAIT_S):
                await self.answers.wait()
        while True:
            if broker_name in self.failures:
                raise self.failures[broker_name]
            found = [
                one for (name, _), one in self._leases.items()
                if name == broker_name and not one.pop_ms and not one.is_settled
            ][:max_messages]  # fmt: skip
            left_s = end_s - time.monotonic()
            if found or left_s <= 0:
                break
            self.waiting += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._changed.wait()
            finally:
                self.waiting -= 1
        messages = [self._leased(topic, broker_name, one, invisible_ms) for one in found]
        wanted = [one for one in messages if subscription.matches(one.tags)]
        self._settle([self._lease_of(topic, one.handle) for one in messages if one not in wanted])
        return wanted

    def _leased(self, topic: str, broker: str, lease: _Lease, invisible_ms: int) -> ReceivedMessage:
        self._now_ms += 1
        lease.pop_ms, lease.attempts = self._now_ms, lease.attempts + 1
        offset = lease.message.queue_offset
        receipt = Receipt(topic, broker, 0, offset, self._now_ms, invisible_ms, lease.attempts)
        return received([lease.message], receipt)[0]

    def _lease_of(self, topic: str, handle: str) -> _Lease | None:
        """Return the lease that a handle names; None if it has ended."""
        return self._at(parse_handle(self.group, topic, handle))

    def _at(self, place: Place) -> _Lease | None:
        receipt, offset = place
        lease = self._leases.get((receipt.broker_name, offset))
        return lease if lease is not None and lease.pop_ms == receipt.pop_ms and not lease.is_settled else None

    @staticmethod
    def _settle(leases: Sequence[_Lease | None]) -> int:
        found = [lease for lease in leases if lease is not None]
        for lease in found:
            lease.is_settled = True
        return len(found)

    async def places(self, topic: str, handles: Sequence[str]) -> list[Place]:
        places = [parse_handle(self.group, topic, handle) for handle in handles]
        for receipt, _ in places:
            if not any(name == receipt.broker_name for name, _ in self._leases):
                raise InvalidArgumentError(f"topic {topic!r} is not on broker {receipt.broker_name!r}")
        return places

    async def _reach(self, broker_name: str) -> None:
        """Wait for ever if the broker is silent."""
        if broker_name in self.silent:
            await asyncio.Event().wait()

    async def ack_places(self, places: Sequence[Place]) -> int:
        for receipt, _ in places:
            await self._reach(receipt.broker_name)
            if receipt.broker_name in self.failures:
                raise self.failures[receipt.broker_name]
        return self._settle([self._at(place) for place in places])

    async def change_invisible(
        self, messages: Sequence[ReceivedMessage], invisible_ms: int | None, *, counted: bool = True
    ) -> list[ReceivedMessage]:
        for message in messages:
            self.returned.append((message.queue_offset, counted))
            await self.change_invisible_handles("orders", [message.handle], invisible_ms or 0, counted=counted)
        return list(messages)

    async def change_invisible_handles(
        self, topic: str, handles: Sequence[str], invisible_ms: int, *, counted: bool = True
    ) -> list[str | None]:
        renewed: list[str | None] = []
        for receipt, offset in await self.places(topic, handles):
            await self._reach(receipt.broker_name)
            lease = self._at((receipt, offset))
            if lease is None:
                renewed.append(None)
                continue
            self._now_ms += 1
            lease.pop_ms = self._now_ms if invisible_ms else 0
            lease.attempts -= not counted
            new = Receipt(topic, receipt.broker_name, 0, offset, self._now_ms, invisible_ms)
            renewed.append(new.handle(offset))
        self._notify()
        return renewed

    async def extend_once(
        self, broker_name: str, parts: Sequence[LeasePart], invisible_ms: int, timeout_s: float
    ) -> list[bool]:
        if broker_name in self.failures:
            raise self.failures[broker_name]
        leases = [self._leases[broker_name, part.start] for part in parts]
        self.extended += [part.start for part in parts]
        return [one.pop_ms == part.pop_ms and not one.is_settled for one, part in zip(leases, parts, strict=True)]

    async def return_parts(self, broker_name: str, parts: Sequence[LeasePart], invisible_ms: int) -> None:
        if broker_name in self.failures:
            raise self.failures[broker_name]
        for part in parts:
            lease = self._leases[broker_name, part.start]
            if lease.pop_ms == part.pop_ms and not lease.is_settled:
                lease.pop_ms = 0
                self.returned.append((part.start, True))
        self._notify()

    async def dead_letter(self, topic: str, handle: str, attempts: int = 0, failure: str = "") -> bool:
        [place] = await self.places(topic, [handle])
        await self._reach(place[0].broker_name)
        if not self._settle([self._at(place)]):
            return False
        self.letters.append((handle, attempts))
        return True

    def settled(self) -> int:
        """Return the number of messages that are acknowledged, or dead letters."""
        return sum(lease.is_settled for lease in self._leases.values())

    def leased(self) -> int:
        """Return the number of messages that are leased now."""
        return sum(bool(lease.pop_ms) and not lease.is_settled for lease in self._leases.values())

    async def wait_for_receives(self, count: int) -> None:
        """Wait until `count` receives have begun."""
        await self._until(lambda: len(self.receives) >= count)

    async def wait_until_returned(self, count: int) -> None:
        """Wait until `count` messages were returned."""
        await self._until(lambda: len(self.returned) >= count)

    async def wait_until_nobody_waits(self) -> None:
        """Wait until no receive waits for a message."""
        await self._until(lambda: not self.waiting)

    @staticmethod
    async def _until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(PAUSE_S)

    async def report_reads(self) -> None:
        pass

    async def finish(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True
