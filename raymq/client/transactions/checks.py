"""Half messages, and the checks of transactions without an outcome.

A producer stores a half message before its local transaction. A thread polls each broker once a second for transactions
to check. The polls also show the broker that this producer is alive. The user's `check` runs in a pool of threads, and
the state that it returns ends the transaction. If `check` returns no outcome, this producer or another producer of the
group checks the transaction again in the next round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from raymq.client.transactions.group_transactions import CHECK_CALL_TIMEOUT_S
from raymq.common.errors import MessageIllegalError, RaymqError
from raymq.common.message import (
    PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRANSACTION_PREPARED,
    Message,
    MessageExt,
    MessageQueue,
    SystemMessage,
    not_a_message,
)
from raymq.common.names import HALF_TOPIC, check_user_topic, is_internal_topic
from raymq.common.numbers import LONGEST_TIME_S, NumberRange, number_in
from raymq.common.parallel import start_daemon
from raymq.common.protocol.transactions import EndTransactionRequest, LocalTransactionState, TransactionCheck
from raymq.records.format.decode import read_record
from raymq.records.format.places import RecordPlace
from raymq.remoting.broker_client import broker_client

logger = logging.getLogger(__name__)


class UnsentHalfMessage(SystemMessage, frozen=True, gc=False):
    """A half message before it is sent. Its properties mark it as a part of a transaction. Made by `half_message`."""


IMMUNITY_S: Final = NumberRange(1, int(LONGEST_TIME_S))
"""Valid range of `check_immunity_s`, the age in whole seconds before which brokers do not check a half message."""


def half_message(message: Message, group: str, check_immunity_s: int | None = None) -> UnsentHalfMessage:
    """Make the half message of `message` for a producer group. The half message has no delay, even if `message` has
    one.

    `check_immunity_s`: the age in seconds, 1 or more, before which the broker does not check the transaction. None: the
    store's transaction_time_out_ms. Raises MessageIllegalError for retry and dead-letter topics, IllegalNameError for
    system topics, and InvalidArgumentError if `check_immunity_s` is out of range.
    """
    if not isinstance(message, Message):
        raise MessageIllegalError(not_a_message(message))
    if is_internal_topic(check_user_topic(message.topic)):
        raise MessageIllegalError(f"a transaction cannot send to {message.topic}, which belongs to a consumer group")
    system = {PROPERTY_TRANSACTION_PREPARED: "true", PROPERTY_PRODUCER_GROUP: group}
    if check_immunity_s is not None:
        age_s = number_in("check_immunity_s", check_immunity_s, IMMUNITY_S)
        system[PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS] = str(age_s)
    return UnsentHalfMessage(
        message.topic,
        message.body,
        message.tags,
        message.keys,
        {**message.properties, **system},
        message.flag,
        wait_store_msg_ok=message.wait_store_msg_ok,
        light_queues=message.light_queues,
    )


CHECK_POLL_INTERVAL_S: Final = 1.0
CHECKS_PENDING_MAX: Final = 2000
"""Maximum number of transaction checks that run or wait for a thread in one producer. A producer drops further checks,
because the broker sends each check again later."""
CHECKS_STOP_TIMEOUT_S: Final = 5.0

Check = Callable[[MessageExt], LocalTransactionState | None]
"""The user's function that returns the outcome of a message's local transaction. None stands for UNKNOW."""


def checked_message(check: TransactionCheck, broker_name: str) -> MessageExt:
    """Return the message of a transaction check, with its real topic and queue. If the body cannot be read,
    `body_error` is set.

    Raises BodyUnreadableError if the record does not name the real topic and queue.
    """
    queue = MessageQueue(HALF_TOPIC, broker_name, -1)
    half = read_record(check.record, 0, RecordPlace(queue))
    properties = half.system_properties
    try:
        topic, queue_id = properties[PROPERTY_REAL_TOPIC], int(properties[PROPERTY_REAL_QUEUE_ID])
    except (KeyError, ValueError):
        reason = "the record is not a half message" if half.body_error is None else half.body_error.reason
        raise RecordPlace(queue, check.queue_offset, check.physical_offset).error(reason) from None
    return half._in_queue(topic, queue_id)


class CheckListener:
    """Answers the transaction checks of one transaction producer, from construction until `close`. Thread-safe."""

    def __init__(
        self,
        group: str,
        client_id: str,
        check: Check,
        *,
        brokers: Callable[[], Iterable[str]],
        end: Callable[[str, MessageExt, EndTransactionRequest], object],
        threads: int,
    ) -> None:
        """`brokers`: returns the names of all brokers. `end`: ends a message's transaction at the broker group with the
        given name."""
        self._group, self._client_id, self._check = group, client_id, check
        self._brokers, self._end = brokers, end
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"transaction-check-{group}")
        self._lock = threading.Lock()
        self._pending: set[str] = set()
        self._known: set[str] = set()
        self._stop = threading.Event()
        # At the interpreter's exit no thread starts, and another producer of the group answers the checks.
        self._thread = start_daemon(self._run, name=f"transaction-checks-{group}")

    def close(self) -> None:
        """Stop polling brokers for transaction checks, and unregister from the checks of all brokers. Waits a limited
        time for the polling thread. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CHECKS_STOP_TIMEOUT_S)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for name in self._known:
            try:
                broker_client(name).call(
                    "leave_transaction_checks", self._group, self._client_id, timeout_s=CHECK_CALL_TIMEOUT_S
                )
            except RaymqError as error:
                logger.info(
                    "cannot inform broker %s that a producer of group %s has ended: %s",
                    name,
                    self._group,
                    error,
                )

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                names = set(self._brokers())
                self._known |= names
            except RaymqError as error:
                logger.info("cannot find the brokers to poll for transaction checks: %s", error)
                names = self._known
            for name in names:
                self._ask(name)
            self._stop.wait(CHECK_POLL_INTERVAL_S)

    def _ask(self, broker_name: str) -> None:
        try:
            checks: list[TransactionCheck] = broker_client(broker_name).call(
                "take_transaction_checks", self._group, self._client_id, timeout_s=CHECK_CALL_TIMEOUT_S
            )
        except RaymqError as error:
            logger.info("cannot poll broker %s for transaction checks: %s", broker_name, error)
            return
        for check in checks:
            with self._lock:
                known = check.transaction_id in self._pending or len(self._pending) >= CHECKS_PENDING_MAX
                if known or self._stop.is_set():
                    continue
                self._pending.add(check.transaction_id)
            try:
                self._pool.submit(self._answer, broker_name, check)
            # the pool refuses calls while the interpreter shuts down or the producer closes, or no thread can start
            except RuntimeError as error:
                with self._lock:
                    self._pending.discard(check.transaction_id)
                logger.info("cannot check transaction %s; the broker repeats it: %s", check.transaction_id, error)

    def _answer(self, broker_name: str, check: TransactionCheck) -> None:
        try:
            message = checked_message(check, broker_name)
            state = self._check(message)
            if state is None or state == LocalTransactionState.UNKNOW:
                return
            offsets = check.queue_offset, check.physical_offset
            end = EndTransactionRequest(
                self._group, *offsets, int(state), check.transaction_id, from_transaction_check=True
            )
            self._end(broker_name, message, end)
        # The user's check raised an exception, perhaps SystemExit, or the broker is unreachable. The broker repeats the
        # check in the next round.
        except BaseException:
            logger.exception(
                "cannot answer the check of transaction %s; the broker repeats the check", check.transaction_id
            )
        finally:
            with self._lock:
                self._pending.discard(check.transaction_id)
