"""Delivers an instance's tasks to its Listener, receives the reports, and sends failed messages back.

    FeedThread   one for all instances of a Pull actor: the thread of the lanes on which Listeners ask for tasks and
                 report about them; it gives each feed its turn when it has something to do
    ListenerFeed one per instance: tasks that are due answer the Listener's question for tasks

On the store's node a task names positions in the store's memory-mapped files, and the Listener reads the records
itself. On other nodes, or if the Listener cannot read the files, the task has the records' bytes.

The Listener calls about every HOST_INTERVAL_S (raymq.client.consumer.push.hosting). So the feed detects a new process
of the Listener at that process's first call. If the Listener's lane (direct socket connection) breaks, the feed calls
the Listener. If the Listener's process has ended, no task is delivered until the Listener calls again. Calls that send
messages back to brokers have a few separate threads, because a broker may be slow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from ray.exceptions import RayActorError

from actors.access.authenticated_server import lane_guard, lane_meter, lane_users
from actors.core.access.meter import ReadLimit
from actors.core.consume.consume_service import Reaction, SendBack
from actors.core.consume.process_queue import ConsumeTask
from actors.core.consume.process_queues import PauseState
from actors.pull.instance_state import InstanceState
from actors.pull.tasks_in_flight import TasksInFlight
from raymq.client.consumer.push.feed_client import NEXT_WAIT_S, TaskReport
from raymq.client.consumer.push.hosting import HOST_INTERVAL_S
from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.common.parallel import submit
from raymq.common.protocol.consume_result import ConsumeReport
from raymq.remoting.actor_ref import DEAD_FOR_GOOD, HandleRef
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.calls import ControlCalls, encode_result
from raymq.remoting.lane.connection import LaneRequest
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane.loop import Timer
from raymq.remoting.lane.server import LaneServer
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES

IDLE_WAIT_S: Final = 0.5
SILENT_AFTER_S: Final = 3 * HOST_INTERVAL_S
"""If a Listener has not called for this many seconds, its ListenerFeed calls the Listener, because it may have ended
permanently."""
KEEP_TIMEOUT_S: Final = 5.0
SEND_BACK_MAX_BYTES: Final = 4 << 20
STARTING: Final = "the listener's process is starting"

logger = logging.getLogger(__name__)

SendBackCall = Callable[[str, bytes, int, int, str, str], None]
"""Function that sends records back to a broker. Its arguments: broker name, records, delay level, maximum reconsume
times, the reason why the messages cannot be read (or empty), and the reason why they failed. Raises RaymqError if the
broker did not accept the records."""


class _LaneUser:
    """The Listener's process at the other end of a lane (direct socket connection). Known after the process has
    requested tasks."""

    def __init__(self) -> None:
        self.feed: ListenerFeed | None = None
        self.life = ""

    def close(self) -> None:
        """Notify the Listener's ListenerFeed that the lane (direct socket connection) has closed."""
        if self.feed is not None:
            self.feed.lane_closed(self.life)


