"""Makes producers that send to fake stores and retry without a pause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from raymq.client.producer.completion import SendFuture
from raymq.client.producer.observers import SendObserver
from raymq.client.producer.producer import Producer
from raymq.client.producer.queue_selector import DestinationOptions
from raymq.client.producer.settings import ProducerSettings
from raymq.common.message import Message
from raymq.common.protocol.route import TopicRoute
from tests.support.clients.fakes import WAIT_S, FakeRoutes, FakeStore, topic_route


class NoPause:
    """A retry backoff that never waits."""

    def next(self) -> float:
        return 0.0

    def reset(self) -> None:
        pass


class Gate:
    """A step of a FakeStore's script that blocks an append attempt until a test opens the gate."""

    def __init__(self, then=None) -> None:
        self.entered, self.opened, self.then = threading.Event(), threading.Event(), then

    def __call__(self, batches):
        self.entered.set()
        assert self.opened.wait(WAIT_S)
        return self.then


class Clock:
    """A clock for a producer's send timeout. The time changes only when a test advances the clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, then=None) -> Callable[..., Any]:
        """Return a step of a FakeStore's script. The step advances the clock by an hour, so that every send expires,
        and returns `then`."""

        def step(*batches):
            self.now_s += 3600.0
            return then

        return step


MakeProducer = Callable[..., Producer]


def handed_over(
    producer: Producer, messages: Sequence[Message], where: DestinationOptions, timeout_s: float
) -> list[SendFuture]:
    """Send messages through the producer's whole send path with the given timeout. Even a single message takes this
    path, not the shorter path for single messages."""
    placed = producer.pipeline.hand_over(messages, where, timeout_s, together=len(messages) > 1)
    return placed.futures(len(messages))


@contextmanager
def producers_of_fakes(clock: Callable[[], float] = time.monotonic) -> Iterator[MakeProducer]:
    """Yield a function that makes producers, each with one fake store per broker group. All producers are closed at the
    end, even if some messages are not sent yet."""
    made: list[tuple[Producer, tuple[FakeStore, ...]]] = []

    def make(
        *stores: FakeStore,
        route: TopicRoute | None = None,
        on_close: Callable[[Producer], None] = lambda producer: None,
        observers: Sequence[SendObserver] = (),
        **settings,
    ) -> Producer:
        by_name = {store.name: store for store in stores}
        routes = FakeRoutes(route or topic_route(a=1), topic_route("other", a=1))
        producer = Producer(
            "group",
            routes=routes,
            storage=by_name.__getitem__,
            born_host=("127.0.0.1", 0),
            settings=ProducerSettings(**settings),
            on_close=on_close,
            observers=observers,
            clock=clock,
            pauses=NoPause,
        )
        producer.test_routes = routes
        made.append((producer, stores))
        return producer

    yield make
    for producer, stores in made:
        for store in stores:
            store.script.clear()
            store.connects.clear()
        producer.close()
