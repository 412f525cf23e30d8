"""SharedTasks receives the tasks of a replica in the consume mode "share": replicas share single tasks, not queues.

So the number of busy replicas is not bounded by the number of queues, and a new replica gets tasks at once. Each task
has a lease, which is renewed until the task is acknowledged. If the replica dies, other replicas get its tasks after
TASK_LEASE_S. TaskRules alone decide when a task is given up, as in the mode "queue": a failed task is sent back to the
group's retry topic, and a task whose replica died is delivered again as the same attempt.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

from raymq.client.consumer.simple.engine import SimpleEngine
from raymq.client.consumer.simple.received_message import ReceivedMessage, require_received
from raymq.common.errors import RaymqError
from raymq.common.message import MessageExt

TASK_LEASE_S: Final = 15.0
"""Time in s after which the tasks of a replica that died are delivered again, as in the mode "queue"."""

logger = logging.getLogger(__name__)


class SharedTasks:
    """A TaskSource (raymq.serve.worker) for the consume mode "share". Thread-safe. `engine`: renews its leases, and
    gives up no message by itself."""

    def __init__(self, engine: SimpleEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str, int, int], ReceivedMessage] = {}
        """The received tasks that are not acknowledged, by topic, broker, queue id and offset."""

    def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[MessageExt]:
        """Receive up to `max_messages` tasks. Waits up to `timeout_s` for the first."""
        messages = self._engine.receive(max_messages, TASK_LEASE_S, timeout_s)
        with self._lock:
            self._held.update((_place(message), message) for message in messages)
        return list(messages)

    def acknowledge(self, messages: Sequence[MessageExt]) -> None:
        """Acknowledge tasks. Durable on return. Errors as of SimpleConsumer.ack."""
        received = [require_received(message) for message in messages]  # type: ignore[arg-type]  # it checks the type
        self._engine.ack(received)
        with self._lock:
            for message in received:
                self._held.pop(_place(message), None)

    def send_back(self, message: MessageExt, *, delay_level: int = 0, max_reconsume_times: int = -1) -> None:
        """Deliver a task again later, or store it as a dead letter, as PullConsumer.send_back does. The task must still
        be acknowledged."""
        self._engine.send_back(message, delay_level, max_reconsume_times)

    def close(self) -> None:
        """Return the tasks that are not acknowledged to the brokers at once, and close the consumer. Idempotent."""
        with self._lock:
            left, self._held = list(self._held.values()), {}
        if left and not self._engine.closed:
            try:
                self._engine.change_invisible(left, 0.0, counted=False)
            except RaymqError as error:
                logger.warning(
                    "%d tasks are delivered again after their leases of %g s: %s", len(left), TASK_LEASE_S, error
                )
        self._engine.close()


def _place(message: ReceivedMessage) -> tuple[str, str, int, int]:
    receipt = message._receipt
    return receipt.topic, receipt.broker_name, receipt.queue_id, message.queue_offset
