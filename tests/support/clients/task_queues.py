"""Stand-ins for raymq as the backend of Ray Serve's task queues, without Ray. They keep the task states, the consumer
group and the dead-letter queues of one task queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from raymq.common.errors import ClientStateError
from raymq.common.message import MessageExt
from raymq.common.protocol.group import GroupSummary
from raymq.serve.config import TaskSettings
from raymq.serve.decisions import DEAD
from raymq.serve.states import StateRecord, TaskHistory, decode_state
from raymq.serve.task import Task


def task_message(body: bytes, offset: int, *, reconsume_times: int = 0) -> MessageExt:
    """Return a message that holds a task of the task queue."""
    host = "127.0.0.1:1"
    return MessageExt(
        *(
            "jobs",
            body,
            None,
            (),
            {},
            0,
            "a",
            0,
            offset,
            100 * offset,
            0,
            0,
            host,
            host,
            f"id-{offset}",
            f"{offset:032X}",
        ),
        *(reconsume_times, 0, {}),
    )


class FakeTaskQueue:
    """A fake TaskConnection that also makes the consumers of its task queue. Thread-safe.

    A task is due at its `deliver_at_ms`. After a retry, a task is due immediately, whatever its delay level. When a
    consumer closes, the next consumer receives the messages that were not acknowledged. `failures`: errors that the
    next calls raise, by method name.
    """

    def __init__(self, settings: TaskSettings) -> None:
        self.settings, self.name = settings, f"{settings.group}@here-1"
        self.changed = threading.Condition()
        self.waiting: list[tuple[int, MessageExt]] = []
        """Messages that are not delivered yet, each as (due time in ms since 1970, message)."""
        self.unacknowledged: dict[int, MessageExt] = {}
        self.states: dict[str, list[StateRecord]] = {}
        self.copies: dict[str, list[tuple[MessageExt, str]]] = {}
        self.returned: list[tuple[int, int]] = []
        """Messages that a consumer sent back for a retry, each as (queue offset, delay level)."""
        self.dead: list[MessageExt] = []
        self.sharding_keys: list[str | None] = []
        self.priorities: list[int | None] = []
        self.failures: dict[str, list[Exception]] = {}
        self.taken_at_once: list[int] = []
        """The `max_messages` argument of each poll, in the order of the polls."""
        self.closed = False
        self._offset = 0

    def put(self, body: bytes, *, due_ms: int = 0, reconsume_times: int = 0) -> int:
        """Store a message in the task queue. Returns its offset."""
        with self.changed:
            self._offset += 1
            self.waiting.append((due_ms, task_message(body, self._offset, reconsume_times=reconsume_times)))
            self.changed.notify_all()
            return self._offset

    def words(self, task_id: str) -> list[str]:
        """Return the names of a task's states, in the order in which the task had them."""
        return [state.state.value for state in self.states.get(task_id, [])]

    def _may_fail(self, method: str) -> None:
        with self.changed:
            if self.failures.get(method):
                raise self.failures[method].pop(0)

    # Methods of TaskConnection

    def send(
        self,
        task: Task,
        state: StateRecord,
        *,
        deliver_at_ms: int | None,
        sharding_key: str | None,
        priority: int | None = None,
    ) -> None:
        self._may_fail("send")
        self.sharding_keys.append(sharding_key)
        self.priorities.append(priority)
        self.tell(state, state.encode())
        self.put(task.encode(), due_ms=deliver_at_ms or 0)

    def history(self, task_id: str) -> TaskHistory:
        self._may_fail("history")
        return TaskHistory.of(self.states.get(task_id, []))

    def summary(self) -> GroupSummary:
        self._may_fail("summary")
        count = len(self.waiting) + len(self.unacknowledged)
        return GroupSummary(self.settings.group, (), count, 5, 0, len(self.dead))

    def consumer(self) -> FakeTaskConsumer:
        return FakeTaskConsumer(self)

    def tell(self, state: StateRecord, body: bytes) -> Future[object]:
        future: Future[object] = Future()
        try:
            self._may_fail("tell")
        except Exception as error:
            future.set_exception(error)
            return future
        assert decode_state(body) == state
        with self.changed:
            self.states.setdefault(state.task_id, []).append(state)
            self.changed.notify_all()
        future.set_result(object())
        return future

    def copy(self, message: MessageExt, topic: str, error: str) -> None:
        self._may_fail("copy")
        self.copies.setdefault(topic, []).append((message, error))

    def close(self) -> None:
        self.closed = True


class FakeTaskConsumer:
    """Fake consumer that receives the messages of a FakeTaskQueue."""

    def __init__(self, tasks: FakeTaskQueue) -> None:
        self._tasks = tasks
        self._mine: set[int] = set()
        self.closed = False

    def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[MessageExt]:
        tasks = self._tasks
        tasks._may_fail("poll")
        with tasks.changed:
            if self.closed:
                raise ClientStateError("closed")
            tasks.taken_at_once.append(max_messages)
            tasks.changed.wait_for(self._due, min(timeout_s, 0.02))
            taken = [] if self.closed else self._due()[:max_messages]
            tasks.waiting = [(due_ms, message) for due_ms, message in tasks.waiting if message not in taken]
            for message in taken:
                tasks.unacknowledged[message.queue_offset] = message
                self._mine.add(message.queue_offset)
            return taken

    def _due(self) -> list[MessageExt]:
        now_ms = time.time() * 1000
        return [message for due_ms, message in self._tasks.waiting if due_ms <= now_ms]

    def acknowledge(self, messages: Sequence[MessageExt]) -> None:
        with self._tasks.changed:
            if self.closed:
                raise ClientStateError("closed")
            for message in messages:
                del self._tasks.unacknowledged[message.queue_offset]
                self._mine.discard(message.queue_offset)
            self._tasks.changed.notify_all()

    def send_back(self, message: MessageExt, *, delay_level: int = 0, max_reconsume_times: int = -1) -> None:
        tasks = self._tasks
        tasks._may_fail("send_back")
        assert message.reconsume_times < max_reconsume_times
        tasks.returned.append((message.queue_offset, delay_level))
        if delay_level == DEAD:
            tasks.dead.append(message)
        else:
            tasks.put(message.body, reconsume_times=message.reconsume_times + 1)

    def close(self) -> None:
        self._tasks._may_fail("close")
        with self._tasks.changed:
            self.closed = True
            for offset in sorted(self._mine):
                self._tasks.waiting.append((0, self._tasks.unacknowledged.pop(offset)))
            self._mine.clear()
            self._tasks.changed.notify_all()
