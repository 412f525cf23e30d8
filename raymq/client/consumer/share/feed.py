"""ShareFeed is one share-mode instance of a push consumer, in the process of its listener.

    thread share-receive   waits for room, receives at all brokers, starts the listener's calls (ConsumePool)
    thread share-report    reads ended calls and gives up late ones; keeps calls from beginning after their lease
    threads settle-BROKER  acknowledge, and make messages visible again (raymq.client.consumer.share.settler)

The listener's process receives by itself: no Pull actor takes part, and nothing must agree who owns a queue. So the
instances of a group need no rebalance, may outnumber the queues, and one more instance gets messages at once. The
leases work as for simple consumers: SimpleEngine receives, renews and settles them, and LeasedTasks decides about each
message.

All state is lost with the process. Its messages are delivered again after `invisible_s`. A stop returns the messages
that no listener call has begun; their attempt does not count.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from raymq.client.consumer.push.answers import Replier
from raymq.client.consumer.push.consume_pool import Handler
from raymq.client.consumer.push.consume_request import ConsumeRequest
from raymq.client.consumer.push.hook import ConsumeHook
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.push.task_feed import call_directly, lists_of, pool_of, with_original_topic
from raymq.client.consumer.share.connection import ShareConnection
from raymq.client.consumer.share.leased_tasks import Later, LeasedTask, LeasedTasks, Settlement
from raymq.client.consumer.share.prefetch import Prefetch, Room
from raymq.client.consumer.share.settler import Settler
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.common.members.questions import DirectConsumption, RunningInfo, thread_stacks
from raymq.common.message import MessageExt
from raymq.common.names import RETRY_PREFIX
from raymq.common.namespaces import Namespace
from raymq.common.parallel import require_daemon
from raymq.common.protocol.clients import ConsumerData
from raymq.common.retry import Backoff
from raymq.records.format.decode import decode_record
from raymq.records.format.layout import RecordError
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES, ConsumerFigures
from raymq.telemetry.trace.deliveries import DeliveryTrace

SHARE_WAIT_S: Final = 2.0
"""Maximum time in s that a receive waits at the brokers. A stop may have to wait as long."""
SHARE_REPORT_S: Final = 0.1
"""Interval in s at which the ended calls of an unfinished task are read."""
SHARE_IDLE_S: Final = 0.5
"""Maximum time in s that the reporting thread sleeps while no call runs."""
SHARE_RETRY_MAX_S: Final = 5.0
"""Maximum pause in s after a receive that failed."""
SHARE_FINISH_S: Final = 30.0
"""Maximum time in s that a stop waits for listener calls and for brokers."""

logger = logging.getLogger(__name__)


class ShareFeed:
    """One share-mode instance. Thread-safe. `connect`: makes the instance's connection to the brokers, given its
    settings; it may raise RaymqError, and is then called again."""

    def __init__(
        self,
        handler: Handler,
        settings: PushSettings,
        name: str,
        *,
        takes_batch: bool,
        hooks: Sequence[ConsumeHook] = (),
        replier: Replier | None = None,
        trace: DeliveryTrace | None = None,
        connect: Callable[[PushSettings], ShareConnection] = ShareConnection.open,
    ) -> None:
        self._settings, self._name, self._names = settings, name, Namespace(settings.namespace)
        self._takes_batch, self._connect = takes_batch, connect
        at_once = settings.threads * settings.consume_message_batch_max_size
        prefetch = Prefetch(at_once, settings.prefetch_messages, settings.prefetch_mib << 20)
        self._news = threading.Event()
        """Event that is set if the reporting thread may have something to read."""
        self._pool = pool_of(settings, handler, self._news.set, hooks=hooks, replier=replier, trace=trace)
        self._changed = threading.Condition()
        """Condition that guards the attributes below."""
        self._tasks = LeasedTasks(prefetch, ordered=settings.orderly)
        self._running: dict[ConsumeRequest, LeasedTask] = {}
        self._settlers: dict[str, Settler] = {}
        self._connection: ShareConnection | None = None
        self._begun = self._stopping = self._suspended = False
        self._last_error = self._trouble = ""
        self._stuck = 0
        self._connected = threading.Event()
        self._received = threading.Event()
        """Event that is set when no further receive begins."""
        self._stopped = threading.Event()

    # Methods that the program calls, through the Listener actor

    def begin(self, wait_s: float) -> bool:
        """Start to receive, unless the instance has started. Returns True if the instance is connected within
        `wait_s`."""
        with self._changed:
            first, self._begun = not self._begun, True
        if first:
            require_daemon(self._receive_all, name="share-receive", what="a share-mode consumer")
        return self._connected.wait(wait_s)

    def suspend(self, *, suspended: bool) -> None:
        """Receive no further messages, or receive again. Running listener calls end; messages that wait for a thread
        are consumed, too."""
        with self._changed:
            self._suspended = suspended
            self._changed.notify_all()

    def stop(self, wait_s: float) -> bool:
        """Stop the instance: let running listener calls end, settle their messages, and return all other messages to
        the brokers. Returns False if that takes longer than `wait_s`; it then continues, and the call may be repeated.
        """
        with self._changed:
            first, self._stopping = not self._stopping, True
            requests = list(self._running)
            self._changed.notify_all()
        if first:
            for request in requests:
                self._pool.cancel(request)
            self._news.set()
            require_daemon(self._finish, name="share-stop", what="the stop of a share-mode consumer")
        return self._stopped.wait(wait_s)

    def status(self) -> dict[str, Any]:
        """Return the fields of the instance's InstanceStatus, by name (raymq.client.consumer.push.subscription). An
        instance in share mode has no queues."""
        with self._changed:
            return {
                "instance": self._name,
                "holding": (),
                "buffered": self._tasks.held,
                "consumed": self._tasks.consumed,
                "failures": self._tasks.failures,
                "last_error": self._last_error,
                "skipped": 0,
                "last_skipped": "",
                "suspended": self._suspended,
                "listener_deaths": 0,
                "listener_away": "" if self._connected.is_set() else self._trouble or "the instance is starting",
                "listener_silent_s": 0.0,
                "stuck_threads": self._stuck,
                "queues": (),
                "stats": {},
            }

    # Methods that answer administrators' queries

    def running_info(self, client_id: str, host: str, *, stacks: bool) -> RunningInfo:
        """Return the instance's state (raymq.common.members.questions.Answers)."""
        settings, status = self._settings, self.status()
        return RunningInfo(
            *(client_id, host, os.getpid(), self._name, settings.group, "PUSH", settings.message_model.value),
            settings.expressions,
            consumed=status["consumed"],
            failures=status["failures"],
            suspended=status["suspended"],
            trouble=self._trouble or status["last_error"],
            listener_pid=os.getpid(),
            stacks=thread_stacks() if stacks else (),
        )

    def consume_directly(self, client_id: str, record: bytes, broker_name: str) -> DirectConsumption:
        """Call the listener with one message that an administrator has chosen. Nothing is acknowledged. Raises
        InvalidArgumentError if the record cannot be read."""
        try:
            message = decode_record(record, broker_name=broker_name)
        except RecordError as error:
            raise InvalidArgumentError(f"the message cannot be read: {error}") from None
        outcome = call_directly(self._pool, message, self._names, takes_batch=self._takes_batch)
        return DirectConsumption(client_id, self._name, *outcome)

    def call_for_request(self, message: MessageExt, replier: Replier) -> tuple[str, str, float]:
        """Call the listener with a request that is not stored. `replier` gets the listener's reply. Returns the outcome
        as ConsumePool.call_directly."""
        return self._pool.call_directly([message] if self._takes_batch else message, replier)

    def description(self) -> ConsumerData:
        """Return the description of the instance, which administrators see."""
        settings = self._settings
        return ConsumerData(
            *(settings.group, "PUSH", settings.expressions, settings.message_model, settings.start.where, self._name),
            consume_mode="share",
        )

    # Methods of the thread that receives

    def _receive_all(self) -> None:
        try:
            connection = self._opened()
            if connection is not None:
                connection.announce(self, self.description())
                CLIENT_FIGURES.add(self, self._figures)
                require_daemon(self._report_all, connection, name="share-report", what="a share-mode consumer")
                self._connected.set()
                self._receive(connection)
        finally:
            self._received.set()

    def _opened(self) -> ShareConnection | None:
        """Connect, and repeat this while it fails. Returns None if the instance is stopped before."""
        backoff = Backoff(max_s=SHARE_RETRY_MAX_S)
        while not self._stopping:
            try:
                connection = self._connect(self._settings)
            except RaymqError as error:
                self._trouble = f"the instance cannot connect: {error}"
                logger.warning("instance %s cannot connect, retrying: %s", self._name, error)
                self._pause(backoff.next())
            else:
                self._trouble = ""
                with self._changed:
                    self._connection = connection
                return connection
        return None

    def _receive(self, connection: ShareConnection) -> None:
        backoff = Backoff(max_s=SHARE_RETRY_MAX_S)
        while not self._stopping:
            room = self._wait_for_room()
            if not room.messages:
                continue
            try:
                messages = connection.engine.receive(
                    room.messages, self._settings.invisible_s, SHARE_WAIT_S, room.size_bytes
                )
                if messages:
                    self._begin(connection, messages)
                self._trouble = ""
                backoff.reset()
            except RaymqError as error:
                self._trouble = f"no messages can be received: {error}"
                logger.info("instance %s cannot receive messages now, retrying: %s", self._name, error)
                self._pause(max(backoff.next(), min(error.retry_after_s or 0.0, SHARE_RETRY_MAX_S)))
            except Exception:  # a bug: if this thread ended, the listener would never be called again
                logger.exception("instance %s cannot receive messages now, retrying", self._name)
                self._pause(backoff.next())

    def _wait_for_room(self) -> Room:
        """Wait until messages may be received. Returns how many; none if the instance is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or (not self._suspended and self._tasks.room().messages))
            return Room(0, 0) if self._stopping else self._tasks.room()

    def _pause(self, pause_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, pause_s)

    def _begin(self, connection: ShareConnection, messages: list[ReceivedMessage]) -> None:
        """Start the listener's calls for received messages. Messages that arrive during a stop or a suspension go back
        to their brokers, and their attempt does not count."""
        with self._changed:
            tasks = self._tasks.leased(messages)
            if returned := self._stopping or self._suspended:
                for task in tasks:
                    later = Later(tuple(task.messages), 0, counted=False)
                    self._settle(connection, task, Settlement(later=[later], size_bytes=task.size_bytes))
        for task in () if returned else tasks:
            request = self._request_of(task)
            with self._changed:
                self._running[request] = task
                stopping = self._stopping
            self._pool.submit(request)
            self._pool.hold(request, self._valid_until_s(connection, task))
            if stopping:
                self._pool.cancel(request)
        self._news.set()

    def _request_of(self, task: LeasedTask) -> ConsumeRequest:
        shown = [self._shown(message) for message in task.messages]
        topic = task.messages[0]._receipt.topic
        firsts: Sequence[int] = range(len(shown))
        if not self._takes_batch:
            return ConsumeRequest(shown, firsts, task.key, topic=topic)
        lists, starts = lists_of(shown, firsts, self._settings.consume_message_batch_max_size)
        return ConsumeRequest(lists, starts, task.key, topic=topic, of_lists=True)

    def _shown(self, message: ReceivedMessage) -> MessageExt:
        """Return a message as the listener gets it: with its original topic, and with `reconsume_times` as the number
        of earlier deliveries, as in the mode "queue"."""
        shown: MessageExt = message
        if message._receipt.topic.startswith(RETRY_PREFIX):
            shown = self._names.shown_message(with_original_topic(message))
        tried = message.attempt - 1
        return shown if tried == shown.reconsume_times else replace(shown, reconsume_times=tried)

    # Methods of the thread that reports

    def _report_all(self, connection: ShareConnection) -> None:
        while not self._stopped.is_set():
            try:
                next_s = self._pool.look()
                self._news.wait(min(next_s, SHARE_REPORT_S if self._running else SHARE_IDLE_S))
                self._news.clear()
                self._report(connection)
            except Exception:  # a bug: if this thread ended, no message would be acknowledged
                logger.exception("instance %s cannot read the results of its listener, retrying", self._name)
                self._stopped.wait(SHARE_IDLE_S)

    def _report(self, connection: ShareConnection) -> None:
        """Read the ended calls of all running tasks, and settle their messages."""
        with self._changed:
            running = list(self._running.items())
        for request, task in running:
            report = self._pool.report(request)
            with self._changed:
                settlement = self._tasks.reported(task, report, time.monotonic())
                self._stuck = report.stuck
                if report.failures:
                    self._last_error = report.failures[-1].error
                elif settlement.acks:
                    self._last_error = ""
                if report.ended:
                    del self._running[request]
                if settlement.count:
                    self._settle(connection, task, settlement)
            if not report.ended:
                self._pool.hold(request, self._valid_until_s(connection, task))

    def _settle(self, connection: ShareConnection, task: LeasedTask, settlement: Settlement) -> None:
        """Pass a settlement to the settler of the task's broker. The caller holds the condition."""
        broker_name = task.messages[0]._receipt.broker_name
        settler = self._settlers.get(broker_name)
        if settler is None:
            settler = self._settlers[broker_name] = Settler(broker_name, connection.engine, self._settled)
        settler.put(settlement)

    def _settled(self, count: int, size_bytes: int) -> None:
        with self._changed:
            self._tasks.settled(count, size_bytes)
            self._changed.notify_all()

    @staticmethod
    def _valid_until_s(connection: ShareConnection, task: LeasedTask) -> float:
        """Return the time after which no further call of a task may begin: the earliest end of its leases."""
        receipts = {id(one): one for one in [task.messages[index]._receipt for index in task.running]}
        return min([connection.engine.valid_until_s(one) for one in receipts.values()], default=float("inf"))

    def _figures(self) -> list[ConsumerFigures]:
        with self._changed:
            tasks = list(self._running.values())
        group = self._settings.group
        return [
            ConsumerFigures(
                task.messages[0]._receipt.topic,
                group,
                inflight=len(task.running),
                cached=len(task.running),
                cached_bytes=task.size_bytes,
            )
            for task in tasks
        ]

    # Methods that stop the instance

    def _finish(self) -> None:
        deadline_s = time.monotonic() + SHARE_FINISH_S
        try:
            self._received.wait(SHARE_FINISH_S if self._begun else 0.0)
            with self._changed:
                while (self._running or not self._all_idle()) and time.monotonic() < deadline_s:
                    self._changed.wait(SHARE_REPORT_S)
                settlers, connection = list(self._settlers.values()), self._connection
            for settler in settlers:
                settler.close()
            CLIENT_FIGURES.remove(self)
            if connection is not None:
                connection.close(self)
        except RaymqError as error:
            logger.warning("instance %s cannot close its connection: %s", self._name, error)
        finally:
            self._stopped.set()

    def _all_idle(self) -> bool:
        return all(settler.idle for settler in self._settlers.values())
