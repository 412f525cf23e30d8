"""Interrupts each call of the asyncio clients at awaits and at points of the call's coroutine. These are the first
DENSE ones and then random ones: on average every third one in `make chaos`, and all in `make soak`.

    cancel      the task is cancelled when it awaits for the n-th time
    error       a signal handler raises an Exception at the n-th point of raymq's code on the loop
    interrupt   a signal handler raises a BaseException at the n-th point, which ends the loop, as ctrl-C does

After each interrupt the same consumer polls without skipping a message, and the same producer sends without storing a
message twice. The program prints the number of interrupted points by kind of client and call.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

import raymq
from raymq.client.consumer.pull.async_consumer import AsyncPullConsumer
from raymq.client.consumer.simple.async_consumer import AsyncSimpleConsumer
from raymq.client.producer.async_producer import AsyncProducer
from raymq.common.errors import CreateReplyMessageError, RaymqError, RecallError
from raymq.common.message import Message, MessageExt, MessageQueue
from raymq.remoting.storage_clients import StorageClients
from tests.component.interrupts.interrupter import REQUEST_TIMEOUTS, Interrupter
from tests.support.clusters.local_cluster import start_cluster
from tests.support.history.waiting import eventually

HANG_S = 60
UNINTERRUPTED = 2
DENSE = 8
"""The program interrupts a call at this number of first points, one after the other."""
WAIT_S = 30.0
INVISIBLE_S = 0.1
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
TOPIC, BROKER = "orders", "broker-a"
Q0, Q1 = MessageQueue(TOPIC, BROKER, 0), MessageQueue(TOPIC, BROKER, 1)

LOOP_CALLBACKS = frozenset({"settle"})
"""Names of functions that the program does not interrupt, because they wake coroutines through futures of the event
loop (raymq.client.producer.completion).

`Future.set_result` runs Python code of asyncio. If a signal handler raises in it, the future is finished but wakes no
coroutine.
"""

Call = Callable[[], Coroutine[Any, Any, Any]]


class Interrupt(KeyboardInterrupt):
    """Exception that the signal handler raises to simulate ctrl-C. Unlike an ordinary error, it ends the event
    loop."""


class Cancelling:
    """Awaits a coroutine and cancels the current task when the coroutine awaits for the n-th time."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int) -> None:
        self._coroutine, self._left = coroutine, at
        self.cancelled = False

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        answer: Any = None
        while True:
            try:
                waits_for = steps.send(answer)
            except StopIteration as ended:
                return ended.value
            self._left -= 1
            if not self._left:
                self.cancelled = True
                task = asyncio.current_task()
                assert task is not None
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                answer = yield waits_for
            except BaseException as error:
                try:
                    steps.throw(error)
                # The coroutine returned because its own timeout expired at the moment of the cancellation.
                except StopIteration as ended:
                    return ended.value
                raise AssertionError("an await that was cancelled goes on") from None


