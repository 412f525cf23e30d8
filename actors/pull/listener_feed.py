"""ListenerFeed delivers an instance's tasks to its Listener, takes the reports, and sends failed messages back.

    FeedThread   one for all instances of a Pull actor: gives each feed its turn when it has something to do
    ListenerFeed one per instance: what is to be delivered goes in one call, whose answer has a report for each task

Callbacks of Ray only leave answers for the thread. The Listener itself calls about every HOST_INTERVAL_S
(raymq.consumer.push.hosting), so that a new process of it is known at once; where a call to it fails, nothing is
delivered until it has called again. Send-backs to brokers have a few threads of their own, because a broker may be
slow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, Final

from ray.exceptions import ActorDiedError, RayActorError

from actors.core.consume.consume_service import Reaction, SendBack
from actors.core.consume.process_queue import Task
from actors.core.consume.process_queues import PauseState
from actors.pull.instance_state import InstanceState
from raymq.consumer.push.hosting import HOST_INTERVAL_S
from raymq.consumer.push.listener import ShippedTask
from raymq.errors import RaymqError
from raymq.protocol.consume_result import ConsumeReport, Failure
from raymq.remoting.actor_ref import resolve

IDLE_WAIT_S: Final = 0.5
SILENT_AFTER_S: Final = 3 * HOST_INTERVAL_S
"""A Listener that has not called for longer is called itself, in case it is gone for good."""
KEEP_TIMEOUT_S: Final = 5.0
CALL_MAX_BYTES: Final = 8 << 20
"""Records in one call to a Listener, but for a call with one larger task."""
SEND_BACK_MAX_BYTES: Final = 4 << 20
STARTING: Final = "the listener's process is starting"

logger = logging.getLogger(__name__)

SendBackCall = Callable[[str, bytes, int, int], None]
"""Called with broker name, records, delay level and max reconsume times; RaymqError when the broker did not take the
records."""
Answer = Sequence[ConsumeReport | None]


class FeedThread:
    """Gives feeds their turns. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._feeds: set[ListenerFeed] = set()
        self._woken: set[ListenerFeed] = set()
        self._work = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="feed", daemon=True).start()

    def add(self, feed: ListenerFeed) -> None:
        """Give a feed its turns from now on."""
        with self._lock:
            self._feeds.add(feed)
        self.wake(feed)

    def remove(self, feed: ListenerFeed) -> None:
        """Give a feed no more turns."""
        with self._lock:
            self._feeds.discard(feed)

    def wake(self, feed: ListenerFeed) -> None:
        """Give a feed its turn soon."""
        with self._lock:
            self._woken.add(feed)
        self._work.set()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._work.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                feeds = list(self._feeds)
            next_s = min((feed.next_turn_s for feed in feeds), default=float("inf"))
            self._work.wait(min(IDLE_WAIT_S, max(0.0, next_s - time.monotonic())))
            self._work.clear()
            with self._lock:
                woken, self._woken = self._woken, set()
            now_s = time.monotonic()
            for feed in {*woken, *(feed for feed in feeds if feed.next_turn_s <= now_s)}:
                feed.take_turn()


