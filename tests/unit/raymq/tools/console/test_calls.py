"""Tests of the console's calls to the cluster. Their duration and their number are limited, and equal calls at the same
time share one result."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from raymq.common.errors import RequestTimeoutError, ServiceNotAvailableError
from raymq.tools.console.web.history import HISTORY_S, SAMPLE_INTERVAL_S, ClusterFigures, RateHistory
from raymq.tools.console.web.snapshots import CALLS_WAITING_MAX, SNAPSHOT_KEPT_S, CallPool, Snapshots
from tests.support.console.fake_cluster import FakeCluster


def test_a_call_that_takes_too_long_is_no_longer_waited_for():
    async def story() -> None:
        gate = threading.Event()
        calls = CallPool(FakeCluster().console_cluster(), threads=1)
        with pytest.raises(RequestTimeoutError, match=r"the store did not complete within 0\.01 s"):
            await calls.call(lambda cluster: gate.wait(60), 0.01, about="the store")
        with pytest.raises(RequestTimeoutError):
            await calls.call(lambda cluster: cluster.admin.producer_connections(), 0.01)
        gate.set()
        assert len(await calls.call(lambda cluster: cluster.admin.producer_connections(), 60.0)) == 1
        calls.close()

    asyncio.run(story())


def test_a_call_that_nobody_waits_for_any_more_does_not_begin():
    async def story() -> None:
        gate, cluster = threading.Event(), FakeCluster()
        calls = CallPool(cluster.console_cluster(), threads=1)
        for call in (lambda cluster: gate.wait(60), lambda cluster: cluster.admin.producer_connections()):
            with pytest.raises(RequestTimeoutError):
                await calls.call(call, 0.01)
        gate.set()
        await calls.call(lambda cluster: cluster.control.audit(), 60.0)
        assert cluster.asked == ["audit"]
        calls.close()

    asyncio.run(story())


def test_the_own_timeout_of_a_call_is_shown_as_it_is():
    async def story() -> None:
        cluster = FakeCluster()
        cluster.errors["producer_connections"] = RequestTimeoutError("broker-a", 3.0)
        calls = CallPool(cluster.console_cluster())
        with pytest.raises(RequestTimeoutError, match="broker-a did not complete within 3 s"):
            await calls.call(lambda cluster: cluster.admin.producer_connections(), 60.0)
        calls.close()

    asyncio.run(story())


def test_too_many_calls_are_refused_at_once():
    async def story() -> None:
        gate = threading.Event()
        calls = CallPool(FakeCluster().console_cluster(), threads=2)
        waiting = [
            asyncio.create_task(calls.call(lambda cluster: gate.wait(60), 60.0)) for _ in range(2 + CALLS_WAITING_MAX)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ServiceNotAvailableError, match="too many requests"):
            await calls.call(lambda cluster: cluster.admin.producer_connections())
        gate.set()
        assert all(await asyncio.gather(*waiting))
        await calls.call(lambda cluster: cluster.admin.producer_connections())
        calls.close()

    asyncio.run(story())


class Clock:
    """Fake clock that tests set."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_list_is_asked_for_once_by_all_who_want_it_and_again_when_it_is_old():
    async def story() -> None:
        clock, asked = Clock(), []

        async def ask() -> int:
            asked.append(1)
            await asyncio.sleep(0)
            return len(asked)

        snapshots = Snapshots(clock=clock)
        together = await asyncio.gather(*[snapshots.get("list", ask) for _ in range(20)])
        assert [one.value for one in together] == [1] * 20
        clock.now_s += SNAPSHOT_KEPT_S - 0.1
        assert (await snapshots.get("list", ask)).value == 1
        clock.now_s += 0.1
        assert (await snapshots.get("list", ask)).value == 2
        snapshots.forget()
        assert (await snapshots.get("list", ask)).value == 3
        clock.now_s += 0.9
        assert (await snapshots.get("list", ask, kept_s=1.0)).value == 3
        clock.now_s += 0.1
        assert (await snapshots.get("list", ask, kept_s=1.0)).value == 4

    asyncio.run(story())


def test_a_list_without_an_answer_is_the_last_one_with_its_age_and_the_error():
    async def story() -> None:
        clock, answers = Clock(), ["first"]

        async def ask() -> Any:
            if not answers:
                raise ServiceNotAvailableError("no broker is registered")
            return answers.pop()

        snapshots = Snapshots(clock=clock)
        assert (await snapshots.get("list", ask)).error == ""
        clock.now_s += 30.0
        later = await snapshots.get("list", ask)
        assert (later.value, later.age_s, later.error) == ("first", 30.0, "no broker is registered")
        assert (await snapshots.get("other", ask)).value is None

    asyncio.run(story())


def test_the_history_keeps_an_hour_and_no_sample_twice():
    history = RateHistory()
    many = int(HISTORY_S / SAMPLE_INTERVAL_S) + 50
    for n in range(many):
        history.add(ClusterFigures(n * 10_000, n * 100, n * 50, n * 1000))
        history.add(ClusterFigures(n * 10_000, 0, 0, 0))
    points = history.points()
    assert len(points) == HISTORY_S / SAMPLE_INTERVAL_S
    assert {(point.messages_in, point.messages_out, point.bytes_in) for point in points} == {(10.0, 5.0, 100.0)}
    assert history.newest is not None
    assert history.newest.at_ms == (many - 1) * 10_000
