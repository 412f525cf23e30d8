"""TaskFeed receives tasks from the Pull actor, runs the listener on their messages, and reports the results.

    receiving thread   asks for the next tasks and reads them; a pool's threads make the calls (ConsumePool)
    reporting thread   gives up late calls; reports ended tasks together, and a task that takes longer than
                       REPORT_S in parts

The TaskFeed calls the Pull actor, never the reverse, so the Pull actor waits for no Listener. Each time that a Pull
actor starts the instance, the epoch increases. A task of a later epoch cancels all tasks of earlier epochs, because no
Pull actor needs them any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from raymq.client.consumer.push.answers import Replier
from raymq.client.consumer.push.consume_pool import JOIN_AFTER_S, ConsumePool, Handler
from raymq.client.consumer.push.consume_request import ConsumeRequest
from raymq.client.consumer.push.feed_client import TaskReport
from raymq.client.consumer.push.hook import ConsumeHook
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.push.task_reader import TaskReader
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import BodyUnreadableError, RaymqError
from raymq.common.message import PROPERTY_RETRY_TOPIC, MessageExt
from raymq.common.names import RETRY_PREFIX
from raymq.common.namespaces import Namespace
from raymq.common.protocol.consume_result import ConsumeReport, Failure, ShippedTask, TaskBatch
from raymq.telemetry.trace.deliveries import DeliveryTrace

REPORT_S: Final = 0.5
"""Interval in s at which an unfinished task is reported. Each report has the messages that were finished since the last
report."""
FEED_IDLE_S: Final = 0.5
"""Maximum time in s that the reporting thread sleeps."""
AWAKE_S: Final = 0.2
"""Time in s after a report, during which the reporting thread checks for new tasks every JOIN_AFTER_S instead of
sleeping longer. A task that begins in this time need not wake the thread."""
FEED_RETRY_S: Final = 0.3
"""Pause in s after a failed call to the Pull actor."""
FEED_PAUSE_MAX_S: Final = 5.0
"""Maximum pause in s after a request was refused because a quota is used up. The quota's error names the time
to wait."""

logger = logging.getLogger(__name__)


class Feed(Protocol):
    """Interface of the calls to the Pull actor (raymq.client.consumer.push.feed_client)."""

    def next_tasks(self, epoch: int, got: int) -> TaskBatch:
        """Return the next task batch from the Pull actor: the batch after batch number `got` of epoch `epoch`. A new
        epoch begins each time the push-consumer instance starts at a Pull actor. Raises RaymqError if the call fails.
        """

    def report(self, epoch: int, reports: Sequence[TaskReport]) -> None:
        """Report to the Pull actor the progress of tasks that it sent in `epoch`. Raises RaymqError if the call
        fails."""


class TaskFeed:
    """The tasks of one listener process. The listener `handler` is called with single messages, or with lists of
    messages if `takes_batch` is true."""

    def __init__(
        self,
        handler: Handler,
        settings: PushSettings,
        *,
        takes_batch: bool,
        hooks: Sequence[ConsumeHook] = (),
        replier: Replier | None = None,
        trace: DeliveryTrace | None = None,
    ) -> None:
        self._settings, self._names = settings, Namespace(settings.namespace)
        self._takes_batch = takes_batch
        self._news = threading.Event()
        """Event that is set if the reporting thread may have something to report."""
        self._closed = threading.Event()
        self._asleep = False
        """True while the reporting thread is in a long sleep. If a new task arrives, the thread must then be
        woken."""
        self._pool = pool_of(settings, handler, self._news.set, hooks=hooks, replier=replier, trace=trace)
        self._reader = TaskReader()
        self._lock = threading.Lock()
        """Guards the attributes about the current epoch: its number, its last batch, its tasks and their
        reports."""
        self.epoch = 0
        """Latest epoch from which a task was received. Each start of the instance at a Pull actor has a new
        epoch."""
        self.got = 0
        """Number of the last task batch that was received in the current epoch."""
        self._requests: dict[int, ConsumeRequest] = {}
        """Tasks of the current epoch, by task number, whose end is not reported yet."""
        self._reported_s: dict[int, float] = {}
        """For each task, the time of its last report. Before the first report, it is the time at which the task
        started."""
        self._not_begun: list[TaskReport] = []
        """Reports, not yet sent, about tasks that this process received but could not start."""

    def start(self, feed: Feed, ready: Callable[[float], object]) -> None:
        """Start to take tasks from `feed`. `ready(wait_s)` is called before each request for tasks. It waits for a Pull
        actor that hosts the push-consumer instance, for at most `wait_s`. Its result is true if such a Pull actor was
        found in this time."""
        for name, run in (("tasks", lambda: self._receive(feed, ready)), ("reports", lambda: self._report(feed))):
            threading.Thread(target=run, name=name, daemon=True).start()

    def consume_directly(self, message: MessageExt) -> tuple[str, str, float]:
        """Call the listener with one message that belongs to no task (see ConsumePool.call_directly)."""
        return call_directly(self._pool, message, self._names, takes_batch=self._takes_batch)

    def call_for_request(self, message: MessageExt, replier: Replier) -> tuple[str, str, float]:
        """Call the listener with a request that is not stored. `replier` gets the listener's reply. Returns the outcome
        as ConsumePool.call_directly."""
        return self._pool.call_directly([message] if self._takes_batch else message, replier)

    def close(self) -> None:
        """Stop taking tasks and reporting. Running listener calls continue."""
        self._closed.set()
        self._news.set()

    # Methods that start the tasks of a received batch

    def begin(self, batch: TaskBatch) -> None:
        """Begin the tasks of a task batch. Does nothing if the batch was already received."""
        with self._lock:
            if batch.epoch > self.epoch:
                left, self._requests, self._reported_s = self._requests, {}, {}
                self._not_begun.clear()
                self.epoch, self.got = batch.epoch, 0
                for request in left.values():
                    self._pool.cancel(request)
            if batch.epoch < self.epoch or batch.number <= self.got:
                return
            self.got = batch.number
        for task in batch.tasks:
            self._begin_task(task)
        if self._asleep:
            self._news.set()

    def _begin_task(self, task: ShippedTask) -> None:
        if task.number in self._requests:
            # This task already runs. The Pull actor sends a task again if it receives the same report of unreadable
            # records twice. Ignore the repeated task.
            return
        failure = ""
        try:
            request = self._consume_request(task)
        except Exception as error:  # catch unreadable records and bugs, so that later tasks need not wait for this task
            logger.exception("cannot begin a task of queue %s", task.queue)
            request, failure = None, f"the messages cannot be read: {error!r}"
        with self._lock:
            if request is not None:
                self._requests[task.number] = request
                self._reported_s[task.number] = time.monotonic()
            elif failure:
                self._not_begun.append((task.number, ConsumeReport(failures=(Failure(0, task.count, failure),))))
            else:
                self._not_begun.append((task.number, ConsumeReport(ended=False, unread=True)))
        if request is not None:
            self._pool.submit(request)
        else:
            self._news.set()

    def _consume_request(self, task: ShippedTask) -> ConsumeRequest | None:
        """Create the listener calls of a task. A message gets no call if its tag is not subscribed: the task can
        contain such messages, because different tags can have the same hash code. Returns None if this process cannot
        read the task's records."""
        read = self._reader.messages(task)
        if read is None:
            return None
        messages, damaged = read
        settings, retry = self._settings, task.queue.topic.startswith(RETRY_PREFIX)
        subscription = settings.subscription(task.queue.topic)
        key = str(task.queue) if settings.orderly else None
        firsts: Sequence[int] = range(len(messages))
        if subscription.tags:
            firsts = [i for i in firsts if _is_wanted(messages[i], subscription)]
            messages = [messages[i] for i in firsts]
        if retry:
            messages = [m if isinstance(m, BodyUnreadableError) else with_original_topic(m) for m in messages]
        if self._names:
            messages = [m if isinstance(m, BodyUnreadableError) else self._names.shown_message(m) for m in messages]
        if not self._takes_batch:
            return ConsumeRequest(messages, firsts, key, damaged=damaged, topic=task.queue.topic)
        lists, starts = lists_of(messages, firsts, settings.consume_message_batch_max_size)
        return ConsumeRequest(lists, starts, key, damaged=damaged, topic=task.queue.topic, of_lists=True)

    # Methods that report results

    def take_reports(self) -> tuple[int, list[TaskReport]]:
        """Return the epoch of the tasks, and the reports that are due. A report is due for each ended task, and for
        each running task that was not reported for REPORT_S."""
        now_s = time.monotonic()
        with self._lock:
            reports, self._not_begun = self._not_begun, []
            for number, request in list(self._requests.items()):
                if request.done.is_set():
                    del self._requests[number], self._reported_s[number]
                elif now_s - self._reported_s[number] < REPORT_S:
                    continue
                else:
                    self._reported_s[number] = now_s
                reports.append((number, self._pool.report(request)))
            return self.epoch, reports

    def look(self) -> float:
        """Call ConsumePool.look: it gives up listener calls that exceed their timeout, and lets more threads help with
        long requests. Returns the time in s until the next check is due."""
        next_s = self._pool.look()
        return min(next_s, REPORT_S) if self._requests else next_s

    def heard(self) -> None:
        """Renew the leases of the tasks in this Listener process. Called after each answer of the Pull actor: the
        answer shows that this actor still hosts the push-consumer instance to which the tasks belong."""
        self._pool.renew_leases()

    # The loops of the two threads: the thread that receives tasks, and the thread that reports finished messages

    def _receive(self, feed: Feed, ready: Callable[[float], object]) -> None:
        while not self._closed.is_set():
            if not ready(FEED_IDLE_S):
                continue
            try:
                self.begin(feed.next_tasks(self.epoch, self.got))
            except RaymqError as error:
                logger.info("cannot receive tasks from the Pull actor, retrying: %s", error)
                self._closed.wait(max(FEED_RETRY_S, min(error.retry_after_s or 0.0, FEED_PAUSE_MAX_S)))
            except Exception:  # catch bugs: if this thread ended, the listener would never be called again
                logger.exception("cannot receive tasks from the Pull actor, retrying")
                self._closed.wait(FEED_RETRY_S)

    def _report(self, feed: Feed) -> None:
        epoch, reports, awake_until_s = 0, list[TaskReport](), 0.0
        while not self._closed.is_set():
            try:
                pause_s = min(self.look(), FEED_IDLE_S)
                if pause_s > JOIN_AFTER_S and time.monotonic() < awake_until_s:
                    pause_s = JOIN_AFTER_S
                self._asleep = pause_s > JOIN_AFTER_S
                self._news.wait(FEED_RETRY_S if reports else pause_s)
                self._asleep = False
                self._news.clear()
                now_epoch, more = self.take_reports()
                reports = [*reports, *more] if now_epoch == epoch else more
                epoch = now_epoch
                if reports:
                    feed.report(epoch, reports)
                    self.heard()
                    reports, awake_until_s = [], time.monotonic() + AWAKE_S
            except RaymqError as error:
                logger.info("cannot report consumed messages to the Pull actor, retrying: %s", error)
            except Exception:  # catch bugs: if this thread ended, no message would be committed
                logger.exception("cannot report consumed messages to the Pull actor, retrying")
                self._closed.wait(FEED_RETRY_S)


