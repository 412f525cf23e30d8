"""ListenerFeed delivers a Pull actor's tasks to its Listener, takes the reports, and sends failed messages back.

One thread delivers and takes answers; callbacks of Ray only leave them for it. Another looks after the listener's
process: when a call fails, nothing is delivered until the process, which Ray starts again, has answered. Send-backs to
brokers have a few threads of their own, because a broker may be slow.
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
from actors.core.consume.process_queues import PauseState
from actors.pull.instance_state import InstanceState
from raymq.consumer.push.listener import ShippedTask
from raymq.errors import RaymqError, RequestTimeoutError
from raymq.protocol.consume_result import ConsumeReport, Failure
from raymq.remoting.actor_ref import ActorGoneError, resolve

IDLE_WAIT_S: Final = 0.5
LOOK_INTERVAL_S: Final = 5.0
"""How often a listener's process that answers is looked at."""
LISTENER_READY_TIMEOUT_S: Final = 10.0
READY_RETRY_S: Final = 0.2
KEEP_TIMEOUT_S: Final = 5.0
BROKEN_RETRY_S: Final = 5.0
SEND_BACK_THREADS: Final = 4
SEND_BACK_MAX_BYTES: Final = 4 << 20
STARTING: Final = "the listener's process is starting"

logger = logging.getLogger(__name__)

SendBackCall = Callable[[str, bytes, int, int], None]
"""Called with broker name, records, delay level and max reconsume times; RaymqError when the broker did not take the
records."""


