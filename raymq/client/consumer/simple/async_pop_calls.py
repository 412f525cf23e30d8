"""AsyncPopCalls makes the calls of RocketMQ's POP consumption for one consumer group in an event loop: a receive that
waits holds no thread.

PopSteps (raymq.client.consumer.simple.pop_steps) decides the steps of each call, as for PopCalls. Leased messages are
read in a thread, for milliseconds. If the caller of a receive is cancelled, the broker is asked to answer at once; the
messages of an answer that was under way are given back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from raymq.client.consumer.simple.lease_reader import LeaseReader
from raymq.client.consumer.simple.pop_calls import FROM_LAST_OFFSET, attempts_of
from raymq.client.consumer.simple.pop_steps import (
    SETTLE_TIMEOUT_S,
    BlockingCall,
    BrokerCall,
    Place,
    PopSteps,
    Steps,
)
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.client.consumer.simple.taken_messages import MessageTaker
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import RaymqError
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.protocol.group import StartOffsetQuery
from raymq.common.protocol.pop import LeasePart
from raymq.common.retry import persist_in_loop, persist_until
from raymq.remoting.broker_client import AsyncBrokerClient, broker_client
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncPopCalls:
    """The POP calls of one consumer group in one event loop. The coroutines have the arguments, results and errors of
    PopCalls' methods of the same names.

    `broker`: returns the client of a broker by its name; several groups may share the clients, and whoever made them
    closes them. `threads`: runs the calls that block.
    """

    def __init__(
        self,
        group: str,
        *,
        routes: RouteCache,
        storages: StorageClients,
        broker: Callable[[str], AsyncBrokerClient],
        threads: Executor,
        names: Namespace = NO_NAMESPACE,
        start: StartOffsetQuery = FROM_LAST_OFFSET,
    ) -> None:
        self.group = group
        self._broker, self._threads = broker, threads
        self._reader = LeaseReader(routes, storages)
        self._steps = PopSteps(group, routes, MessageTaker(group, self._reader, names, _call_in_thread), start)
        self._tasks: set[asyncio.Task[Any]] = set()
        """The tasks that go on after their caller was cancelled."""

    async def receive(
        self,
        broker_name: str,
        subscriptions: Mapping[str, Subscription],
        max_messages: int,
        invisible_ms: int,
        wait_s: float = 0.0,
        *,
        ordered: bool | None = None,
        attempt_id: str = "",
    ) -> list[ReceivedMessage]:
        """Receive up to `max_messages` messages of some topics from one broker, which waits up to `wait_s` for the
        first message. `subscriptions`: the wanted messages, by topic. Messages that they exclude are acknowledged, so
        the list may be empty before `wait_s` has passed.

        A call that repeats another call's `attempt_id` gets the same leases. If the caller is cancelled, the receive
        ends at the broker, too. Messages that were leased before are then visible to other members of the group at
        once, and their attempt does not count. After an error, messages may have been leased; they are delivered again.
        """
        places = (broker_name, subscriptions, max_messages, invisible_ms, wait_s, ordered, attempt_id)
        leave: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = self._begin(self._run(self._steps.receive(*places), leave))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            leave.set_result(None)
            self._begin(self._give_back(running))
            raise

    async def _give_back(self, running: asyncio.Task[list[ReceivedMessage]]) -> None:
        """Give back the messages of a receive whose caller was cancelled."""
        try:
            messages = await running
            if messages:
                await self.change_invisible(messages, 0, counted=False)
        except RaymqError as error:
            logger.info(
                "cannot return the messages of a cancelled receive of group %s, so they are delivered again after "
                "their lease: %s",
                self.group,
                error,
            )

    async def places(self, topic: str, handles: Iterable[str]) -> list[Place]:
        """Parse handles: each is a receipt and a queue offset. Raises InvalidArgumentError if a text is not a handle,
        or names a broker that does not have the topic."""
        return await self._run(self._steps.places(topic, handles))

    async def ack_places(self, places: Iterable[Place]) -> int:
        """Acknowledge messages by their places, which `places` returned for any topics. Durable on return."""
        return await self._run(self._steps.ack_places(places))

    async def change_invisible(
        self, messages: Iterable[ReceivedMessage], invisible_ms: int | None, *, counted: bool = True
    ) -> list[ReceivedMessage]:
        """Make messages visible again `invisible_ms` from now (PopCalls.change_invisible)."""
        return await self._run(self._steps.change_invisible(messages, invisible_ms, counted))

    async def change_invisible_handles(
        self, topic: str, handles: Iterable[str], invisible_ms: int, *, counted: bool = True
    ) -> list[str | None]:
        """Change the invisible time of messages by their handles (PopCalls.change_invisible_handles)."""
        return await self._run(self._steps.change_invisible_handles(topic, handles, invisible_ms, counted))

    async def extend_once(
        self, broker_name: str, parts: Sequence[LeasePart], invisible_ms: int, timeout_s: float
    ) -> list[bool]:
        """Extend leases at one broker, without retries (PopCalls.extend_once)."""
        return await self._run(self._steps.extend_once(broker_name, parts, invisible_ms, timeout_s))

    async def return_parts(self, broker_name: str, parts: Sequence[LeasePart], invisible_ms: int) -> None:
        """Make parts of leases at one broker visible again `invisible_ms` from now, as failed attempts. Parts that were
        acknowledged or delivered again stay so. Durable on return."""
        await self._run(self._steps.return_parts(broker_name, parts, invisible_ms))

    async def dead_letter(self, topic: str, handle: str, attempts: int = 0, failure: str = "") -> bool:
        """Store a message of a topic as a dead letter of the group, and acknowledge it, by its handle.

        `attempts`: the number of failed deliveries, for the dead letter; 0: as the broker counts them. `failure`: why
        the message failed, as text. Returns False without storing a letter if the message was acknowledged, forwarded
        or delivered again: the call first moves the message to a new lease, which only one call can do. If the caller
        is cancelled, the call goes on.

        Raises InvalidArgumentError as `places` does, BodyUnreadableError if the message's record is damaged, and
        RaymqError if no letter could be stored in time. After an error the message is delivered again, as soon as
        possible. If the call that stores the letter timed out, that letter may have been stored all the same.
        """
        steps = self._steps.dead_letter(topic, handle, attempts, failure)
        return await asyncio.shield(self._begin(self._run(steps)))

    async def report_reads(self) -> None:
        """Report to the stores how many messages were read from their mapped files."""
        if self._reader.has_reads:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._reader.report_reads)

    async def finish(self) -> None:
        """Wait for the calls that go on after their caller was cancelled, such as calls that give messages back."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def close(self) -> None:
        """Report the reads. Blocks for a short call to each store. Idempotent."""
        self._reader.report_reads()

    # Carrying out steps

    def _begin(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that does not end with its caller."""
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, steps: Steps[T], leave: asyncio.Future[None] | None = None) -> T:
        """Make the calls of the steps, one after another, and return the result. `leave`: done when nobody waits for
        messages any more."""
        try:
            step = next(steps)
            while True:
                try:
                    result = await self._make(step, leave)
                # the steps decide what follows an error
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            value: T = end.value
            return value

    async def _make(self, step: BrokerCall | BlockingCall, leave: asyncio.Future[None] | None) -> Any:
        if isinstance(step, BlockingCall):
            return await asyncio.get_running_loop().run_in_executor(self._threads, step.run)
        name, method, arguments, once_s = step
        client = self._broker(name)
        if once_s is not None:
            return await client.call(method, *arguments, timeout_s=once_s, leave=leave)
        call: Callable[..., Awaitable[Any]] = client.call
        return await persist_in_loop(time.monotonic() + SETTLE_TIMEOUT_S, attempts_of(call, method, arguments))


def _call_in_thread(name: str, method: str, *arguments: Any) -> Any:
    """Call a broker from a thread that reads messages, with retries while the broker restarts."""
    return persist_until(time.monotonic() + SETTLE_TIMEOUT_S, attempts_of(broker_client(name).call, method, arguments))
