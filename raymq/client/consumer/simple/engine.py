"""SimpleEngine is the engine that the blocking and asyncio simple consumers share: the consumer's subscriptions, the
brokers from which it receives, and its state.

    receive → look at one broker after another → wait at all of them → leased ranges → messages from the storage actors

A simple consumer holds no queue and no position, and has no thread of its own, unless it renews leases. So its group
may have any number of members. The messages of a member that dies are delivered again after their invisible time.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Final, NamedTuple

from raymq.client.consumer.send_back import send_back_message
from raymq.client.consumer.simple.pop_calls import PopCalls
from raymq.client.consumer.simple.pop_steps import SETTLE_TIMEOUT_S
from raymq.client.consumer.simple.received_message import Receipt, ReceivedMessage, parts_of
from raymq.client.consumer.simple.renewal import RENEW_MAX_S, RENEWED_MIN_S, Renewer
from raymq.client.consumer.simple.settings import SimpleSettings
from raymq.client.consumer.simple.taken_messages import RECEIVE_MAX_BYTES
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import ClientStateError, InvalidArgumentError, RaymqError
from raymq.common.members.questions import DirectConsumption, RunningInfo, thread_stacks
from raymq.common.message import MessageExt, MessageModel
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.protocol.clients import ConsumerData
from raymq.common.retry import Backoff
from raymq.records.filters.sql import SqlFilter
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

RECEIVE_WAIT_S: Final = 5.0
"""Maximum time in s that one request waits at a broker (long poll). A receive of a closed consumer ends after this
time."""
NO_BROKER_PAUSE_S: Final = 1.0
"""Maximum time in s after which a receive looks for a broker again, if no broker can be asked."""

logger = logging.getLogger(__name__)


class _ReceiveLimits(NamedTuple):
    """The limits of a receive: the number of messages, their invisible time in ms, and about how many bytes of records
    to read of each broker's answer."""

    max_messages: int
    invisible_ms: int
    max_bytes: int


