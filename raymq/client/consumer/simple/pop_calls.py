"""PopCalls makes the calls of RocketMQ's POP consumption for one consumer group: receive, acknowledge, change the
invisible time, extend leases.

The caller names the topics and the broker of each receive, so one PopCalls serves consumers with different
subscriptions. Nothing that settles a message is kept here: a receipt, or its handle as text, says all that a broker
needs. So a message that one process received can be settled in another process, and after this process has died.
raymq.client.consumer.simple.engine adds a simple consumer's subscriptions, and the choice of brokers.
raymq.client.consumer.simple.pop_steps decides the steps of each call, and async_pop_calls is the asyncio variant.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from raymq.client.consumer.simple.lease_reader import LeaseReader
from raymq.client.consumer.simple.pop_steps import (
    BROKER_ATTEMPT_TIMEOUT_S,
    SETTLE_TIMEOUT_S,
    BlockingCall,
    BrokerCall,
    PopSteps,
    Steps,
)
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.client.consumer.simple.taken_messages import RECEIVE_MAX_BYTES, MessageTaker
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import GroupNotExistError, RaymqError
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.protocol.group import StartOffsetQuery
from raymq.common.protocol.pop import LeasePart, ReceiveAnswer, ReceiveRequest
from raymq.common.retry import persist_until
from raymq.remoting.broker_client import BrokerClient, call_until_first
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

FROM_LAST_OFFSET: Final = StartOffsetQuery()

T = TypeVar("T")


class PopCalls:
    """The POP calls of one consumer group. Thread-safe.

    Group and topics are full names, with their namespace; received messages show the topics without it (`names`).
    `start`: where the group starts in a queue in which it has committed nothing. `gives_up`: False if messages never
    become dead letters by the number of their attempts. Each PopCalls has its own connections
    to brokers, because receives that wait keep them busy; `close` closes them.
    """

    def __init__(
        self,
        group: str,
        *,
        routes: RouteCache,
        storages: StorageClients,
        names: Namespace = NO_NAMESPACE,
        start: StartOffsetQuery = FROM_LAST_OFFSET,
        gives_up: bool = True,
    ) -> None:
        self.group = group
        self._routes = routes
        self._taker = MessageTaker(group, LeaseReader(routes, storages), names, self._call, gives_up=gives_up)
        self._steps = PopSteps(group, routes, self._taker, start)
        self._lock = threading.Lock()
        self._brokers: dict[str, BrokerClient] = {}

    # Methods that receive messages

    def brokers_of(self, topics: Iterable[str]) -> dict[str, list[str]]:
        """Return the names of the brokers from which these topics can be received, each with its topics. Blocks until
        the topics' routes are known. Raises TopicNotExistError if a topic does not exist."""
        brokers: dict[str, list[str]] = {}
        for topic in topics:
            for queue in self._routes.wait(topic, SETTLE_TIMEOUT_S).subscribe_queues:
                known = brokers.setdefault(queue.broker_name, [])
                if topic not in known:
                    known.append(topic)
        return brokers

    def lease(
        self,
        broker_name: str,
        topics: Iterable[str],
        max_messages: int,
        invisible_ms: int,
        wait_s: float = 0.0,
        *,
        ordered: bool | None = None,
        attempt_id: str = "",
    ) -> ReceiveAnswer:
        """Lease up to `max_messages` messages of some topics at one broker, which waits up to `wait_s` for the first
        message. Returns the leased ranges; `read` reads their messages. `ordered`: whether in order mode; None for the
        group's mode (raymq.common.protocol.group.is_ordered).

        A call that repeats another call's `attempt_id` gets the same leases; without an id, each call is a new one.
        """
        places = (broker_name, topics, max_messages, invisible_ms, wait_s, ordered, attempt_id)
        return self._run(self._steps.lease(*places))

    def lease_at_all(
        self,
        brokers: Mapping[str, Iterable[str]],
        max_messages: int,
        invisible_ms: int,
        wait_s: float,
        *,
        ordered: bool | None = None,
    ) -> dict[str, ReceiveAnswer | RaymqError]:
        """Lease messages as `lease` does, at several brokers at the same time, until one of them has answered.
        `brokers`: the topics to receive from each broker. The wait holds no thread but the caller's.

        Returns the answer or the error of each broker. Several brokers may have leased up to `max_messages` each, if
        messages arrive at the same time: the caller hands them out, or gives them back. A broker with an error may have
        leased messages, which are delivered again.
        """
        answers: dict[str, ReceiveAnswer | RaymqError] = {}
        requests: dict[str, tuple[ReceiveRequest]] = {}
        for name, topics in brokers.items():
            begin = self._steps.begin(name, topics, max_messages, invisible_ms, wait_s, ordered)
            try:
                requests[name] = (self._run(begin),)
            except RaymqError as error:
                answers[name] = error
        clients, timeout_s = [self._broker(name) for name in requests], wait_s + BROKER_ATTEMPT_TIMEOUT_S
        found = call_until_first(clients, "receive_messages", list(requests.values()), timeout_s)
        answers |= zip(requests, found, strict=True)
        for name, answer in answers.items():
            if isinstance(answer, GroupNotExistError):
                self._steps.forget_start(name)
                answers[name] = ReceiveAnswer((), 0)
        return answers

    def read(
        self,
        broker_name: str,
        answer: ReceiveAnswer,
        subscriptions: Mapping[str, Subscription],
        max_bytes: int = RECEIVE_MAX_BYTES,
    ) -> list[ReceivedMessage]:
        """Read the leased messages that the subscriptions want. Acknowledges the excluded messages, and forwards those
        with too many attempts to the dead letters. `subscriptions`: the wanted messages, by topic. `max_bytes`: about
        how many bytes of records to read; further messages are returned to the broker, and their attempt does not
        count."""
        return self._taker.take(broker_name, answer, subscriptions, max_bytes) if answer.ranges else []

    def report_reads(self) -> None:
        """Report to the stores how many messages were read from their mapped files. Blocks for a short call to each
        store."""
        self._taker.report_reads()

    # Methods that settle messages: acknowledge them, change their invisible time, forward them to the dead letters

    def ack(self, messages: Iterable[ReceivedMessage]) -> int:
        """Acknowledge messages. Returns the number of messages that this call acknowledged. Durable on return."""
        return self._run(self._steps.ack(messages))

    def ack_handles(self, topic: str, handles: Iterable[str]) -> int:
        """Acknowledge messages of a topic by their handles, as `ack` does. Raises InvalidArgumentError if a text is not
        a handle, or names a broker that does not have the topic."""
        return self._run(self._steps.ack_handles(topic, handles))

    def change_invisible(
        self, messages: Iterable[ReceivedMessage], invisible_ms: int | None, *, counted: bool = True
    ) -> list[ReceivedMessage]:
        """Make messages visible again `invisible_ms` from now; None: after the group's retry interval for the number of
        a message's attempts, at most INVISIBLE_MAX_MS. Returns the messages that were neither acknowledged nor
        delivered again, with their new receipts. `counted`: False if no consumer has processed the messages; their
        attempt does not count then. Durable on return."""
        return self._run(self._steps.change_invisible(messages, invisible_ms, counted))

    def change_invisible_handles(
        self, topic: str, handles: Iterable[str], invisible_ms: int, *, counted: bool = True
    ) -> list[str | None]:
        """Change the invisible time of a topic's messages by their handles, as `change_invisible` does. Returns the new
        handle for each handle; None for a message that was acknowledged or delivered again. Raises InvalidArgumentError
        as `ack_handles` does."""
        return self._run(self._steps.change_invisible_handles(topic, handles, invisible_ms, counted))

    def extend_invisible(self, messages: Iterable[ReceivedMessage], invisible_ms: int) -> list[bool]:
        """Keep messages invisible until `invisible_ms` from now, with their receipts. Returns for each message whether
        it was still leased and not acknowledged. Extends whole leases: all unacknowledged messages of a queue that came
        with one receive. Durable on return."""
        return self._run(self._steps.extend_invisible(messages, invisible_ms))

    def extend_invisible_handles(self, topic: str, handles: Iterable[str], invisible_ms: int) -> list[bool]:
        """Extend the leases of a topic's messages by their handles, as `extend_invisible` does. Raises
        InvalidArgumentError as `ack_handles` does."""
        return self._run(self._steps.extend_invisible_handles(topic, handles, invisible_ms))

    def extend_once(
        self, broker_name: str, parts: Sequence[LeasePart], invisible_ms: int, timeout_s: float
    ) -> list[bool]:
        """Extend leases at one broker, without retries. Returns False for each lease that has ended. Raises RaymqError
        if the broker does not answer within `timeout_s`."""
        return self._run(self._steps.extend_once(broker_name, parts, invisible_ms, timeout_s))

    def dead_letter(self, topic: str, handle: str, attempts: int = 0, failure: str = "") -> bool:
        """Store a message of a topic as a dead letter of the group, and acknowledge it, by its handle. Arguments,
        result and errors as of AsyncPopCalls.dead_letter."""
        return self._run(self._steps.dead_letter(topic, handle, attempts, failure))

    # Calls to brokers

    def _run(self, steps: Steps[T]) -> T:
        """Make the calls of the steps, one after another, and return the result."""
        try:
            step = next(steps)
            while True:
                try:
                    result = self._make(step)
                # the steps decide what follows an error
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            value: T = end.value
            return value

    def _make(self, step: BrokerCall | BlockingCall) -> Any:
        if isinstance(step, BlockingCall):
            return step.run()
        name, method, arguments, once_s = step
        if once_s is not None:
            return self._broker(name).call(method, *arguments, timeout_s=once_s)
        return self._call(name, method, *arguments)

    def _call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a broker, with retries while the broker restarts. The method must be safe to repeat."""
        return persist_until(
            time.monotonic() + SETTLE_TIMEOUT_S, attempts_of(self._broker(name).call, method, arguments)
        )

    def _broker(self, name: str) -> BrokerClient:
        with self._lock:
            client = self._brokers.get(name)
            if client is None:
                client = self._brokers[name] = BrokerClient(name)
            return client

    def close(self) -> None:
        """Close the connections to brokers, and report the reads. A receive that waits ends within a few seconds.
        Idempotent."""
        with self._lock:
            brokers = list(self._brokers.values())
        for broker in brokers:
            broker.drop_lanes()
        self.report_reads()


def attempts_of(call: Callable[..., T], method: str, arguments: Sequence[Any]) -> Callable[[float], T]:
    """Return a function that makes one attempt of a broker's call, given the seconds that are left."""
    return lambda left_s: call(method, *arguments, timeout_s=min(left_s, BROKER_ATTEMPT_TIMEOUT_S))