class FeedThread:
    """The thread that calls `take_turn` of each ListenerFeed, which delivers tasks. It also serves the lanes (direct
    socket connections) of the feeds' Listeners. Thread-safe."""

    def __init__(self, host: str) -> None:
        """`host`: the IP address of this node, for Listeners on other nodes."""
        self._host = host
        self._lock = threading.Lock()
        """Lock that guards the attributes `_feeds` and `_woken`."""
        self._feeds: dict[str, ListenerFeed] = {}
        self._woken: set[ListenerFeed] = set()
        self._timer: Timer | None = None
        """The timer for the next call of a ListenerFeed's `take_turn`. Only the feed thread uses the timer."""
        self._timer_s = float("inf")
        calls = ControlCalls(
            {}, _no_methods, {"next_tasks": self._next_tasks, "report": self._report}, guard=lane_guard()
        )
        self._meter = lane_meter()
        self._server = LaneServer("pull", {FrameKind.CALL: calls}, contexts=_LaneUser, users=lane_users())
        self._loop = self._server.loop

    @property
    def address(self) -> LaneAddress:
        """The address to which Listeners connect (LaneServer.open_to_nodes)."""
        return self._server.open_to_nodes(self._host)

    def add(self, feed: ListenerFeed) -> None:
        """Add a ListenerFeed. From now on this thread calls the feed's `take_turn`."""
        with self._lock:
            self._feeds[feed.name] = feed
        self.wake(feed)

    def remove(self, feed: ListenerFeed) -> None:
        """Remove a ListenerFeed, so that this thread no longer runs its turns."""
        with self._lock:
            if self._feeds.get(feed.name) is feed:
                del self._feeds[feed.name]

    def wake(self, feed: ListenerFeed) -> None:
        """Schedule a turn of a ListenerFeed as soon as possible."""
        with self._lock:
            first = not self._woken
            self._woken.add(feed)
        if first:
            self._loop.call_soon(self._run_woken)

    def feed(self, name: str) -> ListenerFeed:
        """Return the ListenerFeed of an instance. Raises ServiceNotAvailableError if this Pull actor does not host the
        instance."""
        with self._lock:
            feed = self._feeds.get(name)
        if feed is None:
            raise ServiceNotAvailableError(f"instance {name} is not hosted by this Pull actor now; retry later")
        return feed

    def close(self) -> None:
        """Close all lanes (direct socket connections), and stop the thread."""
        self._server.close()

    def _run_woken(self) -> None:
        with self._lock:
            woken, self._woken = self._woken, set()
        for feed in woken:
            feed.take_turn()
        self._look_again(min((feed.next_turn_s for feed in woken), default=float("inf")))

    def _run_due(self) -> None:
        self._timer, self._timer_s = None, float("inf")
        with self._lock:
            feeds = list(self._feeds.values())
        now_s = time.monotonic()
        for feed in feeds:
            if feed.next_turn_s <= now_s:
                feed.take_turn()
        self._look_again(min((feed.next_turn_s for feed in feeds), default=float("inf")))

    def _look_again(self, due_s: float) -> None:
        """Schedule a call of `_run_due` at `due_s`, unless an earlier call is scheduled."""
        if due_s >= self._timer_s:
            return
        if self._timer is not None:
            self._loop.cancel(self._timer)
        self._timer, self._timer_s = self._loop.call_at(due_s, self._run_due), due_s

    def _next_tasks(self, request: LaneRequest, name: str, life: str, epoch: int, got: int) -> None:
        feed, process, meter, user = self.feed(name), request.context, self._meter, request.user
        process.feed, process.life = feed, life
        portion = None if meter is None else meter.portion(user)
        if meter is None or portion is None:
            feed.asked(life, epoch, got, request.answer)
        else:
            feed.asked(life, epoch, got, request.answer, portion, partial(meter.consumed, user))

    def _report(self, request: LaneRequest, name: str, life: str, epoch: int, reports: list[TaskReport]) -> None:
        self.feed(name).reported(life, epoch, reports)
        request.answer(encode_result(None))


def _no_methods(name: str, call: Callable[[], None], fail: Callable[[RaymqError], None]) -> None:
    raise AssertionError("every method of this lane answers at once")


@dataclass(frozen=True, slots=True)
class _Question:
    """A Listener's open request for tasks.

    `answer` is called once, with an encoded TaskBatch (a batch of tasks). If the batch has tasks, `handed` is called
    first, with the number of bytes and messages. `portion` limits the messages and bytes of the answer, but the answer
    may always have one task.
    """

    answer: Callable[[bytes], None]
    asked_s: float
    portion: ReadLimit | None
    handed: Callable[[int, int], None]