class SimpleEngine:
    """Engine of one simple consumer. Thread-safe: several threads may receive. `announce` is called with the consumer's
    description for administrators. `renew_max_s`: the time after a receive for which its messages are renewed, if the
    settings say that leases are renewed. `gives_up`: False if a message never becomes a dead letter by the number of
    its attempts, because the program decides that by itself (`send_back`)."""

    def __init__(
        self,
        settings: SimpleSettings,
        *,
        routes: RouteCache,
        storages: StorageClients,
        names: Namespace = NO_NAMESPACE,
        announce: Callable[[SimpleEngine, ConsumerData], None],
        on_close: Callable[[SimpleEngine], None],
        renew_max_s: float = RENEW_MAX_S,
        gives_up: bool = True,
    ) -> None:
        self.settings, self.names = settings, names
        self.pop = PopCalls(
            settings.group, routes=routes, storages=storages, names=names, start=settings.start, gives_up=gives_up
        )
        renews = settings.auto_renew
        self._renewer = Renewer(settings.group, self.pop.extend_once, renew_max_s) if renews else None
        self._routes, self._storages, self._announce, self._on_close = routes, storages, announce, on_close
        self._lock = threading.Lock()
        self._subscriptions: dict[str, Subscription] = {}
        self._turn = secrets.randbelow(1024)
        self._name = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self.closed = False

    # Methods that choose the topics to consume

    def subscribe(self, topic: str, expression: str | SqlFilter) -> None:
        """Subscribe to a topic. Blocks until the topic's route is known."""
        self.check_open()
        self.add(Subscription.parse(self.names.wrap(topic), expression))

    def add(self, subscription: Subscription) -> None:
        """Subscribe to the topic of a subscription, whose name has its namespace. Blocks until the topic's route is
        known."""
        topic = subscription.topic
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
        data = ConsumerData(
            self.settings.group, "POP", expressions, consume_from=where, member=self._name, consume_mode="share"
        )
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

    def receive(
        self, max_messages: int, invisible_s: float, wait_s: float, max_bytes: int = RECEIVE_MAX_BYTES
    ) -> list[ReceivedMessage]:
        """Receive up to `max_messages` messages, and about `max_bytes` of each broker. Blocks up to `wait_s` for the
        first message."""
        self.check_open()
        with self._lock:
            subscriptions = dict(self._subscriptions)
        if not subscriptions:
            raise ClientStateError("this consumer has no subscription; call subscribe(topic) before receive()")
        if self._renewer is not None and invisible_s < RENEWED_MIN_S:
            raise InvalidArgumentError(
                f"with auto_renew, invisible_s of a receive must be at least {RENEWED_MIN_S:g} s, not {invisible_s:g}"
            )
        wish = _ReceiveLimits(max_messages, round(invisible_s * 1000), max_bytes)
        deadline_s = time.monotonic() + wait_s
        backoff, ask = Backoff(), self._look
        while True:
            messages, errors = ask(wish, subscriptions, max(0.0, deadline_s - time.monotonic()))
            if messages or self.closed:
                return messages
            self.pop.report_reads()
            now_s = time.monotonic()
            if now_s >= deadline_s:
                if errors:
                    raise next(reversed(errors.values()))
                return messages
            ask = self._wait_at_all
            if errors:
                # Until the brokers that failed are asked again, a message may arrive at another broker.
                pause_s = min(backoff.next(), deadline_s - now_s)
                messages, _ = self._wait_at_all(wish, subscriptions, pause_s, without=errors)
                if messages or self.closed:
                    return messages
                time.sleep(max(0.0, now_s + pause_s - time.monotonic()))
                ask = self._look

    def _look(
        self, wish: _ReceiveLimits, subscriptions: Mapping[str, Subscription], wait_s: float
    ) -> tuple[list[ReceivedMessage], dict[str, RaymqError]]:
        """Request messages from the topics' brokers in turn, until one broker returns messages. Waits up to `wait_s`
        for messages only if the topics have one broker. If no broker returns any, also returns the errors of the
        brokers that could not be called."""
        brokers = self.pop.brokers_of(sorted(subscriptions))
        names = sorted(brokers)
        with self._lock:
            self._turn += 1
            first = self._turn % max(1, len(names))
        errors: dict[str, RaymqError] = {}
        each_s = min(wait_s, RECEIVE_WAIT_S) if len(names) == 1 else 0.0
        for name in names[first:] + names[:first]:
            try:
                answer = self.pop.lease(name, brokers[name], *wish[:2], each_s, ordered=self.settings.ordered)
            except RaymqError as error:
                self._check_retryable(error, brokers[name])
                errors[name] = error
                continue
            leased_s = time.monotonic()
            messages = self.pop.read(name, answer, subscriptions, wish.max_bytes)
            if messages:
                return self._held(messages, wish, leased_s), {}
        return [], errors

    def _wait_at_all(
        self,
        wish: _ReceiveLimits,
        subscriptions: Mapping[str, Subscription],
        wait_s: float,
        without: Container[str] = (),
    ) -> tuple[list[ReceivedMessage], dict[str, RaymqError]]:
        """Wait for messages at the topics' brokers at the same time. If several brokers return messages, the messages
        beyond the wanted number are visible to other members at once, and their attempt does not count. `without`: the
        brokers to leave out. Arguments and result otherwise as in `_look`."""
        topics = self.pop.brokers_of(sorted(subscriptions))
        brokers = {name: own for name, own in topics.items() if name not in without}
        if not brokers:
            time.sleep(min(wait_s, NO_BROKER_PAUSE_S))
            return [], {}
        each_s = min(wait_s, RECEIVE_WAIT_S)
        answers = self.pop.lease_at_all(brokers, *wish[:2], each_s, ordered=self.settings.ordered)
        leased_s = time.monotonic()
        messages: list[ReceivedMessage] = []
        errors: dict[str, RaymqError] = {}
        for name, answer in answers.items():
            try:
                if isinstance(answer, RaymqError):
                    raise answer
                messages += self.pop.read(name, answer, subscriptions, wish.max_bytes)
            except RaymqError as error:
                errors[name] = error
        wanted, surplus = messages[: wish.max_messages], messages[wish.max_messages :]
        if surplus:
            self._give_back(surplus)
        if not wanted:
            for name, failure in errors.items():
                self._check_retryable(failure, brokers[name])
        return self._held(wanted, wish, leased_s), errors

    def _check_retryable(self, error: RaymqError, topics: Iterable[str]) -> None:
        """Raise an error that a later call would raise again. After another error, the routes of `topics` may be
        old."""
        if not error.retryable:
            raise error
        for topic in topics:
            self._routes.invalidate(topic)

    def _held(self, messages: list[ReceivedMessage], wish: _ReceiveLimits, leased_s: float) -> list[ReceivedMessage]:
        """Return messages, and renew their leases from now on if the consumer does so."""
        if messages and self._renewer is not None:
            self._renewer.hold(messages, wish.invisible_ms, leased_s)
        return messages

    def _give_back(self, messages: list[ReceivedMessage]) -> None:
        """Make messages visible at once that the caller of a receive does not get."""
        try:
            self.pop.change_invisible(messages, 0, counted=False)
        except RaymqError as error:
            logger.info("%d messages are delivered again after their invisible time: %s", len(messages), error)

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

    def dead_letter(self, message: ReceivedMessage, attempts: int, failure: str) -> bool:
        """Store a message as a dead letter of the group, and acknowledge it. `attempts`: the number of failed
        deliveries. `failure`: why the message failed. Blocks until the broker has answered. Returns False without
        storing a letter if the message was acknowledged or delivered again. Errors as of AsyncPopCalls.dead_letter."""
        self.check_open()
        receipt = message._receipt
        stored = self.pop.dead_letter(receipt.topic, receipt.handle(message.queue_offset), attempts, failure)
        self.release([message])
        return stored

    def send_back(self, message: MessageExt, delay_level: int, max_reconsume_times: int) -> None:
        """Send a message back to the group's retry topic, or to the dead letters, as PullConsumer.send_back does. The
        message must still be acknowledged. Blocks for remote calls."""
        self.check_open()
        queue = self.names.queue(message.queue)
        retries = {"delay_level": delay_level, "max_reconsume_times": max_reconsume_times}
        send_back_message(self.settings.group, message, queue, self._routes, self._storages, **retries)

    def release(self, messages: Iterable[ReceivedMessage]) -> None:
        """Renew these messages no more. Messages that are not acknowledged are delivered again after their lease."""
        self._settled(messages)

    def valid_until_s(self, receipt: Receipt) -> float:
        """Return when a renewed lease ends if it is not renewed again, a time of `time.monotonic`'s clock; 0 if the
        consumer does not renew the lease."""
        return 0.0 if self._renewer is None else self._renewer.valid_until_s(receipt)

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