class ListenerFeed:
    """Feeds one Listener actor, whose handle is `listener`. `before_delivery` is called before each delivery, `on_gone`
    when the actor is dead for good."""

    def __init__(
        self,
        instance: InstanceState,
        listener: Any,
        *,
        send_back: SendBackCall,
        before_delivery: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._instance = instance
        self._listener = listener
        self._send_back_call = send_back
        self._before_delivery = before_delivery
        self._on_gone = on_gone
        self._epoch = time.time_ns()
        """The number of this life of the Pull actor, larger than that of any life before."""
        self._answers: deque[tuple[Task, Future[ConsumeReport | None]]] = deque()
        """Answers of the listener that the feeding thread has not taken yet."""
        self._asked_at_s: dict[Task, float] = {}
        """When the listener was last called about each task in flight."""
        self._away = threading.Event()
        """Set while the listener's process is not known to run."""
        self._away.set()
        self._senders = ThreadPoolExecutor(SEND_BACK_THREADS, "send-back")
        self._closed = threading.Event()
        self._kept: PauseState | None = None
        """The state the listener's process keeps; None while that is not known."""
        self.away_because = STARTING
        """The reason why nothing is delivered now; empty while the listener's process runs."""
        self.consumed = 0
        """Messages consumed since this process was started."""
        self.failures = 0
        """Messages failed since this process was started."""
        self.stuck = 0
        """Listener calls that have outlived their timeout, by the last report."""
        self.deaths = 0
        """Ends of the listener's process since this process was started."""
        self.broken = ""
        """The traceback if the listener cannot be loaded in its process; empty otherwise."""

    def start(self) -> None:
        """Start the threads; the first delivery is made when the listener's process has answered."""
        for name, run in (("feed", self._run), ("listener", self._watch)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def close(self) -> None:
        """Deliver nothing more, and end the threads."""
        self._closed.set()
        self._away.set()
        self._instance.work.set()
        self._senders.shutdown(wait=False)

    def keep(self, state: PauseState) -> None:
        """Have the listener's process remember the state for the next life of the Pull actor. It does on return; a
        process that is away is told when it is back."""
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

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._turn()
            except Exception:  # a bug: without this thread nothing would be delivered any more
                logger.exception("%s failed to feed its listener, trying again", self._instance.name)
                self._closed.wait(IDLE_WAIT_S)

    def _turn(self) -> None:
        """Wait until there is something to do; then take the answers that came, and deliver."""
        instance = self._instance
        with instance.lock:
            next_time_s = instance.core.next_time_s()
        now_s = time.monotonic()
        pause_s = IDLE_WAIT_S if next_time_s is None or next_time_s <= now_s else next_time_s - now_s
        instance.work.wait(min(IDLE_WAIT_S, pause_s))
        instance.work.clear()
        answered = bool(self._answers)
        while self._answers:
            self._take_answer(*self._answers.popleft())
        self._before_delivery()  # the process may have stood still: others may have its queues
        with instance.lock:
            tasks = instance.core.deliverable(time.monotonic())
        for task in tasks:
            self._ask(task, self._listener.consume.remote(self._shipped(task)))
        if answered:
            instance.on_committable()
        if answered or (next_time_s is not None and next_time_s <= now_s):
            instance.on_fetchable()

    def _shipped(self, task: Task) -> ShippedTask:
        return ShippedTask(self._epoch, task.number, task.queue, task.messages.data)

    def _ask(self, task: Task, reference: Any) -> None:
        self._asked_at_s[task] = time.monotonic()
        reference.future().add_done_callback(partial(self._answered, task))

    def _answered(self, task: Task, future: Future[ConsumeReport | None]) -> None:
        """Leave an answer for the feeding thread. Runs in a thread of Ray's, which must not be kept."""
        self._answers.append((task, future))
        self._instance.work.set()

    def _take_answer(self, task: Task, future: Future[ConsumeReport | None]) -> None:
        self._asked_at_s.pop(task, None)
        error = future.exception()
        report: ConsumeReport | None = None
        if error is None:
            report = future.result()
        elif not isinstance(error, RayActorError):
            logger.error("%s: the listener's actor failed: %s", self._instance.name, error)
            report = ConsumeReport(failures=(Failure(0, len(task.messages), str(error)),))
        if report is None:
            self._died(task, error)
            return
        now_s = time.monotonic()
        with self._instance.lock:
            reaction = self._instance.core.reported(task, report, now_s)
            if report.ended:
                count = len(task.messages) - len(report.unfinished)
                self._instance.stats.took(task.queue.topic, count, report.consume_s, now_s)
        self.stuck = report.stuck
        self._react(task, reaction, report.failures[-1].error if report.failures else "")
        if not report.ended:
            self._ask(task, self._listener.progress.remote(self._epoch, task.number))

    def _died(self, task: Task, error: BaseException | None) -> None:
        """Prepare a task for another delivery: the listener's process ended (or is a new one, which does not know the
        task)."""
        if isinstance(error, ActorDiedError):
            self._gone()
        self._lost(error)
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
        self._instance.work.set()
        self._instance.on_committable()
        self._instance.on_fetchable()

    # The listener's process

    def _watch(self) -> None:
        """Call the process until it answers, and then now and then, in case it ends while it has nothing to do."""
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
                logger.warning("%s: %s", self._instance.name, error)  # it hangs, or is slow to start: see silent_s
                continue
            except RaymqError as error:
                self._lost(error)
                self._closed.wait(READY_RETRY_S)
                continue
            if broken:
                self.broken = self.away_because = f"the listener cannot be loaded:\n{broken}"
                self._closed.wait(BROKEN_RETRY_S)
            elif self._away.is_set():
                self._back(kept)

    def _lost(self, error: BaseException | None) -> None:
        """Deliver nothing until the process answers: it ended, or is a new one."""
        with self._instance.lock:
            self._instance.core.listener_lost()
        if not self._away.is_set():
            self.deaths += 1
            self.away_because = f"the listener's process died: {str(error or 'it was started again').strip()[:500]}"
            logger.warning("%s: %s", self._instance.name, self.away_because)
            self._away.set()

    def _back(self, kept: PauseState | None) -> None:
        """Deliver again: the process answers. `kept` is the state it has remembered."""
        if self._kept is None:
            self._kept = kept
        elif self._kept != kept:  # the state set in this life of the Pull actor is newer
            self._listener.keep.remote(self._kept)
        self.broken = self.away_because = ""
        self._away.clear()
        with self._instance.lock:
            self._instance.core.listener_back(self._kept)
        self._instance.work.set()

    def _gone(self) -> None:
        self._closed.set()
        self._on_gone()


def _chunks(sent: SendBack) -> list[bytes]:
    """The records in chunks of at most SEND_BACK_MAX_BYTES, but for a chunk of one larger record."""
    messages, chunks, first = sent.messages, [], 0
    for index in range(1, len(messages) + 1):
        if index == len(messages) or messages.starts[index + 1] - messages.starts[first] > SEND_BACK_MAX_BYTES:
            chunks.append(messages.part(first, index).data)
            first = index
    return chunks
