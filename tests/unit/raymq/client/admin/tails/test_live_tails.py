"""Tests of live views of a topic's new messages (tail), without a server. One reader serves all viewers of a topic.
The messages per second and the number of viewers are limited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

import raymq.client.admin.live_tails as module
from raymq.client.admin.live_tails import (
    TAIL_WAITING_BYTES_MAX,
    TAIL_WAITING_MAX,
    TailEvent,
    Tails,
    TooManyViewersError,
    Viewer,
)
from raymq.client.admin.messages import Arrived
from raymq.common.errors import RaymqError


class Topic:
    """Fake topic that a test fills with messages, and that counts its reads."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.reads = 0
        self.broken = ""

    async def read(self, topic: str, positions: Mapping[str, int] | None, most: int) -> Arrived:
        self.reads += 1
        if self.broken:
            raise RaymqError(self.broken)
        end = len(self.messages)
        start = end if positions is None else positions["q"]
        shown = max(start, end - most)
        return Arrived(tuple(self.messages[shown:end]), {"q": end}, shown - start)


def run(test: Callable[[Topic], Awaitable[None]]) -> None:
    async def body() -> None:
        await asyncio.wait_for(test(Topic()), 30)

    asyncio.run(body())


def tails_of(topic: Topic, *, rate: int = 1_000_000, max_viewers: int = 20) -> Tails:
    return Tails(topic.read, rate=rate, max_viewers=max_viewers, limit="console.max_viewers", round_s=0.001)


async def wait_for_begin(viewer: Viewer) -> None:
    """Wait until the viewer's tail has begun, so that the viewer sees all messages that arrive later."""
    assert await next_event(viewer) == TailEvent((), 0, "")


async def next_event(viewer: Viewer) -> TailEvent | None:
    return await anext(viewer.events())


def test_a_tail_begins_at_the_end_and_shows_new_messages() -> None:
    async def test(topic: Topic) -> None:
        topic.messages = ["old"]
        tails = tails_of(topic)
        viewer = tails.open("t", lambda _: True)
        await wait_for_begin(viewer)
        topic.messages += ["a", "b"]
        assert await next_event(viewer) == TailEvent(("a", "b"), 0, "")
        tails.close()

    run(test)


def test_viewers_share_a_reader_which_ends_with_the_last_one() -> None:
    async def test(topic: Topic) -> None:
        tails = tails_of(topic)
        first, second = tails.open("t", lambda _: True), tails.open("t", lambda text: text == "b")
        await wait_for_begin(first)
        await wait_for_begin(second)
        topic.messages += ["a", "b"]
        assert (await next_event(first), await next_event(second)) == (
            TailEvent(("a", "b"), 0, ""),
            TailEvent(("b",), 0, ""),
        )
        [reader] = tails._readers.values()
        tails.leave("t", first)
        tails.leave("t", first)
        assert not reader.task.cancelling()
        tails.leave("t", second)
        await asyncio.gather(reader.task, return_exceptions=True)
        assert reader.task.cancelled()
        assert tails.viewers == 0

    run(test)


def test_more_than_the_rate_is_passed_over_and_counted() -> None:
    async def test(topic: Topic) -> None:
        # the live tail sends at most ten messages for each read of the topic
        tails = tails_of(topic, rate=10_000)
        viewer = tails.open("t", lambda _: True)
        await wait_for_begin(viewer)
        topic.messages += [str(number) for number in range(100)]
        event = await next_event(viewer)
        assert event is not None
        assert (list(event.messages), event.skipped) == ([str(number) for number in range(90, 100)], 90)
        tails.close()

    run(test)


def test_a_slow_viewer_loses_the_oldest_messages_and_gets_their_number() -> None:
    async def test(_: Topic) -> None:
        viewer: Viewer = Viewer(lambda _: True)
        for number in range(TAIL_WAITING_MAX + 7):
            viewer.offer(Arrived((number,), {}, 1))
        event = await anext(viewer.events())
        assert event is not None
        assert (event.messages[0], len(event.messages)) == (7, TAIL_WAITING_MAX)
        assert event.skipped == 7 + TAIL_WAITING_MAX + 7

    run(test)


def test_a_slow_viewer_buffers_a_bounded_size() -> None:
    async def test(_: Topic) -> None:
        viewer: Viewer = Viewer(lambda number: number != 1)
        half = TAIL_WAITING_BYTES_MAX // 2
        viewer.offer(Arrived((0, 1, 2), {}, 0, half))
        viewer.offer(Arrived((3, 4), {}, 0, half))
        assert await anext(viewer.events()) == TailEvent((0, 2, 3, 4), 0, "")
        for number in range(5, 8):
            viewer.offer(Arrived((number,), {}, 0, half + 1))
        assert await anext(viewer.events()) == TailEvent((7,), 2, "")
        viewer.offer(Arrived((8,), {}, 0, 3 * TAIL_WAITING_BYTES_MAX))
        assert await anext(viewer.events()) == TailEvent((8,), 0, ""), "a single message may be larger"

    run(test)


def test_an_error_and_its_end_are_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAIL_ERROR_PAUSE_S", 0.001)

    async def test(topic: Topic) -> None:
        topic.broken = "no master"
        tails = tails_of(topic)
        viewer = tails.open("t", lambda _: True)
        assert await next_event(viewer) == TailEvent((), 0, "no master")
        topic.broken = ""
        assert await next_event(viewer) == TailEvent((), 0, "")
        tails.close()

    run(test)


def test_a_quiet_tail_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.001)

    async def test(_: Topic) -> None:
        assert await anext(Viewer(lambda _: True).events()) is None

    run(test)


def test_the_number_of_viewers_is_limited_by_the_setting() -> None:
    async def test(topic: Topic) -> None:
        tails = tails_of(topic, max_viewers=2)
        viewer = tails.open("t", lambda _: True)
        tails.open("u", lambda _: True)
        with pytest.raises(TooManyViewersError, match=r"max_viewers \(2\) allows"):
            tails.open("v", lambda _: True)
        tails.leave("t", viewer)
        tails.open("v", lambda _: True)
        tails.close()

    run(test)


def test_closing_ends_the_events_of_all_and_admits_nobody() -> None:
    async def test(topic: Topic) -> None:
        tails = tails_of(topic)
        viewer = tails.open("t", lambda _: True)

        async def watch() -> list[TailEvent | None]:
            return [event async for event in viewer.events()]

        await wait_for_begin(viewer)
        watching = asyncio.create_task(watch())
        tails.close()
        assert await watching == []
        with pytest.raises(TooManyViewersError):
            tails.open("t", lambda _: True)

    run(test)
