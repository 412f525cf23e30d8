"""Runs the synchronous and the asyncio pull consumer behind one blocking interface, so that one test suite covers both.
A thread runs the asyncio consumer's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from raymq.client.consumer.pull.async_consumer import AsyncPullConsumer
from raymq.client.consumer.pull.consumer import PullConsumer
from raymq.client.consumer.pull.engine import PullEngine
from tests.support.clients.fakes import WAIT_S

KINDS = ("sync", "async")


class LoopThread:
    """An event loop that runs in a thread until `stop` is called."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="loop", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], Any]) -> Any:
        """Run `call` on the event loop and return its result. If `call` returns a coroutine, the loop awaits
        it."""

        async def on_loop() -> Any:
            result = call()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(on_loop(), self.loop).result(WAIT_S * 6)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


class Blocking:
    """An asyncio pull consumer with the interface of the synchronous PullConsumer. Each call runs on an event loop and
    blocks until it is done."""

    def __init__(self, loop: LoopThread, consumer: AsyncPullConsumer) -> None:
        self._loop = loop
        self._consumer = consumer

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._consumer, name)
        if not callable(target):
            return target

        @wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._loop.run(lambda: target(*args, **kwargs))

        return call

    def __iter__(self) -> Iterator[Any]:
        messages = self._loop.run(self._consumer.__aiter__)
        while True:
            try:
                yield self._loop.run(messages.__anext__)
            except StopAsyncIteration:
                return

    def __enter__(self) -> Blocking:
        return self

    def __exit__(self, *reason: Any) -> None:
        self._loop.run(lambda: self._consumer.__aexit__(*reason))


def make_twin(kind: str, engine: PullEngine, loop: LoopThread) -> PullConsumer | Blocking:
    """Return a pull consumer over `engine`: synchronous or asyncio, as `kind` says."""
    if kind == "sync":
        return PullConsumer(engine)
    return Blocking(loop, loop.run(lambda: AsyncPullConsumer(engine)))
