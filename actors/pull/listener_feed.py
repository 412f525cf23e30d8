"""Between a Pull actor and its Listener: tasks there, reports back, and what fails on to the broker.

One thread delivers and takes answers; callbacks of Ray only leave them for it. Another looks after the listener's
process: when a call fails, nothing is delivered until the process, which Ray starts again, has answered. Send-backs
have a few threads of their own, because a broker may be slow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from ray.exceptions import ActorDiedError, RayActorError

from actors.core.consume.consume_service import Reaction, SendBack
from actors.core.consume.process_queue import Task
from actors.pull.shared import InstanceState
from raymq.consumer.push.listener import ShippedTask
from raymq.errors import RaymqError, RequestTimeoutError
from raymq.message import MessageQueue
from raymq.protocol.consume_result import ConsumeReport, Failure
from raymq.remoting.actor_ref import ActorGoneError, resolve

IDLE_WAIT_S: Final = 0.5
LOOK_INTERVAL_S: Final = 5.0
LISTENER_READY_TIMEOUT_S: Final = 10.0
READY_RETRY_S: Final = 0.2
KEEP_TIMEOUT_S: Final = 5.0
BROKEN_RETRY_S: Final = 5.0
SEND_BACK_THREADS: Final = 4
SEND_BACK_MAX_BYTES: Final = 4 << 20
STARTING: Final = "the listener's process is starting"

logger = logging.getLogger(__name__)

Kept = tuple[bool, frozenset[MessageQueue]]
"""Whether the user has suspended the instance, and which queues are paused."""
SendBackCall = Callable[[str, bytes, int, int], None]
"""Broker name, records, delay level, max reconsume times; RaymqError when the broker did not take them."""


class ListenerFeed:
    """`listener`: the Listener actor's handle. `on_gone` is called when it is dead for good. `before` is called before
    each delivery."""

    def __init__(
        self,
        shared: InstanceState,
        listener: Any,
        *,
        send_back: SendBackCall,
        before: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._shared = shared
        self._listener = listener
        self._send_back_call = send_back
        self._before = before
        self._on_gone = on_gone
        self._epoch = time.time_ns()
        self._answers: deque[tuple[Task, Future[ConsumeReport | None]]] = deque()
        self._asked_at_s: dict[Task, float] = {}
        self._away = threading.Event()
        self._away.set()
        self._senders = ThreadPoolExecutor(SEND_BACK_THREADS, "send-back")
        self._closed = threading.Event()
        self._kept: Kept | None = None
        self.away_because = STARTING
        self.consumed = 0
        self.failures = 0
        self.stuck = 0
        self.deaths = 0
        self.broken = ""
        """Why the listener cannot be loaded where it is now."""

    def start(self) -> None:
        """Begin, as soon as the listener's process answers."""
        for name, run in (("feed", self._run), ("listener", self._watch)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def close(self) -> None:
        """Deliver nothing more."""
        self._closed.set()
        self._away.set()
        self._shared.work.set()
        self._senders.shutdown(wait=False)

    def keep(self, state: Kept) -> None:
        """Have the listener's process remember this for the next life of the Pull actor. It does on return; one that is
        away is told when it is back."""
        self._kept = state
        try:
            resolve(self._listener.keep.remote(state), "the listener", KEEP_TIMEOUT_S)
        except RaymqError as error:
            logger.info("%s: its listener does not hear now what is suspended or paused: %s", self._shared.name, error)

    def silent_s(self) -> float:
        """For how long the listener's process has owed an answer; it reports every half second unless it hangs."""
        asked_at_s = list(self._asked_at_s.values())
        return time.monotonic() - min(asked_at_s) if asked_at_s else 0.0

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._turn()
            except Exception:  # a bug: without this thread the listener would hear nothing any more
                logger.exception("%s failed to feed its listener, trying again", self._shared.name)
                self._closed.wait(IDLE_WAIT_S)

    def _turn(self) -> None:
        """Wait until there is something to do; take what was answered, and deliver."""
        shared = self._shared
        with shared.lock:
            next_time_s = shared.core.next_time_s()
        now_s = time.monotonic()
        pause_s = IDLE_WAIT_S if next_time_s is None or next_time_s <= now_s else next_time_s - now_s
        shared.work.wait(min(IDLE_WAIT_S, pause_s))
        shared.work.clear()
        answered = bool(self._answers)
        while self._answers:
            self._take_answer(*self._answers.popleft())
        self._before()  # the process may have stood still: others may have its queues
        with shared.lock:
            tasks = shared.core.deliverable(time.monotonic())
        for task in tasks:
            self._ask(task, self._listener.consume.remote(self._shipped(task)))
        if answered:
            shared.on_finished()
        if answered or (next_time_s is not None and next_time_s <= now_s):
            shared.on_room()

    def _shipped(self, task: Task) -> ShippedTask:
        return ShippedTask(self._epoch, task.number, task.queue, task.messages.data)

    def _ask(self, task: Task, reference: Any) -> None:
        self._asked_at_s[task] = time.monotonic()
        reference.future().add_done_callback(partial(self._answered, task))

    def _answered(self, task: Task, future: Future[ConsumeReport | None]) -> None:
        """Runs in a thread of Ray's, which must not be kept."""
        self._answers.append((task, future))
        self._shared.work.set()

    def _take_answer(self, task: Task, future: Future[ConsumeReport | None]) -> None:
        self._asked_at_s.pop(task, None)
        error = future.exception()
        report: ConsumeReport | None = None
        if error is None:
            report = future.result()
        elif not isinstance(error, RayActorError):
            logger.error("%s: the listener's actor failed: %s", self._shared.name, error)
            report = ConsumeReport(failures=(Failure(0, len(task.messages), str(error)),))
        if report is None:
            self._died(task, error)
            return
        now_s = time.monotonic()
        with self._shared.lock:
            reaction = self._shared.core.reported(task, report, now_s)
            if report.ended:
                count = len(task.messages) - len(report.unfinished)
                self._shared.stats.took(task.queue.topic, count, report.consume_s, now_s)
        self.stuck = report.stuck
        self._react(task, reaction, report.failures[-1].error if report.failures else "")
        if not report.ended:
            self._ask(task, self._listener.progress.remote(self._epoch, task.number))

    def _died(self, task: Task, error: BaseException | None) -> None:
        """The process ended over the task (or is a new one, which does not know it)."""
        if isinstance(error, ActorDiedError):
            self._gone()
        self._leave_alone(error)
        with self._shared.lock:
            reaction = self._shared.core.died(task, time.monotonic())
        self._react(task, reaction, task.held.trouble)

    def _react(self, task: Task, reaction: Reaction, error: str) -> None:
        now_s, topic = time.monotonic(), task.queue.topic
        with self._shared.lock:
            self._shared.stats.consumed(topic, reaction.ok, reaction.failed, now_s)
            if reaction.ok and topic == self._shared.settings.retry_topic:
                for held in self._shared.core.held():
                    held.trouble = ""  # what failed there has come back, and is consumed
        self.consumed += reaction.ok
        self.failures += reaction.failed
        if reaction.failed and not self._shared.settings.clustering:
            logger.warning("%s skips %d message(s) of %s: %s", self._shared.name, reaction.failed, task.queue, error)
        for sent in reaction.send_backs:
            self._senders.submit(self._send_back, sent)

    def _send_back(self, sent: SendBack) -> None:
        failed = False
        try:
            for chunk in _chunks(sent):
                self._send_back_call(sent.task.queue.broker_name, chunk, sent.delay_level, sent.max_reconsume_times)
        except RaymqError as error:
            failed = True
            logger.warning("%s could not send back messages of %s: %s", self._shared.name, sent.task.queue, error)
        except Exception:  # a bug: the messages must not stay in flight for ever
            failed = True
            logger.exception("%s could not send back messages of %s", self._shared.name, sent.task.queue)
        with self._shared.lock:
            if failed:
                self._shared.core.send_back_failed(sent, time.monotonic())
            else:
                self._shared.core.sent_back(sent)
        self._shared.work.set()
        self._shared.on_finished()
        self._shared.on_room()

    # The listener's process

    def _watch(self) -> None:
        """Look after the process: until it answers, and now and then, in case it ends while it has nothing to do."""
        while True:
            self._away.wait(LOOK_INTERVAL_S)
            if self._closed.is_set():
                return
            try:
                broken = resolve(self._listener.ready.remote(), "the listener", LISTENER_READY_TIMEOUT_S)
                kept = resolve(self._listener.kept.remote(), "the listener", LISTENER_READY_TIMEOUT_S)
            except ActorGoneError:
                self._gone()
                return
            except RequestTimeoutError as error:
                logger.warning("%s: %s", self._shared.name, error)  # it hangs, or is slow to start: see silent_s
                continue
            except RaymqError as error:
                self._leave_alone(error)
                self._closed.wait(READY_RETRY_S)
                continue
            if broken:
                self.broken = self.away_because = f"the listener cannot be loaded:\n{broken}"
                self._closed.wait(BROKEN_RETRY_S)
            elif self._away.is_set():
                self._back(kept)

    def _leave_alone(self, error: BaseException | None) -> None:
        """The process ended, or is a new one: deliver nothing until that answers."""
        with self._shared.lock:
            self._shared.core.listener_away = True
        if not self._away.is_set():
            self.deaths += 1
            self.away_because = f"the listener's process died: {str(error or 'it was started again').strip()[:500]}"
            logger.warning("%s: %s", self._shared.name, self.away_because)
            self._away.set()

    def _back(self, kept: Kept | None) -> None:
        if self._kept is None:
            self._kept = kept
        elif self._kept != kept:  # what was said in this life is newer
            self._listener.keep.remote(self._kept)
        self.broken = self.away_because = ""
        self._away.clear()
        with self._shared.lock:
            if self._kept is not None:
                self._shared.core.suspended, paused = self._kept
                self._shared.core.pause(paused)
            self._shared.core.listener_away = False
        self._shared.work.set()

    def _gone(self) -> None:
        self._closed.set()
        self._on_gone()


def _chunks(sent: SendBack) -> list[bytes]:
    """The records in pieces of SEND_BACK_MAX_BYTES, unless one is larger."""
    messages, chunks, first = sent.messages, [], 0
    for index in range(1, len(messages) + 1):
        if index == len(messages) or messages.starts[index + 1] - messages.starts[first] > SEND_BACK_MAX_BYTES:
            chunks.append(messages.part(first, index).data)
            first = index
    return chunks