class ListenerFeed:
    """Feeds one Listener actor. `before_delivery` is called before each delivery, `on_gone` when the actor is dead for
    good, `wake` when the feed needs a turn; `senders` makes the calls that send messages back."""

    def __init__(
        self,
        instance: InstanceState,
        *,
        send_back: SendBackCall,
        senders: Executor,
        before_delivery: Callable[[], None],
        on_gone: Callable[[], None],
        wake: Callable[[ListenerFeed], None],
    ) -> None:
        self._instance = instance
        self._send_back_call = send_back
        self._senders = senders
        self._before_delivery = before_delivery
        self._on_gone = on_gone
        self._wake = wake
        self._epoch = time.time_ns()
        """The number of this life of the instance at a Pull actor, larger than that of any life before."""
        self._listener: Any = None
        """The Listener's handle; None before it has called."""
        self._life = ""
        """The Listener's process, by what it calls itself."""
        self._heard_s = time.monotonic()
        """When it called last."""
        self._asking = False
        """True while a call to a Listener that was silent is not answered."""
        self._answers: deque[tuple[list[Task], str, Future[Answer]]] = deque()
        """Answers of the listener that the thread has not taken yet, with the process that was asked."""
        self._asked_at_s: dict[Task, float] = {}
        """When the listener was last called about each task in flight."""
        self._away = True
        """True while the listener's process is not known to run."""
        self._closed = False
        self._kept: PauseState | None = None
        """The state the listener's process keeps; None while that is not known."""
        self.next_turn_s = 0.0
        """When the feed needs its next turn without being woken."""
        self.away_because = STARTING
        """The reason why nothing is delivered now; empty while the listener's process runs."""
        self.consumed = 0
        """Messages consumed since the instance came to this process."""
        self.failures = 0
        """Messages failed since then."""
        self.stuck = 0
        """Listener calls that have outlived their timeout, by the last report."""
        self.deaths = 0
        """Ends of the listener's process since then."""
        self.broken = ""
        """The traceback if the listener cannot be loaded in its process; empty otherwise."""

    def close(self) -> None:
        """Deliver nothing more."""
        self._closed = True

    def wake(self) -> None:
        """Have a turn soon: something may be delivered."""
        self._wake(self)

    def heard(self, listener: Any, life: str, broken: str, kept: PauseState | None) -> PauseState | None:
        """The Listener has called: its handle, its process, the traceback if the listener cannot be loaded there, and
        the state that the process keeps. Returns the state that it is to keep if that is another one."""
        self._heard_s = time.monotonic()
        self._listener = listener
        if life != self._life:
            if self._life and not self._away:
                self._lost("it was started again")
            self._life, self._away = life, True
        if broken:
            self.broken = self.away_because = f"the listener cannot be loaded:\n{broken}"
            return None
        if self._kept is None:
            self._kept = kept
        if self._away:
            self._back()
        return None if self._kept == kept else self._kept

    def look(self) -> None:
        """Call a Listener that has been silent for too long, in case it is dead for good. Does not wait."""
        if self._listener is None or self._asking or time.monotonic() - self._heard_s < SILENT_AFTER_S:
            return
        self._asking = True
        self._listener.ready.remote().future().add_done_callback(self._looked)

    def keep(self, state: PauseState) -> None:
        """Have the listener's process remember the state for the next life of the instance at a Pull actor. It does on
        return; a process that is away is told when it calls."""
        self._kept = state
        try:
            resolve(self._listener.keep.remote(state), "the listener", KEEP_TIMEOUT_S)
        except RaymqError as error:
            logger.info("%s: its listener cannot note now what is suspended or paused: %s", self._instance.name, error)

    def silent_s(self) -> float:
        """The seconds since the oldest call that the listener's process has not answered, 0 if there is none. It
        answers every half second unless it hangs."""
        asked_at_s = list(self._asked_at_s.values())
        return time.monotonic() - min(asked_at_s) if asked_at_s else 0.0

    def take_turn(self) -> None:
        """Take the answers that came, and deliver. Called by one thread at a time; does not wait."""
        if self._closed:
            return
        try:
            self._turn()
        except Exception:  # a bug, in one instance: the others go on, and so does this one
            logger.exception("%s failed to feed its listener, trying again", self._instance.name)
            self.next_turn_s = time.monotonic() + IDLE_WAIT_S

    def _turn(self) -> None:
        instance, due = self._instance, self.next_turn_s <= time.monotonic()
        answered = bool(self._answers)
        while self._answers:
            self._take_answer(*self._answers.popleft())
        self._before_delivery()  # the process may have stood still: others may have its queues
        with instance.lock:
            tasks = instance.core.deliverable(time.monotonic())
            next_time_s = instance.core.next_time_s()
        for some in _calls(tasks):
            self._ask(some, self._listener.consume_all.remote([self._shipped(task) for task in some]))
        if answered:
            instance.on_committable()
        if answered or due:
            instance.on_fetchable()
        now_s = time.monotonic()
        # A time that is over needs no turn of its own: this one was it.
        pauses_s = next_time_s - now_s if next_time_s is not None and next_time_s > now_s else IDLE_WAIT_S
        self.next_turn_s = now_s + min(pauses_s, IDLE_WAIT_S)

    def _shipped(self, task: Task) -> ShippedTask:
        return ShippedTask(self._epoch, task.number, task.queue, task.messages.data)

    def _ask(self, tasks: list[Task], reference: Any) -> None:
        self._asked_at_s.update(dict.fromkeys(tasks, time.monotonic()))
        reference.future().add_done_callback(partial(self._answered, tasks, self._life))

    def _answered(self, tasks: list[Task], life: str, future: Future[Answer]) -> None:
        """Leave an answer for the thread. Runs in a thread of Ray's, which must not be kept."""
        self._answers.append((tasks, life, future))
        self._wake(self)

    def _take_answer(self, tasks: list[Task], life: str, future: Future[Answer]) -> None:
        for task in tasks:
            self._asked_at_s.pop(task, None)
        error = future.exception()
        if error is None:
            reports = future.result()
        elif isinstance(error, RayActorError):
            reports = [None] * len(tasks)
        else:
            logger.error("%s: the listener's actor failed: %s", self._instance.name, error)
            reports = [ConsumeReport(failures=(Failure(0, len(task.messages), str(error)),)) for task in tasks]
        left = []
        for task, report in zip(tasks, reports, strict=True):
            if report is None:
                self._died(task, life, error)
            elif not self._take_report(task, report):
                left.append(task)
        if left:
            self._ask(left, self._listener.progress_all.remote(self._epoch, [task.number for task in left]))

    def _take_report(self, task: Task, report: ConsumeReport) -> bool:
        """Take a report about a task. True if it was the last one."""
        now_s = time.monotonic()
        with self._instance.lock:
            reaction = self._instance.core.reported(task, report, now_s)
            if report.ended:
                count = len(task.messages) - len(report.unfinished)
                self._instance.stats.took(task.queue.topic, count, report.consume_s, now_s)
        self.stuck = report.stuck
        self._react(task, reaction, report.failures[-1].error if report.failures else "")
        return report.ended

    def _died(self, task: Task, life: str, error: BaseException | None) -> None:
        """Prepare a task for another delivery: the listener's process ended (or is a new one, which does not know the
        task)."""
        if isinstance(error, ActorDiedError):
            self._gone()
        if life == self._life:
            self._lost(str(error or "it was started again"))
        with self._instance.lock:
            reaction = self._instance.core.died(task, time.monotonic())
        self._react(task, reaction, task.process_queue.trouble)

    def _react(self, task: Task, reaction: Reaction, error: str) -> None:
        now_s, topic = time.monotonic(), task.queue.topic
        with self._instance.lock:
            self._instance.stats.consumed(topic, reaction.ok, reaction.failed, now_s)
        self.consumed += reaction.ok
        self.failures += reaction.failed
        if reaction.failed and not self._instance.settings.clustering:
            logger.warning("%s skips %d message(s) of %s: %s", self._instance.name, reaction.failed, task.queue, error)
        for sent in reaction.send_backs:
            self._senders.submit(self._send_back, sent)

    def _send_back(self, sent: SendBack) -> None:
        failed = False
        try:
            for chunk in _chunks(sent):
                self._send_back_call(sent.task.queue.broker_name, chunk, sent.delay_level, sent.max_reconsume_times)
        except RaymqError as error:
            failed = True
            logger.warning("%s could not send back messages of %s: %s", self._instance.name, sent.task.queue, error)
        except Exception:  # a bug: the messages must not stay in flight for ever
            failed = True
            logger.exception("%s could not send back messages of %s", self._instance.name, sent.task.queue)
        with self._instance.lock:
            if failed:
                self._instance.core.send_back_failed(sent, time.monotonic())
            else:
                self._instance.core.sent_back(sent)
        self._wake(self)
        self._instance.on_committable()
        self._instance.on_fetchable()

    # The listener's process

    def _looked(self, future: Future[str]) -> None:
        """Take the answer of a Listener that was silent. Runs in a thread of Ray's."""
        self._asking = False
        error = future.exception()
        if isinstance(error, ActorDiedError):
            self._gone()
        elif isinstance(error, RayActorError):
            self._lost(str(error))

    def _lost(self, reason: str) -> None:
        """Deliver nothing until the process calls: it ended, or is a new one."""
        with self._instance.lock:
            self._instance.core.listener_lost()
        if not self._away:
            self._away = True
            self.deaths += 1
            self.away_because = f"the listener's process died: {reason.strip()[:500]}"
            logger.warning("%s: %s", self._instance.name, self.away_because)

    def _back(self) -> None:
        """Deliver again: the process has called."""
        self.broken = self.away_because = ""
        self._away = False
        with self._instance.lock:
            self._instance.core.listener_back(self._kept)
        self._wake(self)

    def _gone(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_gone()


def _calls(tasks: Sequence[Task]) -> list[list[Task]]:
    """The tasks in lists of at most CALL_MAX_BYTES, but for a list of one larger task."""
    calls: list[list[Task]] = []
    size_bytes = 0
    for task in tasks:
        size_bytes += task.messages.size_bytes
        if not calls or size_bytes > CALL_MAX_BYTES:
            calls.append([])
            size_bytes = task.messages.size_bytes
        calls[-1].append(task)
    return calls


def _chunks(sent: SendBack) -> list[bytes]:
    """The records in chunks of at most SEND_BACK_MAX_BYTES, but for a chunk of one larger record."""
    messages, chunks, first = sent.messages, [], 0
    for index in range(1, len(messages) + 1):
        if index == len(messages) or messages.starts[index + 1] - messages.starts[first] > SEND_BACK_MAX_BYTES:
            chunks.append(messages.part(first, index).data)
            first = index
    return chunks