def pool_of(
    settings: PushSettings,
    handler: Handler,
    on_done: Callable[[], None],
    *,
    hooks: Sequence[ConsumeHook],
    replier: Replier | None,
    trace: DeliveryTrace | None,
) -> ConsumePool:
    """Make the pool that calls the listener of a push consumer with these settings."""
    return ConsumePool(
        handler,
        threads=settings.threads,
        timeout_s=settings.consume_timeout_s,
        group=settings.group,
        shown_group=Namespace(settings.namespace).unwrap(settings.group),
        hooks=hooks,
        replier=replier,
        trace=trace,
        on_done=on_done,
    )


def call_directly(
    pool: ConsumePool, message: MessageExt, names: Namespace, *, takes_batch: bool
) -> tuple[str, str, float]:
    """Call the listener with a message that an administrator has chosen, as the listener would get it (see
    ConsumePool.call_directly)."""
    wanted = with_original_topic(message) if message.topic.startswith(RETRY_PREFIX) else message
    wanted = names.shown_message(wanted)
    return pool.call_directly([wanted] if takes_batch else wanted)


def lists_of(messages: Sequence[Any], firsts: Sequence[int], size: int) -> tuple[list[Any], list[int]]:
    """Group messages into lists of up to `size` consecutive messages of the task. Also returns the task index of each
    list's first message."""
    if isinstance(firsts, range) and not any(isinstance(message, BodyUnreadableError) for message in messages):
        return [messages[i : i + size] for i in range(0, len(messages), size)], list(range(0, len(messages), size))
    lists: list[Any] = []
    starts: list[int] = []
    for message, index in zip(messages, firsts, strict=True):
        last = lists[-1] if lists else None
        if isinstance(message, BodyUnreadableError):
            lists.append(message)
        elif isinstance(last, list) and len(last) < size and index == starts[-1] + len(last):
            last.append(message)
            continue
        else:
            lists.append([message])
        starts.append(index)
    return lists, starts


def _is_wanted(message: MessageExt | BodyUnreadableError, subscription: Subscription) -> bool:
    return isinstance(message, BodyUnreadableError) or subscription.matches(message.tags)


def with_original_topic(message: MessageExt) -> MessageExt:
    """Return a message of a retry topic with the message's original topic as its topic (spec/messaging.md
    §5.8)."""
    topic = message.system_properties.get(PROPERTY_RETRY_TOPIC)
    return message if topic is None else replace(message, topic=topic)
