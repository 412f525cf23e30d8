"""Tests of acknowledgements that are gathered: one call of a group and broker is under way, and each request gets the
answer of its own messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from raymq.client.consumer.simple.pop_steps import Place
from raymq.client.consumer.simple.received_message import Receipt, parse_handle
from raymq.common.errors import GroupNotExistError, InvalidArgumentError, ServiceNotAvailableError, SystemBusyError
from raymq.gateway.service import gathered_acks
from raymq.gateway.service.gathered_acks import GatheredAcks

TOPIC = "orders"
WRONG = 77
"""The offset of a message whose acknowledgement the broker refuses, with the whole call."""


class SlowCalls:
    """The calls of a group whose broker answers after `answer`. `made`: the brokers and the offsets of each call."""

    def __init__(self, group: str = "billing") -> None:
        self.group = group
        self.made: list[tuple[set[str], list[int]]] = []
        self.fails: Exception | None = None
        self._answers = asyncio.Semaphore(0)

    async def places(self, topic: str, handles: Sequence[str]) -> list[Place]:
        return [parse_handle(self.group, topic, handle) for handle in handles]

    async def ack_places(self, places: Sequence[Place]) -> int:
        offsets = [offset for _, offset in places]
        self.made.append(({receipt.broker_name for receipt, _ in places}, offsets))
        await self._answers.acquire()
        if self.fails is not None:
            raise self.fails
        if WRONG in offsets:
            raise InvalidArgumentError("a part is out of range")
        return len(places)

    def answer(self, calls: int = 1000) -> None:
        for _ in range(calls):
            self._answers.release()


def handle(offset: int, broker: str = "broker-a") -> str:
    return Receipt(TOPIC, broker, 0, offset, 1_700_000_000_000, 60_000).handle(offset)


async def turns() -> None:
    """Let the tasks that are ready run."""
    for _ in range(50):
        await asyncio.sleep(0)


def run(scenario: Callable[[GatheredAcks, SlowCalls], Awaitable[None]]) -> None:
    async def main() -> None:
        acks = GatheredAcks()
        await scenario(acks, SlowCalls())
        await turns()
        assert acks._lines == {}, "nothing is kept of lines without a call"

    asyncio.run(main())


def begin(acks: GatheredAcks, calls: Any, *offsets: int, broker: str = "broker-a") -> asyncio.Future[None]:
    return asyncio.ensure_future(acks.ack(calls, TOPIC, [handle(offset, broker) for offset in offsets]))


def test_requests_that_arrive_during_a_call_go_together_with_the_next_call() -> None:
    async def scenario(acks: GatheredAcks, calls: SlowCalls) -> None:
        first = begin(acks, calls, 0)
        await turns()
        others = [begin(acks, calls, offset, offset + 100) for offset in range(1, 20)]
        await turns()
        assert [offsets for _, offsets in calls.made] == [[0]]
        calls.answer(1)
        await first
        await turns()
        assert [sorted(offsets) for _, offsets in calls.made[1:]] == [[*range(1, 20), *range(101, 120)]]
        assert not any(other.done() for other in others)
        calls.answer(1)
        await asyncio.gather(*others)

    run(scenario)


def test_calls_of_other_brokers_and_groups_do_not_wait() -> None:
    async def scenario(acks: GatheredAcks, calls: SlowCalls) -> None:
        other = SlowCalls("reports")
        waiting = [begin(acks, calls, 0), begin(acks, calls, 1, broker="broker-b"), begin(acks, other, 2)]
        await turns()
        waiting.append(asyncio.ensure_future(acks.ack(calls, TOPIC, [handle(3), handle(4, "broker-b")])))
        await turns()
        assert calls.made == [({"broker-a"}, [0]), ({"broker-b"}, [1])]
        assert other.made == [({"broker-a"}, [2])]
        calls.answer()
        other.answer()
        await asyncio.gather(*waiting)
        assert calls.made[2:] == [({"broker-a"}, [3]), ({"broker-b"}, [4])]

    run(scenario)


def test_a_request_that_the_broker_refuses_fails_alone() -> None:
    async def scenario(acks: GatheredAcks, calls: SlowCalls) -> None:
        calls.answer()
        requests = [begin(acks, calls, 0), *(begin(acks, calls, offset) for offset in (1, WRONG, 2))]
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(one) for one in results] == [type(None), type(None), InvalidArgumentError, type(None)]

    run(scenario)


@pytest.mark.parametrize("error", [ServiceNotAvailableError("away"), GroupNotExistError("billing"), KeyError("a bug")])
def test_an_error_of_a_call_is_the_answer_to_all_of_its_requests(error: Exception) -> None:
    async def scenario(acks: GatheredAcks, calls: SlowCalls) -> None:
        calls.answer()
        calls.fails = error
        requests = [begin(acks, calls, offset) for offset in range(5)]
        errors = await asyncio.gather(*requests, return_exceptions=True)
        assert [(type(one), str(one)) for one in errors] == [(type(error), str(error))] * 5
        assert len(set(map(id, errors))) == 5, "each request has an error object of its own"
        calls.fails = None
        await begin(acks, calls, 9)

    run(scenario)


def test_a_request_whose_client_has_gone_is_acknowledged_and_disturbs_no_other() -> None:
    async def scenario(acks: GatheredAcks, calls: SlowCalls) -> None:
        requests = [begin(acks, calls, offset) for offset in range(3)]
        await turns()
        for gone in requests[:2]:
            gone.cancel()
        await turns()
        calls.answer()
        await requests[2]
        assert [offset for _, offsets in calls.made for offset in offsets] == [0, 1, 2]

    run(scenario)


def test_a_call_and_a_line_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_acks, "ACKS_OF_CALL_MAX", 4)
    monkeypatch.setattr(gathered_acks, "ACKS_WAITING_MAX", 6)

    async def scenario(acks: GatheredAcks, calls: SlowCalls) -> None:
        requests = [begin(acks, calls, 0)]
        await turns()
        requests += [begin(acks, calls, *offsets) for offsets in ((1, 2), (3, 4, 5), (6,))]
        await turns()
        with pytest.raises(SystemBusyError, match="6 acknowledgements of group 'billing' wait"):
            await begin(acks, calls, 7)
        calls.answer()
        await asyncio.gather(*requests)
        assert [offsets for _, offsets in calls.made] == [[0], [1, 2], [3, 4, 5, 6]]

    run(scenario)
