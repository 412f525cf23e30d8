"""The load of a chaos test: producers that send as fast as they can or with a fixed pause, and a function that reads
all messages back afterwards."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from concurrent.futures import Future

import raymq
from raymq.common.message import MessageQueue, PullStatus
from tests.support.history.checker import check
from tests.support.history.history import History, Operation, Outcome, Sent
from tests.support.history.observations import Observation, Observations, Seen
from tests.support.history.waiting import eventually
from tests.support.history.watcher import Watcher

IN_FLIGHT_MAX = 500
SHARDS = 8


class Senders:
    """Threads that send messages: `producers` threads, each with its own producer, send `count` messages each, or fewer
    after `stop`.

    `pause_s`: pause between two messages of a thread. Each acknowledged send is also an observation, if `observations`
    is given. `levels`: the messages have the priorities 0 to `levels` - 1 in turn, and no sharding keys; 0 for messages
    without priorities. Start the threads, then join them.
    """

    def __init__(
        self,
        mq: raymq.Client,
        topic: str,
        *,
        producers: int,
        count: int,
        history: History,
        pause_s: float = 0.0,
        observations: Observations | None = None,
        levels: int = 0,
    ) -> None:
        self._mq, self._topic, self._count, self._history = mq, topic, count, history
        self._observations, self._levels = observations, levels
        self._pause_s, self._stopping = pause_s, threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(producers)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Let the sending threads end: they send no further messages; `join` waits for their sends in flight."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for all sending threads, each for at most `timeout_s` seconds. Raises an error if a thread ended with an
        error. A failed send is no such error, because failed sends are part of the test."""
        for thread in self._threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), "a producer hangs"
        if self._failures:
            raise self._failures[0]

    def _run(self, index: int) -> None:
        waiting: deque[tuple[Sent, float, Future[raymq.SendResult]]] = deque()
        try:
            with self._mq.producer(f"sender-{index}") as producer:
                for sequence in range(self._count):
                    sent = Sent(index, sequence)
                    priority = sequence % self._levels if self._levels else None
                    message = raymq.Message(self._topic, sent.body(), priority=priority)
                    key = None if self._levels else f"shard-{sequence % SHARDS}"
                    begin_s = time.monotonic()
                    future = producer.send_async(message, sharding_key=key)
                    waiting.append((sent, begin_s, future))
                    while waiting and (len(waiting) >= IN_FLIGHT_MAX or waiting[0][2].done()):
                        self._note(*waiting.popleft())
                    if self._stopping.wait(self._pause_s) if self._pause_s else self._stopping.is_set():
                        break
                while waiting:
                    self._note(*waiting.popleft())
        except BaseException as error:  # keep the error of this sending thread; `join` raises it in the test's thread
            self._failures.append(error)

    def _note(self, sent: Sent, begin_s: float, future: Future[raymq.SendResult]) -> None:
        """Wait until a send has ended, and add its outcome to the history and the observations."""
        operation = outcome_of(sent, future)
        self._history.add(operation)
        if self._observations is not None and operation.outcome is Outcome.OK:
            end_s, queue, offset = time.monotonic(), operation.queue, operation.queue_offset
            self._observations.add(Observation(Seen.ACKNOWLEDGED, begin_s, end_s, queue, offset, sent.body()))


def outcome_of(sent: Sent, future: Future[raymq.SendResult]) -> Operation:
    """Wait until a send has ended. Returns the entry (operation) that records the send in the history."""
    try:
        result = future.result(120)
    except raymq.RaymqError as error:
        outcome = Outcome.UNKNOWN if isinstance(error, raymq.SendUnknownError) else Outcome.FAILED
        return Operation(sent, outcome, error=f"{type(error).__name__}: {error}", end_s=time.monotonic())
    # A status other than SEND_OK means that too few replicas have a copy of the message, or that it was not flushed in
    # time. The message may be lost, so the outcome counts as unknown.
    if result.status is not raymq.SendStatus.SEND_OK:
        return Operation(sent, Outcome.UNKNOWN, error=result.status.value, end_s=time.monotonic())
    return Operation(sent, Outcome.OK, result.queue, result.queue_offset, end_s=time.monotonic())


def read_everything(
    mq: raymq.Client, topic: str, history: History, watcher: Watcher, *, more_than: int
) -> Counter[tuple[MessageQueue, int, bytes]]:
    """Read the topic back, and check it against the history of the sends: more than `more_than` messages must be
    acknowledged. Waits until the watcher's consumer has seen as many messages. Returns the stored messages."""
    queues = read_back(mq, topic)
    report = check(history, queues)
    print(report)
    assert report.violations == {}
    assert report.acknowledged > more_than
    stored = Counter(
        (queue, offset, sent.body()) for queue, messages in queues.items() for offset, sent in enumerate(messages)
    )
    eventually(lambda: watcher.failed or len(watcher.seen) >= len(stored), "everything at the consumer")
    return stored


def read_back(mq: raymq.Client, topic: str) -> dict[MessageQueue, list[Sent]]:
    """Read each queue of the topic from offset 0 on. Returns all messages, by queue."""
    queues: dict[MessageQueue, list[Sent]] = {}
    for entry in mq.admin.describe_topic(topic):
        assert entry.min_offset == 0
        messages: list[Sent] = []
        while len(messages) < entry.max_offset:
            result = mq.admin.pull(entry.queue, len(messages), max_messages=1000)
            assert result.status is PullStatus.FOUND
            assert [message.queue_offset for message in result.messages][:1] == [len(messages)]
            messages.extend(Sent.parse(message.body) for message in result.messages)
        queues[entry.queue] = messages
    return queues
