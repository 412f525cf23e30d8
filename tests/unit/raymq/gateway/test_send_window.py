"""Tests of the window in which a repeated send gets the answer of the first one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from raymq.common.errors import RequestTimeoutError, SendUnknownError, SystemBusyError
from raymq.gateway.clients import send_window
from raymq.gateway.clients.send_window import SEND_WINDOW_S, SendWindow


class Sends:
    """Sends that a test ends. `begun`: the number of sends. `now_s`: the window's time."""

    def __init__(self) -> None:
        self.begun, self.now_s = 0, 0.0
        self.ends: list[asyncio.Future[str]] = []
        self.window: SendWindow[str] = SendWindow(lambda: self.now_s)

    def begin(self) -> Awaitable[str]:
        self.begun += 1
        self.ends.append(asyncio.get_running_loop().create_future())
        return self.ends[-1]

    def send(self, key: object = "k", timeout_s: float = 60.0) -> asyncio.Task[str]:
        return asyncio.create_task(self.window.send(key, self.begin, timeout_s))


def run(scenario: Callable[[Sends], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Sends())

    asyncio.run(main())


async def begun(sends: Sends, count: int) -> None:
    while sends.begun < count:
        await asyncio.sleep(0)


def test_a_repeated_send_waits_for_the_first_one() -> None:
    async def scenario(sends: Sends) -> None:
        first, second, other = sends.send(), sends.send(), sends.send("other")
        await begun(sends, 2)
        with pytest.raises(RequestTimeoutError):
            await sends.send(timeout_s=0.0)
        first.cancel()
        sends.ends[0].set_result("stored")
        sends.ends[1].set_result("other")
        assert (await second, await other, await sends.send()) == ("stored", "other", "stored")
        assert sends.begun == 2

    run(scenario)


def test_a_send_leaves_the_window_some_time_after_its_end() -> None:
    async def scenario(sends: Sends) -> None:
        first = sends.send()
        await begun(sends, 1)
        sends.now_s += 2 * SEND_WINDOW_S  # a send that is under way stays
        second = sends.send()
        sends.ends[0].set_result("stored")
        assert await first == await second == "stored"
        sends.now_s += SEND_WINDOW_S - 1
        assert await sends.send() == "stored"
        sends.now_s += 1
        sends.window.expire()
        assert len(sends.window) == 0
        again = sends.send()
        await begun(sends, 2)
        sends.ends[1].set_result("again")
        assert await again == "again"

    run(scenario)


def test_only_a_send_that_may_be_stored_is_remembered_after_an_error() -> None:
    async def scenario(sends: Sends) -> None:
        for number, (error, stays) in enumerate(
            [(SystemBusyError("full"), 0), (ValueError("a bug"), 0), (SendUnknownError("orders", 1, 1.0, ""), 1)], 1
        ):
            first = sends.send()
            await begun(sends, number)
            sends.ends[-1].set_exception(error)
            with pytest.raises(type(error)):
                await first
            assert len(sends.window) == stays
            assert sends.window.has_failed("k")
        with pytest.raises(SendUnknownError):
            await sends.send()
        assert sends.begun == 3
        # a send of unknown outcome counts as failed once it has left the window
        sends.now_s += SEND_WINDOW_S
        assert sends.window.has_failed("k")
        sends.now_s += SEND_WINDOW_S
        assert not sends.window.has_failed("k")
        assert not sends.window.has_failed("other")

    run(scenario)


def test_a_result_that_is_not_final_is_not_kept() -> None:
    async def scenario(sends: Sends) -> None:
        sends.window = SendWindow(lambda: sends.now_s, lambda result: result == "stored")
        first = sends.send()
        await begun(sends, 1)
        sends.ends[0].set_result("not safe")
        assert await first == "not safe"
        assert (len(sends.window), sends.window.has_failed("k")) == (0, True)

    run(scenario)


def test_the_window_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_window, "SENDS_MAX", 2)

    async def scenario(sends: Sends) -> None:
        tasks = [sends.send(number) for number in range(4)]
        await begun(sends, 4)
        assert len(sends.window) == 2
        for end in sends.ends:
            end.set_result("stored")
        assert await asyncio.gather(*tasks) == ["stored"] * 4
        assert len(sends.window) == 2
        sends.now_s += SEND_WINDOW_S
        sends.window.expire()
        assert len(sends.window) == 0

    run(scenario)