class Program:
    def __init__(self, root: Path, where: str, apart: int, seed: int) -> None:
        """`apart`: the largest distance of two interrupted points after the first DENSE ones. With 1 the program
        interrupts each call at every point. `seed`: the seed of the distances."""
        self.apart, self.dice = apart, random.Random(seed)
        start_cluster(root, store={"flush_disk_type": "ASYNC_FLUSH"})
        # Reduce asyncio's logging, because it would log the exceptions that the test's signal handlers raise in
        # callbacks.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        self.mq = raymq.connect()
        self.mq.admin.create_topic(TOPIC, queues=2)
        self.mq.admin.create_topic("leases", queues=1)
        if where == "elsewhere":
            self.mq.storages = StorageClients("another node")
        self.producer = raymq.connect().producer()
        self.interrupter = Interrupter(inside=f"{os.sep}raymq{os.sep}", without=LOOP_CALLBACKS)
        self.loop = asyncio.new_event_loop()
        self.points: dict[str, dict[str, int]] = {}
        self.numbers = itertools.count()
        self.sent: set[bytes] = set()
        self.polled: set[bytes] = set()
        self.got: list[Any] = []
        """Messages that the running call has returned. The program counts them as polled after the call, when no signal
        handler can interrupt it."""

    # Steps that the program runs after each interrupt

    def send(self, topic: str = TOPIC) -> bytes:
        body = b"%d" % next(self.numbers)
        self.producer.send(Message(topic, body))
        return body

    def append(self) -> bytes:
        """Send a message, and record that the pull consumer must return it."""
        body = self.send()
        self.sent.add(body)
        return body

    def poll_all(self, consumer: AsyncPullConsumer) -> None:
        """Poll until every message that was sent has arrived."""
        self.append()
        until_s = time.monotonic() + WAIT_S
        while self.polled != self.sent:
            assert time.monotonic() < until_s, f"{len(self.sent - self.polled)} messages were skipped"
            # An interrupted call of `pause` may take effect at any later time. So resume all paused queues before each
            # poll.
            consumer.resume(consumer.paused())
            self.note(self.finish(consumer.poll(500, 0.2)))
        self.finish(consumer.commit())

    def note(self, result: Any) -> None:
        """Add the bodies of the messages that a poll returned to `polled`. Results of other calls are ignored."""
        if isinstance(result, list):
            self.polled.update(message.body for message in result if isinstance(message, MessageExt))
        elif hasattr(result, "column"):
            self.polled.update(result.column("body").to_pylist())

    def finish(self, coroutine: Awaitable[Any]) -> Any:
        """Run a coroutine without interrupting it, and return its result."""

        async def run() -> Any:
            return await coroutine

        return self.loop.run_until_complete(run())

    # Ways to interrupt a call

    def cancelled(self, call: Call, point: int) -> tuple[bool, Any]:
        """Cancel a call at its await number `point`. Returns whether the call reached this await, and the call's result
        (None if the call was cancelled)."""
        awaiting = Cancelling(call(), point)

        async def run() -> Any:
            return await awaiting

        try:
            return awaiting.cancelled, self.loop.run_until_complete(run())
        except asyncio.CancelledError:
            assert awaiting.cancelled
            return True, None

    def raised(self, call: Call, point: int) -> tuple[bool, Any]:
        """Run a call, and let the signal handler raise an exception at the call's point number `point`. Returns True if
        the call reached this point, and the call's result.

        If the exception ended another callback of the event loop, the call still has a result.
        """
        tasks: list[asyncio.Task[Any]] = []

        def run() -> None:
            tasks.append(self.loop.create_task(call()))
            self.loop.run_until_complete(tasks[0])

        interrupted = self.interrupter.call(run, point)
        if not tasks:  # The interrupt occurred before the call's coroutine became a task, so the call has no result.
            assert interrupted
            return True, None
        [task] = tasks
        # If the interrupt has ended the event loop, the loop may still contain a request to stop. It comes from the
        # interrupted call, or from a task that waits for the call. So run the loop once, and ignore that it stops
        # early.
        with suppress(RuntimeError, Interrupt):
            self.loop.run_until_complete(asyncio.sleep(0))
        # the interrupt's exception has ended the event loop before the task ended, so cancel the task, as asyncio.run
        # does
        if not task.done():
            task.cancel()
            self.finish(asyncio.wait([task]))
        if task.cancelled() or task.exception() is not None:
            assert interrupted, task.exception()
            return True, None
        return interrupted, task.result()

    def try_all(
        self, kind: str, name: str, call: Call, works: Callable[[], None], before: Callable[[], object]
    ) -> None:
        """Interrupt a call at points at which it can be interrupted, in three ways. With "cancel" the call is
        cancelled. With "error" a signal handler raises an ordinary error, with "interrupt" an Interrupt."""
        count = 0
        for way in ("cancel", "error", "interrupt"):
            self.interrupter.raises = Interrupt if way == "interrupt" else None
            attempt = self.cancelled if way == "cancel" else self.raised
            point = ended = 0
            while ended < UNINTERRUPTED:
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                point += 1 if point < DENSE else self.dice.randint(1, self.apart)
                before()
                interrupted, result = attempt(call, point)
                for messages in [result, *self.got]:
                    self.note(messages)
                self.got.clear()
                ended = 0 if interrupted else ended + 1
                count += interrupted
                try:
                    works()
                except BaseException as error:
                    at = f"{self.interrupter.where or 'an await'} ({way}, point {point})"
                    raise AssertionError(f"{kind}.{name}: nothing works after an interrupt at {at}") from error
        self.points.setdefault(kind, {})[name] = count

    # Calls that the program interrupts

    def run(self) -> None:
        self.producing()
        self.pulling()
        self.acknowledging()
        self.receiving()
        self.closing("AsyncPullConsumer", self.pull_consumer)
        self.closing("AsyncSimpleConsumer", self.simple_consumer)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(self.points))
        sys.stdout.flush()
        os._exit(0)  # Skip the normal exit of Python, because servers run in this process.

    def pull_consumer(self, group: str = "pulling", **options: Any) -> AsyncPullConsumer:
        async def make() -> AsyncPullConsumer:
            return self.mq.async_pull_consumer(group, consume_from=FIRST, **options)

        consumer: AsyncPullConsumer = self.finish(make())
        self.finish(consumer.subscribe(TOPIC))
        return consumer

    def pulling(self) -> None:
        consumer = self.pull_consumer()
        self.poll_all(consumer)

        async def sync(call: Callable[..., Any], *arguments: Any) -> None:
            call(*arguments)

        async def next_one() -> Any:
            messages: AsyncIterator[Any] = aiter(consumer)
            return [await anext(messages)]

        async def seek() -> None:
            """Seek to the consumer's present offset, so that no message is skipped."""
            await consumer.seek(Q0, consumer.position(Q0))

        calls: dict[str, Call] = {
            "poll": lambda: consumer.poll(500, WAIT_S),
            "poll of nothing": lambda: consumer.poll(500, 0.01),
            "poll_table": lambda: consumer.poll_table(500, WAIT_S),
            "iteration": next_one,
            "commit": consumer.commit,
            "committed": lambda: consumer.committed(Q0),
            "subscribe": lambda: consumer.subscribe(TOPIC),
            "seek": seek,
            "lag": consumer.lag,
            "end_offsets": lambda: consumer.end_offsets([Q0, Q1]),
            "assignment": lambda: sync(consumer.assignment),
            "pause": lambda: sync(consumer.pause, [Q1]),
            "paused": lambda: sync(consumer.paused),
            "resume": lambda: sync(consumer.resume, [Q0, Q1]),
            "position": lambda: sync(consumer.position, Q0),
        }

        def works() -> None:
            self.poll_all(consumer)

        for name, call in calls.items():
            before: Callable[[], object] = (lambda: None) if name == "poll of nothing" else self.append
            self.try_all("AsyncPullConsumer", name, call, works, before)
        self.finish(consumer.close())

    def producing(self) -> None:
        """Interrupt the calls of an asyncio producer. After each interrupt, check that the producer can send and that
        its buffer is empty. No message is stored twice."""
        self.mq.admin.create_topic("produced", queues=1)
        self.mq.admin.create_topic("requests", queues=1)
        [request] = self.pull_one()
        producer = self.async_producer()
        acknowledged: dict[int, bytes] = {}

        def message(topic: str = "produced") -> Message:
            return Message(topic, b"%d" % next(self.numbers), keys=["k"])

        def works() -> None:
            sent = message()
            acknowledged[self.finish(producer.send(sent)).queue_offset] = sent.body
            self.finish(producer.flush())
            buffer = producer._pipeline.buffer
            # Wait until the producer's buffer is empty. A helper thread may still be sending the message of the
            # interrupted call, which holds buffer space.
            eventually(lambda: (buffer._bytes, buffer._count) == (0, 0), "no space stays taken", WAIT_S)
            eventually(lambda: not any(buffer._holders.values()), "no holder stays", WAIT_S)
            # Check that each fetch of a route ends. Several sends may share a fetch, so it continues if one of these
            # sends is cancelled.
            fetching = [task for task in producer._fetching.values() if not task.done()]
            assert not fetching or not self.finish(asyncio.wait(fetching, timeout=WAIT_S))[1], "a fetch never ends"

        async def table() -> None:
            await producer.send_table("produced", pa.table({"body": [message().body, message().body]}))

        async def batch() -> None:
            await producer.send_batch([message(), message()])

        async def refused(call: Awaitable[Any], *errors: type[RaymqError]) -> None:
            with suppress(*errors):
                await call

        async def with_new_route() -> None:
            producer._routes.clear()
            await producer.send(message(), timeout_s=10.0)

        calls: dict[str, Call] = {
            "send": lambda: producer.send(message()),
            "send with a route": with_new_route,
            "send by key": lambda: producer.send(message(), sharding_key="k"),
            "send_batch": batch,
            "send_oneway": lambda: producer.send_oneway(message()),
            "send_table": table,
            "flush": producer.flush,
            "recall": lambda: refused(producer.recall("produced", "no-handle"), RecallError),
            "request": lambda: refused(producer.request(message("requests"), timeout_s=0.05), *REQUEST_TIMEOUTS),
            "reply": lambda: refused(producer.reply(request, b"!"), CreateReplyMessageError),
        }
        for name, call in calls.items():
            self.try_all("AsyncProducer", name, call, works, lambda: None)
        self.finish(producer.close())
        self.closing_producers()
        consumer = self.mq.pull_consumer("checking", consume_from=FIRST)
        consumer.subscribe("produced")
        stored: dict[int, bytes] = {}
        while len(stored) <= max(acknowledged):
            messages = consumer.poll(10_000, WAIT_S)
            assert messages, "messages that were acknowledged do not come"
            stored |= {one.queue_offset: one.body for one in messages}
        assert acknowledged.items() <= stored.items()
        assert len(set(stored.values())) == len(stored), "a message is stored twice"
        consumer.close()

    def pull_one(self) -> list[Any]:
        """Receive one message with a new consumer. Returns the list of received messages."""
        self.send("requests")
        with self.mq.pull_consumer("one", consume_from=FIRST) as consumer:
            consumer.subscribe("requests")
            return consumer.poll(1, WAIT_S)

    def async_producer(self) -> AsyncProducer:
        async def make() -> AsyncProducer:
            return self.mq.async_producer("producing")

        return self.finish(make())

    def closing_producers(self) -> None:
        """Interrupt the close of a producer. Check that the producer can be closed again, and that every message was
        sent."""
        made: list[AsyncProducer] = []

        def before() -> None:
            made[:] = [self.async_producer()]
            self.finish(made[0].send_oneway(Message("produced", b"%d" % next(self.numbers))))

        def works() -> None:
            self.finish(made[0].close())
            assert made[0]._pipeline.buffer._count == 0

        self.try_all("AsyncProducer", "close", lambda: made[0].close(), works, before)  # noqa: PLW0108  # another one

    def acknowledging(self) -> None:
        consumer = self.pull_consumer("acknowledging", acknowledge_each=True)
        self.polled.clear()
        self.poll_all(consumer)

        async def poll_and_acknowledge() -> Any:
            messages = await consumer.poll(500, WAIT_S)
            self.got.append(messages)
            consumer.acknowledge(messages)

        self.try_all(
            "AsyncPullConsumer", "acknowledge", poll_and_acknowledge, lambda: self.poll_all(consumer), self.append
        )
        self.finish(consumer.close())

    def simple_consumer(self) -> AsyncSimpleConsumer:
        async def make() -> AsyncSimpleConsumer:
            return self.mq.async_simple_consumer("receiving", consume_from=FIRST)

        consumer: AsyncSimpleConsumer = self.finish(make())
        self.finish(consumer.subscribe("leases"))
        return consumer

    def receiving(self) -> None:
        consumer = self.simple_consumer()
        held: list[Any] = []

        def send() -> bytes:
            return self.send("leases")

        def lease() -> None:
            """Receive messages with a short lease. After an interrupt no caller has the lease's handle, so the messages
            can be received again only after the lease has expired."""
            send()
            until_s = time.monotonic() + WAIT_S
            while not (messages := self.finish(consumer.receive(32, INVISIBLE_S, wait_s=0.2))):
                assert time.monotonic() < until_s, "a message that was sent is not received"
            held[:] = messages

        def lag() -> int:
            return sum(row.lag for row in self.mq.admin.describe_group("receiving") if row.queue.topic == "leases")

        def works() -> None:
            """Receive and acknowledge messages until the group has no lag. The interrupted call may still hold messages
            under a lease, and may still acknowledge them."""
            new, received = send(), set()
            until_s = time.monotonic() + WAIT_S
            while not received or lag():
                assert time.monotonic() < until_s, "a lease that nobody has does not expire"
                messages = self.finish(consumer.receive(32, 5 * INVISIBLE_S, wait_s=0.2))
                received.update(message.body for message in messages)
                self.finish(consumer.ack(messages))
            assert new in received

        async def receive_and_settle() -> None:
            messages = await consumer.receive(32, INVISIBLE_S, wait_s=1.0)
            await consumer.ack(messages)

        calls: dict[str, tuple[Call, Callable[[], object]]] = {
            "receive": (receive_and_settle, send),
            "ack": (lambda: consumer.ack(held), lease),
            "ack_handles": (lambda: consumer.ack_handles("leases", [one.handle for one in held]), lease),
            "change_invisible": (lambda: consumer.change_invisible(held, 0.0), lease),
            "change_invisible_handles": (
                lambda: consumer.change_invisible_handles("leases", [one.handle for one in held], 0.0),
                lease,
            ),
            "extend_invisible": (lambda: consumer.extend_invisible(held, INVISIBLE_S), lease),
            "extend_invisible_handles": (
                lambda: consumer.extend_invisible_handles("leases", [one.handle for one in held], INVISIBLE_S),
                lease,
            ),
            "subscribe": (lambda: consumer.subscribe("leases"), send),
        }
        works()
        for name, (call, before) in calls.items():
            self.try_all("AsyncSimpleConsumer", name, call, works, before)
        self.finish(consumer.close())

    def closing(self, kind: str, make: Callable[[], Any]) -> None:
        """Interrupt the close of a consumer. Check that the consumer can be closed again, and that its threads
        end."""
        made: list[Any] = []

        def before() -> None:
            made[:] = [make()]

        def works() -> None:
            self.finish(made[0].close())
            eventually(lambda: made[0]._engine.closed, "the end of the consumer", WAIT_S)
            prefix = f"calls-{made[0].group}"
            eventually(
                lambda: not any(thread.name.startswith(prefix) for thread in threading.enumerate()),
                "the end of its threads",
                WAIT_S,
            )

        self.try_all(kind, "close", lambda: made[0].close(), works, before)  # noqa: PLW0108  # another one each time


if __name__ == "__main__":
    Program(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])).run()