class ListenerFeed:
    """Delivers the tasks of one push-consumer instance to its Listener actor. `before_delivery` is called before each
    delivery. `on_gone` is called when the Listener actor has ended permanently. `wake` is called when the feed needs a
    turn, which is a call of its `take_turn`. `senders` executes the calls that send messages back."""

    def __init__(
        self,
        instance: InstanceState,
        *,
        send_back: SendBackCall,
        senders: ThreadPoolExecutor,
        before_delivery: Callable[[], None],
        on_gone: Callable[[], None],
        wake: Callable[[ListenerFeed], None],
        epoch: int,
    ) -> None:
        self.name = instance.name
        self._lock = threading.RLock()
        """Lock that guards the mutable attributes of this ListenerFeed, except plain numbers and texts. No blocking
        call is made while the lock is held."""
        self._instance = instance
        self._send_back_call = send_back
        self._senders = senders
        self._before_delivery = before_delivery
        self._on_gone = on_gone
        self._wake = wake
        self._epoch = epoch
        """The number that identifies the current period in which a Pull actor hosts the push-consumer instance. It is
        larger than the number of any earlier period."""
        self._tasks = TasksInFlight(epoch)
        self._listener: HandleRef | None = None
        """The handle of the Listener; None before the Listener's first call."""
        self._life = ""
        """The random id of the Listener's process, which the process itself has chosen."""
        self._heard_s = time.monotonic()
        """The time of the Listener's last call."""
        self._asking = False
        """True while this ListenerFeed waits for its Listener's answer. The ListenerFeed calls the Listener if the
        Listener has made no call for a long time, or if its lane (direct socket connection) has closed."""
        self._question: _Question | None = None
        """The Listener's open request for tasks; None if the Listener has no open request."""
        self._away = True
        """True if the Listener's process has ended, or has not called yet."""
        self._closed = False
        self._kept: PauseState | None = None
        """The pause state that the user has chosen for the push-consumer instance, as the Listener's process stores it:
        suspended or not, and the paused queues. None while the state is unknown."""
        self.next_turn_s = 0.0
        """The time at which `take_turn` of this ListenerFeed is called next, unless an event causes an earlier
        call."""
        self.away_because = STARTING
        """The reason why no task is delivered now; empty if the Listener's process runs."""
        self.consumed = 0
        """Number of messages that the instance has consumed since this Pull actor began to host it."""
        self.failures = 0
        """Number of messages that have failed since this Pull actor began to host the instance."""
        self.stuck = 0
        """Number of listener calls that have exceeded their timeout, according to the last report."""
        self.deaths = 0
        """Number of times that the Listener's process has ended since this Pull actor began to host the
        instance."""
        self.broken = ""
        """The traceback of the error that prevents the Listener's process from loading the user's listener; empty if
        there is no such error."""

    def close(self) -> None:
        """Stop delivering tasks to the Listener."""
        with self._lock:
            self._closed = True
            self.next_turn_s = float("inf")
            self._answer_empty()

    def wake(self) -> None:
        """Make the feeds' thread call this ListenerFeed's `take_turn` soon, because a message may be ready for
        delivery."""
        self._wake(self)

    def deliver(self) -> None:
        """If the Listener waits for tasks, deliver new messages at once in the calling thread; otherwise request a
        turn. Does not block."""
        if self._question is None:
            self._wake(self)
        else:
            self.take_turn()

    def heard(self, listener: HandleRef, life: str, broken: str, kept: PauseState | None) -> PauseState | None:
        """Record a call of the Listener. `listener`: its handle. `life`: the id of its process. `kept`: the pause state
        that the process stores.

        `broken`: the traceback if the process cannot load the listener. Returns the pause state that the process should
        store, or None if the process need not change it.
        """
        with self._lock:
            self._heard_s = time.monotonic()
            self._listener = listener
            if life != self._life:
                if self._life:
                    self._lost("the process was started again")
                self._life, self._away = life, True
            if broken:
                self.broken = self.away_because = f"the listener cannot be loaded:\n{broken}"
                return None
            if self._kept is None:
                self._kept = kept
            if self._away:
                self._back()
            return None if self._kept == kept else self._kept

    def asked(
        self,
        life: str,
        epoch: int,
        got: int,
        answer: Callable[[bytes], None],
        portion: ReadLimit | None = None,
        handed: Callable[[int, int], None] = lambda size_bytes, messages: None,
    ) -> None:
        """Answer a request for tasks from the Listener's process `life`, now or within about NEXT_WAIT_S.

        `epoch` and `got`: the process has received all batches of tasks of this hosting epoch up to number `got`. Any
        thread may call `answer` with an encoded TaskBatch (a batch of tasks). If the batch has messages, `handed` is
        called first, with the number of bytes and messages. Raises ServiceNotAvailableError if the feed is not in use
        by this process: the process has not called yet, or the feed is closed.
        """
        with self._lock:
            if self._closed or self._away or life != self._life:
                raise ServiceNotAvailableError(
                    f"instance {self.name} waits for its listener's process, which has not called yet; retry later"
                )
            lost = self._tasks.lost_batch(epoch, got)
            if lost is not None:
                answer(lost)
                return
            self._answer_empty()
            self._question = _Question(answer, time.monotonic(), portion, handed)
        self.take_turn()

    def reported(self, life: str, epoch: int, reports: Sequence[TaskReport]) -> None:
        """Apply reports about tasks from the Listener's process `life`.

        A repeated report changes nothing. A report from an earlier process of the Listener also changes nothing. So
        does a report that belongs to an earlier start of the push-consumer instance at this Pull actor (`epoch`).
        """
        with self._lock:
            if life != self._life or epoch != self._epoch:
                return
            for number, report in reports:
                task = self._tasks.get(number)
                if task is None:
                    continue
                if report.unread:
                    self._tasks.note_unread(task, time.monotonic())
                else:
                    self._take_report(task, report)
        self._instance.on_committable()
        self.take_turn()
        self._instance.on_fetchable()

    def lane_closed(self, life: str) -> None:
        """Handle the end of a lane (direct socket connection): ask the Listener whether its process `life`
        still runs."""
        if life == self._life and not self._closed and not self._away:
            self._ask_if_alive()

    def look(self) -> None:
        """If the Listener has made no call for SILENT_AFTER_S, call it to find out if it has ended permanently. Does
        not block."""
        if time.monotonic() - self._heard_s >= SILENT_AFTER_S:
            self._ask_if_alive()

    def _ask_if_alive(self) -> None:
        with self._lock:
            if self._listener is None or self._asking:
                return
            try:
                answer = self._listener.start("ready").future()
            except RaymqError as error:
                logger.info("instance %s: the listener cannot be called now: %s", self.name, error)
                return  # the next `look` calls the Listener again
            self._asking = True
            answer.add_done_callback(partial(self._looked, self._life))

    def keep(self, state: PauseState) -> None:
        """Store the pause state in the Listener's process, so that the next Pull actor that hosts the instance gets it.

        If the process cannot be reached now, it gets the state with its next call.
        """
        self._kept, listener = state, self._listener
        if listener is None:
            # the Listener has not called yet; the answer to its first call will contain the pause state: suspended or
            # not, and the paused queues
            return
        try:
            listener.call("keep", state, what="the listener", timeout_s=KEEP_TIMEOUT_S)
        except RaymqError as error:
            logger.info(
                "instance %s: the listener cannot store the list of suspended and paused queues now: %s",
                self.name,
                error,
            )

    def silent_s(self) -> float:
        """Return for how many seconds the Listener has sent no report about a task in flight. If several tasks are in
        flight, return the longest of these times; 0 if there is no task in flight.

        The Listener's process reports every half second unless it hangs.
        """
        return self._tasks.silent_s(time.monotonic())

    def take_turn(self) -> None:
        """Deliver tasks if the Listener waits for tasks. Does not block."""
        if self._closed:
            # The feed is closed: schedule no further turn. A turn that ran during `close` may have scheduled one.
            self.next_turn_s = float("inf")
            return
        try:
            self._turn()
        except Exception:  # an error in one instance must not stop other instances, or later turns of this instance
            logger.exception("instance %s failed to send tasks to its listener, retrying", self.name)
            self.next_turn_s = time.monotonic() + IDLE_WAIT_S

    def _turn(self) -> None:
        instance, due = self._instance, self.next_turn_s <= time.monotonic()
        # before delivery, check that the queues are still assigned to this instance: this process may have hung, so
        # that other members have the queues now
        self._before_delivery()
        with self._lock:
            if self._question is not None:
                self._hand_over(self._question)
            with instance.lock:
                next_time_s = instance.core.next_time_s()
        if due:
            instance.on_fetchable()
        now_s = time.monotonic()
        # Plan the next turn for the end of the next pause of a queue. A pause that has already ended needs no further
        # turn, because this turn has delivered the messages that waited for its end.
        pauses_s = next_time_s - now_s if next_time_s is not None and next_time_s > now_s else IDLE_WAIT_S
        self.next_turn_s = now_s + min(pauses_s, IDLE_WAIT_S)

    def _hand_over(self, question: _Question) -> None:
        """Answer the Listener's request if tasks can be delivered now, or if the request has waited long
        enough."""
        now_s = time.monotonic()
        with self._instance.lock:
            tasks = self._instance.core.deliverable(now_s)
        for task in tasks:
            if task.fetched_s is not None:
                wait_ms = (now_s - task.fetched_s) * 1000
                CLIENT_FIGURES.awaited(task.queue.topic, self._instance.settings.group, wait_ms, len(task.messages))
        self._tasks.add(tasks)
        batch = self._tasks.next_batch(question.portion, now_s)
        if batch is not None:
            self._question = None
            question.handed(batch.size_bytes, batch.messages)
            question.answer(batch.payload)
        elif now_s - question.asked_s >= NEXT_WAIT_S - IDLE_WAIT_S:
            self._answer_empty()

    def _answer_empty(self) -> None:
        """Answer the Listener's open request for tasks, if it has one, without tasks."""
        question, self._question = self._question, None
        if question is not None:
            question.answer(self._tasks.empty_batch())

    def _take_report(self, task: ConsumeTask, report: ConsumeReport) -> None:
        now_s = time.monotonic()
        self._tasks.note_report(task, now_s, ended=report.ended)
        with self._instance.lock:
            reaction = self._instance.core.reported(task, report, now_s)
            if report.ended:
                count = len(task.messages) - len(report.unfinished)
                self._instance.stats.took(task.queue.topic, count, report.consume_s, now_s)
        self.stuck = report.stuck
        self._react(task, reaction, report.failures[-1].error if report.failures else "")

    def _react(self, task: ConsumeTask, reaction: Reaction, error: str) -> None:
        now_s, topic = time.monotonic(), task.queue.topic
        with self._instance.lock:
            self._instance.stats.consumed(topic, reaction.ok, reaction.failed, now_s)
        self.consumed += reaction.ok
        self.failures += reaction.failed
        if reaction.failed and not self._instance.settings.clustering:
            logger.warning(
                "instance %s skips %d message(s) of queue %s: %s", self.name, reaction.failed, task.queue, error
            )
        for sent in reaction.send_backs:
            submit(self._senders, partial(self._send_back, sent))

    def _send_back(self, sent: SendBack) -> None:
        failed = False
        try:
            for chunk in _chunks(sent):
                self._send_back_call(
                    sent.task.queue.broker_name,
                    chunk,
                    sent.delay_level,
                    sent.max_reconsume_times,
                    sent.unreadable,
                    sent.reason,
                )
        except RaymqError as error:
            failed = True
            logger.warning(
                "instance %s could not send back messages of queue %s: %s", self.name, sent.task.queue, error
            )
        # catch every error: even after a programming error the messages must not stay in flight forever
        except Exception:
            failed = True
            logger.exception("instance %s could not send back messages of queue %s", self.name, sent.task.queue)
        with self._instance.lock:
            if failed:
                self._instance.core.send_back_failed(sent, time.monotonic())
            else:
                self._instance.core.sent_back(sent)
        self._wake(self)
        self._instance.on_committable()
        self._instance.on_fetchable()

    # Methods that track the state of the Listener's process

    def _looked(self, life: str, future: Future[str]) -> None:
        """Handle the result of a call that checked if the Listener still exists. The feed makes this call after a long
        silence of the Listener, or after the Listener's lane has closed. Runs in one of Ray's threads."""
        self._asking = False
        error = future.exception()
        if isinstance(error, (RayActorError, *DEAD_FOR_GOOD)):
            with self._lock:
                if life == self._life:
                    self._lost(str(error))
        if isinstance(error, DEAD_FOR_GOOD):
            self._gone()

    def _lost(self, reason: str) -> None:
        """Prepare all tasks for redelivery. No task is delivered until the Listener's process calls this Pull actor
        again. The caller holds the lock.

        Called when the Listener's process has ended, or when a new process of the Listener has called.
        """
        with self._instance.lock:
            self._instance.core.listener_lost()
        if not self._away:
            self._away = True
            self.deaths += 1
            self.away_because = f"the listener's process died: {reason.strip()[:500]}"
            logger.warning("instance %s: %s", self.name, self.away_because)
        tasks = self._tasks.lose_all()
        self._answer_empty()
        for task in tasks:
            with self._instance.lock:
                reaction = self._instance.core.died(task, time.monotonic())
            self._react(task, reaction, task.process_queue.trouble)

    def _back(self) -> None:
        """Resume delivery, because the Listener's process has called this Pull actor again."""
        self.broken = self.away_because = ""
        self._away = False
        with self._instance.lock:
            self._instance.core.listener_back(self._kept)
        self._wake(self)

    def _gone(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_gone()


def _chunks(sent: SendBack) -> list[bytes]:
    """Split the records to send back into chunks of at most SEND_BACK_MAX_BYTES. A record that is larger than this is a
    chunk of its own."""
    messages, chunks, first = sent.messages.in_memory(), list[bytes](), 0
    for index in range(1, len(messages) + 1):
        if index == len(messages) or messages.starts[index + 1] - messages.starts[first] > SEND_BACK_MAX_BYTES:
            chunks.append(messages.part(first, index).data)
            first = index
    return chunks
