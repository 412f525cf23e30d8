"""SimpleEngine is the engine that the blocking and asyncio simple consumers share: the consumer's subscriptions, its
turns through the brokers, and its state.

    receive → one broker after another → PopCalls: leased ranges → the messages, from the storage actors

A simple consumer holds no queue and no position, and has no thread of its own, unless it renews leases. So its group
may have any number of members. The messages of a member that dies are delivered again after their invisible time.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from raymq.client.consumer.simple.pop_calls import PopCalls
from raymq.client.consumer.simple.pop_steps import SETTLE_TIMEOUT_S
from raymq.client.consumer.simple.received_message import ReceivedMessage, parts_of
from raymq.client.consumer.simple.renewal import RENEWED_MIN_S, Renewer
from raymq.client.consumer.simple.settings import SimpleSettings
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import ClientStateError, InvalidArgumentError, RaymqError
from raymq.common.members.questions import DirectConsumption, RunningInfo, thread_stacks
from raymq.common.message import MessageModel
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.protocol.clients import ConsumerData
from raymq.common.retry import Backoff
from raymq.records.filters.sql import SqlFilter
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

WAIT_OF_ONE_S: Final = 5.0
"""Maximum time in s that one request waits at the broker (long poll), if the topics have one broker."""
WAIT_OF_SEVERAL_S: Final = 0.25
"""Maximum time in s that one request waits at a broker (long poll), if the topics have several brokers. It is short,
because a message may arrive at another broker."""


class SimpleEngine:
    """Engine of one simple consumer. Thread-safe: several threads may receive. `announce` is called with the consumer's
    description for administrators."""

    def __init__(
        self,
        settings: SimpleSettings,
        *,
        routes: RouteCache,
        storages: StorageClients,
        names: Namespace = NO_NAMESPACE,
        announce: Callable[[SimpleEngine, ConsumerData], None],
        on_close: Callable[[SimpleEngine], None],
    ) -> None:
        self.settings, self.names = settings, names
        self.pop = PopCalls(settings.group, routes=routes, storages=storages, names=names, start=settings.start)
        self._renewer = Renewer(settings.group, self.pop.extend_once) if settings.auto_renew else None
        self._routes, self._announce, self._on_close = routes, announce, on_close
        self._lock = threading.Lock()
        self._subscriptions: dict[str, Subscription] = {}
        self._turn = secrets.randbelow(1024)
        self._name = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self.closed = False

    # Methods that choose the topics to consume

    def subscribe(self, topic: str, expression: str | SqlFilter) -> None:
        """Subscribe to a topic. Blocks until the topic's route is known."""
        self.check_open()
        topic = self.names.wrap(topic)
        subscription = Subscription.parse(topic, expression)
        if subscription.predicate is not None:
            raise InvalidArgumentError(
                f"a simple consumer cannot filter topic {topic!r} by a predicate: subscribe by tags or to all "
                "messages, and acknowledge the unwanted messages"
            )
        self._routes.wait(topic, SETTLE_TIMEOUT_S)
        with self._lock:
            self._subscriptions[topic] = subscription
        self._announce_subscriptions()

    def unsubscribe(self, topic: str) -> None:
        """Stop receiving messages of a topic."""
        self.check_open()
        with self._lock:
            if self._subscriptions.pop(self.names.wrap(topic), None) is None:
                raise ClientStateError(f"this consumer does not subscribe to topic {topic!r}")
        self._announce_subscriptions()

    def _announce_subscriptions(self) -> None:
        with self._lock:
            expressions = {topic: one.description for topic, one in self._subscriptions.items()}
        where = self.settings.start.where
        data = ConsumerData(self.settings.group, "POP", expressions, consume_from=where, member=self._name)
        self._announce(self, data)

    # Methods that answer administrators' queries

    def running_info(self, client_id: str, host: str, *, stacks: bool) -> RunningInfo:
        """Return the consumer's state, for an administrator's query (raymq.common.members.questions.Answers). The state
        lists no queues, because a simple consumer has no queues of its own."""
        with self._lock:
            subscriptions = {topic: one.description for topic, one in self._subscriptions.items()}
        return RunningInfo(
            *(client_id, host, os.getpid(), self._name, self.settings.group),
            *("POP", MessageModel.CLUSTERING.value, subscriptions),
            stacks=thread_stacks() if stacks else (),
        )

    def consume_directly(self, client_id: str, record: bytes, broker_name: str) -> DirectConsumption:
        """Raise InvalidArgumentError, because a simple consumer has no listener."""
        raise InvalidArgumentError(
            f"a member of group {self.settings.group!r} is a simple consumer, which has no listener; `raymq "
            "replay` delivers the message to the group again"
        )

    # Methods that receive messages

    def receive(self, max_messages: int, invisible_s: float, wait_s: float) -> list[ReceivedMessage]:
        """Receive up to `max_messages` messages. Blocks up to `wait_s` for the first message."""
        self.check_open()
        with self._lock:
            subscriptions = dict(self._subscriptions)
        if not subscriptions:
            raise ClientStateError("this consumer has no subscription; call subscribe(topic) before receive()")
        if self._renewer is not None and invisible_s < RENEWED_MIN_S:
            raise InvalidArgumentError(
                f"with auto_renew, invisible_s of a receive must be at least {RENEWED_MIN_S:g} s, not {invisible_s:g}"
            )
        wish = (max_messages, round(invisible_s * 1000))
        deadline_s = time.monotonic() + wait_s
        backoff, first = Backoff(), True
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            messages, failure = self._ask_brokers(wish, subscriptions, left_s, look=first)
            if messages or self.closed:
                return messages
            self.pop.report_reads()
            if time.monotonic() >= deadline_s:
                if failure is not None:
                    raise failure
                return messages
            if failure is not None:
                time.sleep(min(backoff.next(), left_s))
            first = False

    def _ask_brokers(
        self, wish: tuple[int, int], subscriptions: Mapping[str, Subscription], wait_s: float, *, look: bool
    ) -> tuple[list[ReceivedMessage], RaymqError | None]:
        """Request messages from the topics' brokers in turn, until one broker returns messages. If no broker returns
        any, also returns the error of a broker that could not be called. `wish`: the number of messages, and their
        invisible time in ms. `look`: True to try several brokers without waiting at each."""
        brokers = self.pop.brokers_of(sorted(subscriptions))
        names = sorted(brokers)
        with self._lock:
            self._turn += 1
            first = self._turn % max(1, len(names))
        failure: RaymqError | None = None
        each_s = min(wait_s, WAIT_OF_ONE_S if len(names) == 1 else 0.0 if look else WAIT_OF_SEVERAL_S)
        for name in names[first:] + names[:first]:
            try:
                answer = self.pop.lease(name, brokers[name], *wish, each_s, ordered=self.settings.ordered)
            except RaymqError as error:
                if not error.retryable:
                    raise
                failure = error
                for topic in brokers[name]:
                    self._routes.invalidate(topic)
                continue
            leased_s = time.monotonic()
            messages = self.pop.read(name, answer, subscriptions)
            if messages:
                if self._renewer is not None:
                    self._renewer.hold(messages, wish[1], leased_s)
                return messages, None
        return [], failure

    # Methods that acknowledge messages or change their invisible time

    def ack(self, messages: Iterable[ReceivedMessage]) -> int:
        """Acknowledge messages. Returns the number of messages that this call acknowledged. Blocks until the brokers
        have answered."""
        self.check_open()
        messages = list(messages)
        count = self.pop.ack(messages)
        self._settled(messages)
        return count

    def ack_handles(self, topic: str, handles: Iterable[str]) -> int:
        """Acknowledge messages by their handles (receipts as text). Blocks until the brokers have answered."""
        self.check_open()
        return self.pop.ack_handles(self.names.wrap(topic), handles)

    def change_invisible(
        self, messages: Iterable[ReceivedMessage], invisible_s: float | None, *, counted: bool = True
    ) -> list[ReceivedMessage]:
        """Set the time after which messages are delivered again; None: the group's retry intervals. Blocks until the
        brokers have answered. Returns the messages whose leases were renewed, with new receipts."""
        self.check_open()
        messages = list(messages)
        invisible_ms = None if invisible_s is None else round(invisible_s * 1000)
        renewed = self.pop.change_invisible(messages, invisible_ms, counted=counted)
        self._settled(messages)
        return renewed

    def change_invisible_handles(self, topic: str, handles: Iterable[str], invisible_s: float) -> list[str | None]:
        """Set the time after which messages are delivered again, by their handles. Blocks until the brokers have
        answered. Returns the new handles; None for a message that was acknowledged or delivered again."""
        self.check_open()
        return self.pop.change_invisible_handles(self.names.wrap(topic), handles, round(invisible_s * 1000))

    def extend_invisible(self, messages: Iterable[ReceivedMessage], invisible_s: float) -> list[bool]:
        """Keep messages invisible for a time from now, with their receipts. Blocks until the brokers have answered.
        Returns for each message whether it was still leased and not acknowledged."""
        self.check_open()
        return self.pop.extend_invisible(messages, round(invisible_s * 1000))

    def extend_invisible_handles(self, topic: str, handles: Iterable[str], invisible_s: float) -> list[bool]:
        """Keep messages invisible for a time from now, by their handles. Blocks until the brokers have answered.
        Returns for each handle whether its message was still leased and not acknowledged."""
        self.check_open()
        return self.pop.extend_invisible_handles(self.names.wrap(topic), handles, round(invisible_s * 1000))

    def _settled(self, messages: Iterable[ReceivedMessage]) -> None:
        """Renew these messages no more."""
        if self._renewer is not None:
            self._renewer.settle(parts_of(messages))

    # Methods that close the consumer

    def check_open(self) -> None:
        """Raise ClientStateError if the consumer was closed."""
        if self.closed:
            raise ClientStateError("this consumer is closed; create a new consumer with client.simple_consumer(...)")

    def close(self) -> None:
        """Close the consumer. A waiting receive ends within a few seconds. Idempotent."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if self._renewer is not None:
            self._renewer.close()
        self.pop.close()
        self._on_close(self)
